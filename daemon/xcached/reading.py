"""What is read of the store on the thread that serves: it never waits for the one that writes."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from typing import NamedTuple

from xcache import framing, protocol
from xcache.errors import ProtocolError

# Of the answers that are kept for who asks again.
_MOST_FOUND_BYTES = 4 * 1024 * 1024


class Hit(NamedTuple):
    """What is stored under a key, and the answer that tells of it."""

    digest: str
    is_inline: bool
    writer_uid: int
    toolchain: str
    # None where the row does not hold what it should: anybody who may write the file can alter it.
    answer: framing.Packed | None


class Reading:
    """Rows, by a connection that only reads."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._db = database
        # What was found since anything was last written.
        self._found: dict[str, list[Hit]] = {}
        self._found_at = self._found_bytes = 0

    def find(self, key: str) -> list[Hit]:
        """What is stored under ``key``: one for each writer."""
        # Whoever it was that wrote, this thread's neighbour or somebody else.
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        if self._found_at != version:
            self._found_at, self._found_bytes = version, 0
            self._found.clear()
        hits = self._found.get(key)
        if hits is None:
            rows = self._db.execute(
                "SELECT entries.blob, blobs.stored_size, entries.compile_seconds, blobs.content, entries.writer_uid,"
                " entries.toolchain_component FROM entries JOIN blobs ON blobs.digest = entries.blob"
                " WHERE entries.key = ?",
                (key,),
            )
            hits = [_hit(*row) for row in rows]
            size = sum(len(hit.answer.fields) for hit in hits if hit.answer)
            if hits and self._found_bytes + size <= _MOST_FOUND_BYTES:
                self._found[key] = hits
                self._found_bytes += size
        return hits

    def why_not(self, key: str, trusts: Callable[[int], bool]) -> str | None:
        """Why there can be no entry under ``key``, if somebody who is trusted has found out."""
        rows = self._db.execute("SELECT reason, writer_uid FROM not_cacheable WHERE key = ?", (key,))
        return next((str(reason) for reason, writer in rows if trusts(writer)), None)

    def expected_seconds(
        self, key: str, program_digest: str, trusts: Callable[[int], bool] | None = None
    ) -> float | None:
        """How long it took to compile this, or else the same program in another way, when that was last done.

        With ``trusts``, by the word of some writers only. Whose word it was about an entry that is gone is not known.
        """
        row = self._db.execute("SELECT seconds FROM compile_times WHERE key = ?", (key,)).fetchone()
        if row is not None and trusts is None:
            return float(row[0])
        sql = "SELECT writer_uid, max(compile_seconds) FROM entries WHERE program = ? GROUP BY writer_uid"
        rows = self._db.execute(sql, (program_digest,)).fetchall()
        return max((float(seconds) for writer, seconds in rows if trusts is None or trusts(writer)), default=None)

    def keys_behind(self, key: str, count: int) -> list[str]:
        """So many of the keys there may be something under, in their order, after this one."""
        rows = self._db.execute(
            # Digests end before "g"; what somebody altered would not sort as it reads, and be read again and again.
            "SELECT key FROM entries WHERE key > :key AND key < 'g'"
            " UNION SELECT key FROM not_cacheable WHERE key > :key AND key < 'g' ORDER BY key LIMIT :count",
            {"key": key, "count": count},
        )
        return [str(key) for (key,) in rows]

    def totals(self) -> dict[str, int]:
        """How many entries there are, and how many bytes they take."""
        return dict(self._db.execute("SELECT name, amount FROM totals").fetchall())


def _hit(digest: str, size: int, seconds: float, content: bytes | None, writer: int, toolchain: str) -> Hit:
    answer = None
    with contextlib.suppress(ProtocolError):
        answer = framing.pack(protocol.Found(digest, size, seconds, content))
    return Hit(digest, content is not None, writer, toolchain, answer)
