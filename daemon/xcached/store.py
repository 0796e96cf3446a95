"""The store: SQLite rows, and files beside it for what is large.

What changes it belongs to the thread that writes; ``reading``, ``known`` and ``files.open`` are for the one that
serves.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from xcache import protocol
from xcache.errors import RefusedError, StoreError
from xcached.ageing import AgeClock
from xcached.blobs import BlobFiles
from xcached.database import Database, is_full
from xcached.eviction import Usage, time_passed, used, worth
from xcached.known import KnownKeys
from xcached.reading import Reading

# Rows and descriptions take room beside the bytes that are counted. Each is bounded, and so is how many there are: as
# many entries as there would be if none were smaller than this.
_LONGEST_NAME, _LONGEST_DESCRIPTION = 500, 4096
LEAST_ROOM = 4096
_MOST_MARKS = _MOST_COMPILE_TIMES = 100_000
MOST_COUNTERS = 1000


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

    def __init__(self, directory: Path, max_size: int, user_quota: int = 0, max_age: float = 0.0) -> None:
        self.directory = directory
        # Who put something since there was last looked at quotas; None for everybody.
        self.grown: set[int | None] = set()
        self.limit(max_size, user_quota, max_age)
        self.database = Database(directory)
        self.part = self.database.part
        self._db = self.database.writing
        self.reading = Reading(self.database.reading)
        try:
            self.files = BlobFiles(directory / "blobs")
        except OSError as error:
            self.database.close()
            raise StoreError(f"{directory / 'blobs'} cannot be used: {error.strerror}") from None
        self.age_clock = AgeClock(self._db, max_age)
        self.used_order, self._time = self._last_use()
        # Whether what is pinned is not what it was.
        self.pins_changed = True
        self.known = KnownKeys(self.reading.keys_behind)
        # The keys that the transaction under way adds.
        self._brought: list[str] = []

    def limit(self, max_size: int, user_quota: int, max_age: float) -> None:
        """How much there may be from now on, in all and of each user, and how old (0: no limit)."""
        self.max_size, self.user_quota, self.max_age = max_size, user_quota, max_age
        self.grown.add(None)

    def close(self) -> None:
        """Close the database, which leaves no journal behind."""
        self.database.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside, or nothing of it, is on disk when this is left."""
        self._brought.clear()
        with self.database.transaction():
            yield
        self.known.note(self._brought)

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
        pinned = self._refers("entries", key=put.key, writer_uid=writer.uid, pinned=1)
        loose = self.remove([Entry(put.key, writer.uid)])
        usage = used(self._usage_before(put.key), self._tick())
        loose += self._insert_blob(executable)
        if not self._refers("programs", digest=put.program_digest, writer_uid=writer.uid):
            loose += self._insert_blob(program)
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
        # Of the program that is there, which need not be the one that came.
        footprint = put.stored_size + kept
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
            footprint=footprint,
            uses=usage.uses,
            used_time=usage.time,
            worth=worth(usage, put.compile_seconds, footprint),
            used_clock=self.age_clock.now(),
            pinned=int(pinned),
            **{f"{name}_component": put.components.get(name) for name in protocol.DESCRIBED_COMPONENTS},
        )
        self.grown.add(writer.uid)
        self._brought.append(put.key)
        return loose

    def mark_not_cacheable(self, mark: protocol.MarkNotCacheable, uid: int) -> None:
        """Within a transaction: remember that there can be no entry; the oldest marks are forgotten first."""
        self._db.execute(
            "INSERT OR REPLACE INTO not_cacheable (key, writer_uid, module_name, reason, created_at)"
            " VALUES (?, ?, ?, ?, ?)",
            (mark.key, uid, mark.module_name[:_LONGEST_NAME], mark.reason[:_LONGEST_NAME], time.time()),
        )
        self._forget_oldest("not_cacheable", _MOST_MARKS)
        self._brought.append(mark.key)

    def forget_marks(self, uid: int | None) -> None:
        """Within a transaction: forget what is known not to be cacheable, by one user or by all."""
        self._db.execute("DELETE FROM not_cacheable WHERE writer_uid = coalesce(?, writer_uid)", (uid,))

    def remove(self, entries: Iterable[Entry]) -> list[str]:
        """Within a transaction: delete entries and what only they used. Returns digests of files to delete after."""
        loose: list[str] = []
        for entry in entries:
            self._db.execute("DELETE FROM not_cacheable WHERE key = ? AND writer_uid = ?", entry)
            row = self._db.execute(
                "SELECT blob, program, pinned FROM entries WHERE key = ? AND writer_uid = ?", entry
            ).fetchone()
            if row is None:
                continue
            blob, program, pinned = row
            self.pins_changed |= bool(pinned)
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

    def let_go(self, entries: Sequence[Entry], counted_as: str = "") -> int:
        """Remove entries and delete their files; how many there were. On a full disk that takes some room first."""
        at, together, files = 0, len(entries), 0
        while at < len(entries):
            going = entries[at : at + together]
            try:
                with self.transaction():
                    loose = self.remove(going)
                    if counted_as:
                        self.add_statistics({counted_as: len(going)})
            except sqlite3.Error as error:
                if not is_full(error) or not (self.database.make_do() or together > 1):
                    raise
                # Less at a time may fit into what there is.
                together = max(1, together // 2)
            else:
                files += self.delete_files(loose)
                at += together
        return files

    def delete_files(self, digests: Iterable[str]) -> int:
        """After a commit: delete files that nothing refers to; how many there were."""
        return sum(self.files.delete(digest) for digest in digests if not self._is_in_file(digest))

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
        for entry, use in uses.items():
            row = self._db.execute(
                "SELECT uses, used_time, compile_seconds, footprint FROM entries WHERE key = ? AND writer_uid = ?",
                entry,
            ).fetchone()
            # Anybody who may write the file can alter what stands there.
            if row is None or not all(type(value) in (int, float) for value in row):
                continue
            usage = used(Usage(*row[:2]), self._tick(use.hits), use.hits)
            self._db.execute(
                # Nothing of this is told by a clock that jumps, except for people.
                "UPDATE entries SET hits = hits + ?, last_used_at = ?, used_order = ?, uses = ?, used_time = ?,"
                " worth = ?, used_clock = ? WHERE key = ? AND writer_uid = ?",
                (
                    use.hits,
                    use.last_used_at,
                    self._next_order(),
                    *usage,
                    worth(usage, *row[2:]),
                    self.age_clock.now(),
                    *entry,
                ),
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

    def sweep(self) -> int:
        """Delete files no row speaks of: what was written just before a crash."""
        return sum(self.sweep_by_steps())

    def sweep_by_steps(self) -> Iterator[int]:
        """The same, folder by folder."""
        yield self.files.clear_unfinished()
        for digests in self.files.by_folder():
            yield self.delete_files(digests)

    def _last_use(self) -> tuple[int, float]:
        """Where the order of uses, and the store's own time, have come to."""
        rows = [
            self._db.execute(sql).fetchone() or (0, 0.0)
            for sql in (
                # As numbers: anybody who may write the file can alter what stands there.
                "SELECT CAST(used_order AS INTEGER), CAST(used_time AS REAL) FROM entries WHERE pinned = 0"
                " ORDER BY used_order DESC LIMIT 1",
                "SELECT CAST(used_order AS INTEGER), CAST(used_time AS REAL) FROM entries WHERE pinned = 1"
                " ORDER BY used_order DESC LIMIT 1",
            )
        ]
        return max(order or 0 for order, _ in rows), max(time or 0.0 for _, time in rows)

    def _usage_before(self, key: str) -> Usage:
        """How much an entry was used that was here before."""
        row = self._db.execute("SELECT uses, used_time FROM compile_times WHERE key = ?", (key,)).fetchone()
        return Usage(*row) if row and all(type(value) in (int, float) for value in row) else Usage()

    def _tick(self, uses: int = 1) -> float:
        """The store's own time: it goes on with every use, the slower the more entries there are."""
        (entries,) = self._db.execute("SELECT amount FROM totals WHERE name = 'entries'").fetchone()
        self._time += time_passed(entries, uses)
        return self._time

    def _next_order(self) -> int:
        self.used_order += 1
        return self.used_order

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

    def _insert_blob(self, source: Source) -> Sequence[str]:
        """Its digest, where a row may have taken the place of a file."""
        if self._refers("blobs", digest=source.digest):
            self._db.execute("UPDATE blobs SET content = ? WHERE digest = ?", (source.content, source.digest))
            return (source.digest,)
        self._insert("blobs", digest=source.digest, stored_size=source.size, content=source.content)
        return ()

    def _drop_blob(self, digest: str) -> Sequence[str]:
        if self._refers("entries", blob=digest) or self._refers("programs", blob=digest):
            return ()
        self._db.execute("DELETE FROM blobs WHERE digest = ?", (digest,))
        return (digest,)

    def _insert(self, table: str, **row: object) -> None:
        places = ", ".join("?" * len(row))
        sql = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})"  # noqa: S608 - names of our own
        self._db.execute(sql, tuple(row.values()))
