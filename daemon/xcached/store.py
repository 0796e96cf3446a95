"""The store: SQLite rows, and files beside it for what is large.

What readers ask belongs to the thread that serves, everything else to the one that writes.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from xcache import protocol
from xcache.errors import RefusedError, StoreError
from xcached.blobs import BlobFiles
from xcached.database import Database
from xcached.eviction import Candidate, least_recently_used

logger = logging.getLogger("xcached")

_EVICTED_AT_ONCE = 64
_PAGES_AT_ONCE = 1024
# Rows and descriptions take room beside the bytes that are counted. Each is bounded, and so is how many there are: as
# many entries as there would be if none were smaller than this.
_LONGEST_NAME, _LONGEST_DESCRIPTION = 500, 4096
_LEAST_ROOM = 4096
_MOST_MARKS = _MOST_COMPILE_TIMES = 100_000
MOST_COUNTERS = 1000


class Hit(NamedTuple):
    """What is stored under a key: the bytes, or where to read them."""

    digest: str
    stored_size: int
    compile_seconds: float
    content: bytes | None
    writer_uid: int
    toolchain: str

    @property
    def is_sound(self) -> bool:
        """Whether the row holds what it should: anybody who may write the file can alter it."""
        sizes = type(self.stored_size) is int and type(self.compile_seconds) in (int, float)
        return sizes and type(self.digest) is str and type(self.content) in (bytes, type(None))


class Use(NamedTuple):
    """How often an entry was asked for, and when last."""

    hits: int
    last_used_at: float


class Writer(NamedTuple):
    """Who wrote an entry."""

    uid: int
    pid: int
    program: str


class Source(NamedTuple):
    """A content on its way in: bytes, or a descriptor to copy them from."""

    digest: str
    size: int
    content: bytes | None
    descriptor: int | None


class Entry(NamedTuple):
    """An entry by what tells it from all others."""

    key: str
    writer_uid: int


class Store:
    """Opens or makes the store in a folder; NewerStoreError for one that a newer xcache wrote."""

    def __init__(self, directory: Path, max_size: int, user_quota: int = 0) -> None:
        self.max_size = max_size
        self.user_quota = user_quota
        self.database = Database(directory)
        self.transaction, self.part = self.database.transaction, self.database.part
        self._db = self.database.writing
        self._reading = self.database.reading
        try:
            self.files = BlobFiles(directory / "blobs")
        except OSError as error:
            self.database.close()
            raise StoreError(f"{directory / 'blobs'} cannot be used: {error.strerror}") from None
        (last,) = self._db.execute("SELECT max(used_order) FROM entries").fetchone()
        self._used_order = last or 0
        # Who put something since there was last looked at quotas.
        self._grown: set[int] = set()

    def close(self) -> None:
        """Close the database, which leaves no journal behind."""
        self.database.close()

    # What readers ask, on the thread that serves.

    def find(self, key: str) -> list[Hit]:
        """What is stored under ``key``: one for each writer."""
        rows = self._reading.execute(
            "SELECT entries.blob, blobs.stored_size, entries.compile_seconds, blobs.content, entries.writer_uid,"
            " entries.toolchain_component FROM entries JOIN blobs ON blobs.digest = entries.blob WHERE entries.key = ?",
            (key,),
        )
        return [Hit(*row) for row in rows]

    def why_not(self, key: str, trusts: Callable[[int], bool]) -> str | None:
        """Why there can be no entry under ``key``, if somebody who is trusted has found out."""
        rows = self._reading.execute("SELECT reason, writer_uid FROM not_cacheable WHERE key = ?", (key,))
        return next((str(reason) for reason, writer in rows if trusts(writer)), None)

    def expected_seconds(
        self, key: str, program_digest: str, trusts: Callable[[int], bool] | None = None
    ) -> float | None:
        """How long it took to compile this, or else the same program in another way, when that was last done.

        With ``trusts``, by the word of some writers only. Whose word it was about an entry that is gone is not known.
        """
        row = self._reading.execute("SELECT seconds FROM compile_times WHERE key = ?", (key,)).fetchone()
        if row is not None and trusts is None:
            return float(row[0])
        sql = "SELECT writer_uid, max(compile_seconds) FROM entries WHERE program = ? GROUP BY writer_uid"
        rows = self._reading.execute(sql, (program_digest,)).fetchall()
        return max((float(seconds) for writer, seconds in rows if trusts is None or trusts(writer)), default=None)

    def totals(self) -> dict[str, int]:
        """How many entries there are, and how many bytes they take."""
        return dict(self._reading.execute("SELECT name, amount FROM totals").fetchall())

    # What changes the store, on the thread that writes.

    def has(self, entry: Entry) -> bool:
        """Whether there is such an entry, with something in it."""
        sql = "SELECT 1 FROM entries JOIN blobs ON blobs.digest = entries.blob WHERE key = ? AND writer_uid = ?"
        return self._db.execute(sql, entry).fetchone() is not None

    def accept(self, source: Source) -> None:
        """Make sure a content is what it was announced to be, and bring a large one to disk.

        Ahead of the transaction that speaks of it; also when it is there already, since what is there may be damaged.
        """
        if source.descriptor is not None:
            self.files.write(source.descriptor, source.size, source.digest)
        elif (
            source.content is None
            or len(source.content) != source.size
            or hashlib.sha256(source.content).hexdigest() != source.digest
        ):
            raise RefusedError("wrong digest", "the bytes are not those of the digest that was given")

    def put(self, put: protocol.Put, executable: Source, program: Source, writer: Writer) -> list[str]:
        """Within a transaction: add or replace an entry. Returns digests that nothing may refer to any more."""
        loose = self.remove([Entry(put.key, writer.uid)])
        self._insert_blob(executable)
        if not self._refers("programs", digest=put.program_digest, writer_uid=writer.uid):
            self._insert_blob(program)
            self._insert(
                "programs",
                digest=put.program_digest,
                writer_uid=writer.uid,
                raw_size=put.program_raw_size,
                codec=put.codec,
                blob=program.digest,
            )
        self._db.executemany(
            "INSERT OR IGNORE INTO components (digest, name, description) VALUES (?, ?, ?)",
            [
                (put.components[name], name, put.details[name][:_LONGEST_DESCRIPTION])
                for name in protocol.DESCRIBED_COMPONENTS
                if name in put.details
            ],
        )
        (kept,) = self._db.execute(
            "SELECT blobs.stored_size FROM programs JOIN blobs ON blobs.digest = programs.blob"
            " WHERE programs.digest = ? AND programs.writer_uid = ?",
            (put.program_digest, writer.uid),
        ).fetchone()
        now = time.time()
        self._insert(
            "entries",
            key=put.key,
            writer_uid=writer.uid,
            module_name=put.module_name[:_LONGEST_NAME],
            platform=put.platform[:_LONGEST_NAME],
            device_kind=put.device_kind[:_LONGEST_NAME],
            jaxlib_version=put.jaxlib_version[:_LONGEST_NAME],
            blob=put.digest,
            codec=put.codec,
            raw_size=put.raw_size,
            stored_size=put.stored_size,
            compile_seconds=put.compile_seconds,
            created_at=now,
            last_used_at=now,
            used_order=self._next_order(),
            hits=0,
            writer_pid=writer.pid,
            writer_program=writer.program,
            program=put.program_digest,
            # Of the program that is there, which need not be the one that came.
            footprint=put.stored_size + kept,
            **{f"{name}_component": put.components.get(name) for name in protocol.DESCRIBED_COMPONENTS},
        )
        self._grown.add(writer.uid)
        return loose

    def mark_not_cacheable(self, mark: protocol.MarkNotCacheable, uid: int) -> None:
        """Within a transaction: remember that there can be no entry; the oldest marks are forgotten first."""
        self._db.execute(
            "INSERT OR REPLACE INTO not_cacheable (key, writer_uid, module_name, reason, created_at)"
            " VALUES (?, ?, ?, ?, ?)",
            (mark.key, uid, mark.module_name[:_LONGEST_NAME], mark.reason[:_LONGEST_NAME], time.time()),
        )
        self._forget_oldest("not_cacheable", _MOST_MARKS)

    def forget_marks(self, uid: int | None) -> None:
        """Within a transaction: forget what is known not to be cacheable, by one user or by all."""
        self._db.execute("DELETE FROM not_cacheable WHERE writer_uid = coalesce(?, writer_uid)", (uid,))

    def remove(self, entries: Iterable[Entry]) -> list[str]:
        """Within a transaction: delete entries and what only they used. Returns digests of files to delete after."""
        loose: list[str] = []
        for entry in entries:
            self._db.execute("DELETE FROM not_cacheable WHERE key = ? AND writer_uid = ?", entry)
            row = self._db.execute(
                "SELECT blob, program FROM entries WHERE key = ? AND writer_uid = ?", entry
            ).fetchone()
            if row is None:
                continue
            blob, program = row
            self._db.execute("DELETE FROM entries WHERE key = ? AND writer_uid = ?", entry)
            loose += self._drop_blob(blob)
            owned = (program, entry.writer_uid)
            if not self._refers("entries", program=program, writer_uid=entry.writer_uid):
                found = self._db.execute(
                    "SELECT blob FROM programs WHERE digest = ? AND writer_uid = ?", owned
                ).fetchone()
                self._db.execute("DELETE FROM programs WHERE digest = ? AND writer_uid = ?", owned)
                loose += self._drop_blob(found[0]) if found else ()
        if loose:
            self._forget_oldest("compile_times", _MOST_COMPILE_TIMES)
        return loose

    def delete_files(self, digests: Iterable[str]) -> None:
        """After a commit: delete files that nothing refers to."""
        for digest in digests:
            if not self._is_in_file(digest):
                self.files.delete(digest)

    def totals_now(self) -> dict[str, int]:
        """The totals, for the thread that writes."""
        return dict(self._db.execute("SELECT name, amount FROM totals").fetchall())

    def entries_under(self, key: str) -> list[Entry]:
        """The entries and marks of all writers under a key."""
        sql = (
            "SELECT key, writer_uid FROM entries WHERE key = :key"
            " UNION SELECT key, writer_uid FROM not_cacheable WHERE key = :key"
        )
        return [Entry(*row) for row in self._db.execute(sql, {"key": key})]

    def entries_of(self, uid: int | None) -> list[Entry]:
        """All entries, or those of one writer."""
        sql = "SELECT key, writer_uid FROM entries WHERE writer_uid = coalesce(?, writer_uid)"
        return [Entry(*row) for row in self._db.execute(sql, (uid,))]

    def note_uses(self, uses: Mapping[Entry, Use]) -> None:
        """Within a transaction: add hits; ``uses`` are in the order of the last use."""
        self._db.executemany(
            # The order is one of its own, so that a clock which jumps changes nothing about what is evicted.
            "UPDATE entries SET hits = hits + ?, last_used_at = ?, used_order = ? WHERE key = ? AND writer_uid = ?",
            [(use.hits, use.last_used_at, self._next_order(), *entry) for entry, use in uses.items()],
        )

    def add_statistics(self, counts: Mapping[str, float]) -> None:
        """Within a transaction: add to what was counted."""
        self._db.executemany(
            # Clients name the reasons and kinds they count: of those there are few, or something is wrong.
            "INSERT INTO statistics (name, amount) SELECT :name, :amount"
            " WHERE (SELECT count(*) FROM statistics) < :most OR EXISTS (SELECT 1 FROM statistics WHERE name = :name)"
            " ON CONFLICT (name) DO UPDATE SET amount = amount + excluded.amount",
            [{"name": name, "amount": amount, "most": MOST_COUNTERS} for name, amount in counts.items()],
        )

    def zero_statistics(self) -> None:
        """Within a transaction: begin to count anew."""
        self._db.execute("DELETE FROM statistics")
        self.add_statistics({"since": time.time()})

    def evict(self) -> tuple[int, int]:
        """Make room while there is too much; returns how many entries and bytes went."""
        before = self.totals_now()
        while self._grown and self.user_quota:
            uid = self._grown.pop()
            while (excess := self._bytes_of(uid) - self.user_quota) > 0 and self._evict_some(excess, uid):
                pass
        while self.max_size:
            totals = self.totals_now()
            excess = totals["bytes"] - self.max_size
            if totals["entries"] > max(1, self.max_size // _LEAST_ROOM):
                excess = max(excess, 1)
            if excess <= 0 or not self._evict_some(excess, None):
                break
        after = self.totals_now()
        return before["entries"] - after["entries"], before["bytes"] - after["bytes"]

    def give_back_room(self) -> None:
        """Return some of the database's free pages to the file system: in steps, so that nobody has to wait."""
        if self._db.execute("PRAGMA freelist_count").fetchone()[0]:
            # It frees one page a step, and execute() takes only one where a statement has no columns.
            self._db.executescript(f"PRAGMA incremental_vacuum({_PAGES_AT_ONCE})")

    def sweep(self) -> int:
        """Delete files no row speaks of: what was written just before a crash."""
        count = self.files.clear_unfinished()
        for digest in self.files.all():
            if not self._is_in_file(digest):
                self.files.delete(digest)
                count += 1
        return count

    def _evict_some(self, excess: int, uid: int | None) -> int:
        """Evict what was used longest ago, of one user or of all, until ``excess`` bytes are free or some have gone."""
        chosen = least_recently_used(self._oldest(uid), excess)
        if chosen:
            with self.transaction():
                loose = self.remove(chosen)
                self.add_statistics({"evictions": len(chosen)})
            self.delete_files(loose)
        return len(chosen)

    def _oldest(self, uid: int | None) -> Iterator[Candidate[Entry]]:
        """The entries used longest ago. A program that others have as well is counted as free with the last of them."""
        cursor = self._db.execute(
            # CROSS JOIN keeps the order of the tables: an index of used_order, then two look-ups for each row.
            "SELECT entries.key, entries.writer_uid, entries.stored_size, entries.program, blobs.stored_size,"  # noqa: S608
            " (SELECT count(*) FROM (SELECT 1 FROM entries other WHERE other.program = entries.program"
            " AND other.writer_uid = entries.writer_uid LIMIT :more))"
            " FROM entries CROSS JOIN programs"
            " ON programs.digest = entries.program AND programs.writer_uid = entries.writer_uid"
            " CROSS JOIN blobs ON blobs.digest = programs.blob"
            f" {'' if uid is None else 'WHERE entries.writer_uid = :uid'} ORDER BY entries.used_order LIMIT :most",
            {"most": _EVICTED_AT_ONCE, "more": _EVICTED_AT_ONCE + 1, "uid": uid},
        )
        for key, writer, size, program, program_size, sharers in cursor.fetchall():
            yield Candidate(Entry(key, writer), size, f"{writer} {program}", program_size, sharers)

    def _bytes_of(self, uid: int) -> int:
        row = self._db.execute("SELECT bytes FROM users WHERE uid = ?", (uid,)).fetchone()
        return row[0] if row else 0

    def _next_order(self) -> int:
        self._used_order += 1
        return self._used_order

    def _forget_oldest(self, table: str, most: int) -> None:
        sql = f"DELETE FROM {table} WHERE rowid <= (SELECT max(rowid) FROM {table}) - ?"  # noqa: S608
        self._db.execute(sql, (most,))

    def _is_in_file(self, digest: str) -> bool:
        row = self._db.execute("SELECT content IS NULL FROM blobs WHERE digest = ?", (digest,)).fetchone()
        return row is not None and bool(row[0])

    def _refers(self, table: str, **values: object) -> bool:
        where = " AND ".join(f"{column} = ?" for column in values)
        sql = f"SELECT 1 FROM {table} WHERE {where} LIMIT 1"  # noqa: S608 - names of our own
        return self._db.execute(sql, tuple(values.values())).fetchone() is not None

    def _insert_blob(self, source: Source) -> None:
        if self._refers("blobs", digest=source.digest):
            self._db.execute("UPDATE blobs SET content = ? WHERE digest = ?", (source.content, source.digest))
        else:
            self._insert("blobs", digest=source.digest, stored_size=source.size, content=source.content)

    def _drop_blob(self, digest: str) -> Sequence[str]:
        if self._refers("entries", blob=digest) or self._refers("programs", blob=digest):
            return ()
        self._db.execute("DELETE FROM blobs WHERE digest = ?", (digest,))
        return (digest,)

    def _insert(self, table: str, **row: object) -> None:
        places = ", ".join("?" * len(row))
        sql = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})"  # noqa: S608 - names of our own
        self._db.execute(sql, tuple(row.values()))
