"""The serving thread's queries: they never wait for the writer thread."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable
from typing import NamedTuple

from xcache.errors import ProtocolError
from xcache.wire import framing, protocol

# A program may have been stored with ten thousand different options.
_MOST_ROWS_COMPARED = 500
# Many for each program of a prediction.
_MOST_ALIASES_READ = 8000
_ALIASES = "SELECT writer_uid, structure, program, facts, seal FROM aliases"


class Hit(NamedTuple):
    """An entry found under a key, and the answer for the client."""

    digest: str
    is_inline: bool
    writer_uid: int
    flags: str
    platform: str
    toolchain: str
    program: str
    # None if the row's values are malformed: any program that may write the file can alter it.
    answer: protocol.Found | None


class FoundAlias(NamedTuple):
    """An alias, and the answer for the client; None if the row's values are malformed."""

    writer_uid: int
    answer: protocol.Alias | None


class Reader:
    """Queries over a connection that only reads."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._db = database

    def find(self, key: str) -> list[Hit]:
        """Return the entries under ``key``, one for each writer."""
        rows = self._db.execute(
            "SELECT entries.blob, blobs.stored_size, entries.compile_seconds, blobs.content, entries.writer_uid,"
            " entries.flags_component, entries.platform_component, entries.toolchain_component,"
            # CAST, because any program that may write the file can alter the value.
            " CAST(entries.program AS TEXT)"
            " FROM entries JOIN blobs ON blobs.digest = entries.blob WHERE entries.key = ?",
            (key,),
        )
        return [_hit(*row) for row in rows]

    def aliases(self, structure: str) -> list[FoundAlias]:
        """Return the aliases of a structure, one for each writer."""
        rows = self._db.execute(f"{_ALIASES} WHERE structure = ?", (structure,))
        return [_alias(*row) for row in rows]

    def aliases_of(self, programs: Iterable[str]) -> list[FoundAlias]:
        """Return aliases of programs, the newest first."""
        which = "program IN (SELECT value FROM json_each(?)) ORDER BY aliases.rowid DESC LIMIT ?"
        sql = f"{_ALIASES} WHERE {which}"
        return [_alias(*row) for row in self._db.execute(sql, (json.dumps([*programs]), _MOST_ALIASES_READ))]

    def structures(self, most: int) -> list[tuple[int, str]]:
        """Return the writers and structures of up to ``most`` aliases."""
        return self._db.execute("SELECT writer_uid, structure FROM aliases LIMIT ?", (most,)).fetchall()

    def made_from(self, program: str) -> list[tuple[int, str]]:
        """Return the writers and toolchains of some entries that were compiled from a program."""
        sql = "SELECT writer_uid, toolchain_component FROM entries WHERE program = ? LIMIT ?"
        return self._db.execute(sql, (program, _MOST_ROWS_COMPARED)).fetchall()

    def why_not(self, key: str, trusts: Callable[[int], bool]) -> str | None:
        """Return why ``key`` cannot be cached, if a trusted writer has marked it so."""
        rows = self._db.execute("SELECT reason, writer_uid FROM not_cacheable WHERE key = ?", (key,))
        return next((str(reason) for reason, writer in rows if trusts(writer)), None)

    def expected_seconds(
        self, key: str, program_digest: str, trusts: Callable[[int], bool] | None = None
    ) -> float | None:
        """Return the seconds that the last compile of this key took, or else of the same program with other options.

        With ``trusts``, only trusted writers count.
        """
        for sql, about in (
            ("SELECT writer_uid, seconds FROM compile_times WHERE key = ? LIMIT ?", key),
            ("SELECT writer_uid, compile_seconds FROM entries WHERE program = ? LIMIT ?", program_digest),
        ):
            rows = self._db.execute(sql, (about, _MOST_ROWS_COMPARED)).fetchall()
            times = [float(seconds) for writer, seconds in rows if trusts is None or trusts(writer)]
            if times:
                return max(times)
        return None

    def totals(self) -> dict[str, int]:
        """Return the totals by name: entries, bytes, and the bytes of texts."""
        return dict(self._db.execute("SELECT name, amount FROM totals").fetchall())


def _hit(
    digest: str,
    size: int,
    seconds: float,
    content: bytes | None,
    writer: int,
    flags: str,
    platform: str,
    toolchain: str,
    program: str,
) -> Hit:
    found = protocol.Found(digest, size, seconds, content)
    try:
        framing.check(found)
    except ProtocolError:
        return Hit(digest, content is not None, writer, flags, platform, toolchain, program, None)
    return Hit(digest, content is not None, writer, flags, platform, toolchain, program, found)


def _alias(writer: int, structure: str, program: str, facts: bytes, seal: str) -> FoundAlias:
    found = protocol.Alias(structure, program, facts, seal)
    try:
        framing.check(found)
    except ProtocolError:
        return FoundAlias(writer, None)
    return FoundAlias(writer, found if len(facts) <= protocol.MAX_RECORD else None)
