"""The store: SQLite rows, and files beside it for what is large. All methods but ``get`` belong to one thread."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from xcache import protocol
from xcache.errors import NewerStoreError, RefusedError, StoreError
from xcached.blobs import BlobFiles
from xcached.eviction import Candidate, least_recently_used

logger = logging.getLogger("xcached")

_SCHEMA_VERSION = 1
_EVICTED_AT_ONCE = 64
_PAGES_AT_ONCE = 1024
_MOST_MARKS = 100_000
_MOST_COUNTERS = 1000


class Hit(NamedTuple):
    """What is stored under a key: the bytes, or where to read them."""

    digest: str
    stored_size: int
    compile_seconds: float
    content: bytes | None


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


class GoneError(StoreError):
    """The store is not where it was any more."""


class Store:
    """Opens or makes the store in a folder; NewerStoreError for one that a newer xcache wrote."""

    def __init__(self, directory: Path, max_size: int) -> None:
        self.max_size = max_size
        self._path = directory / protocol.DATABASE
        try:
            self._files = BlobFiles(directory / "blobs")
            self._db = self._open()
            self._inode = self._path.stat().st_ino
            self._reading = self._connect()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{self._path} cannot be opened: {error}") from None

    def close(self) -> None:
        """Close the database, which leaves no journal behind."""
        self._reading.close()
        self._db.close()

    # What readers ask, on the thread that serves.

    def get(self, key: str) -> Hit | None:
        """What is stored under ``key``."""
        row = self._reading.execute(
            "SELECT entries.blob, blobs.stored_size, entries.compile_seconds, blobs.content"
            " FROM entries JOIN blobs ON blobs.digest = entries.blob WHERE entries.key = ?",
            (key,),
        ).fetchone()
        return None if row is None else Hit(*row)

    def why_not(self, key: str) -> str | None:
        """Why there can be no entry under ``key``, if that is known."""
        row = self._reading.execute("SELECT reason FROM not_cacheable WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def open_file(self, digest: str) -> int | None:
        """A descriptor of a content that is kept as a file."""
        return self._files.open(digest)

    def totals(self) -> dict[str, int]:
        """How many entries there are, and how many bytes they take."""
        return _totals(self._reading)

    # What changes the store, on the thread that writes.

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside, or nothing of it, is on disk when this is left."""
        self._check_in_place()
        with self._between("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"):
            yield

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """Within a transaction: everything inside, or nothing of it."""
        with self._between("SAVEPOINT part", "RELEASE part", "ROLLBACK TO part; RELEASE part"):
            yield

    @contextlib.contextmanager
    def _between(self, begin: str, end: str, undo: str) -> Iterator[None]:
        self._db.execute(begin)
        try:
            yield
            self._db.execute(end)
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                for statement in undo.split("; "):
                    self._db.execute(statement)
            raise

    def _check_in_place(self) -> None:
        """What is written to a database that somebody deleted is lost, however well it is written."""
        try:
            there = self._path.stat().st_ino == self._inode
        except OSError:
            there = False
        if not there:
            raise GoneError(f"{self._path} was deleted or replaced")

    def has(self, key: str) -> bool:
        """Whether there is an entry under ``key``."""
        return self._refers("entries", "key", key)

    def accept(self, source: Source) -> None:
        """Make sure a content is what it was announced to be, and bring a large one to disk.

        Ahead of the transaction that speaks of it; also when it is there already, since what is there may be damaged.
        """
        if source.descriptor is not None:
            self._files.write(source.descriptor, source.size, source.digest)
        elif (
            source.content is None
            or len(source.content) != source.size
            or hashlib.sha256(source.content).hexdigest() != source.digest
        ):
            raise RefusedError("wrong digest", "the bytes are not those of the digest that was given")

    def put(self, put: protocol.Put, executable: Source, program: Source, writer: Writer) -> list[str]:
        """Within a transaction: add or replace an entry. Returns digests that nothing may refer to any more."""
        loose = self.remove([put.key])
        self._insert_blob(executable)
        if not self._refers("programs", "digest", put.program_digest):
            self._insert_blob(program)
            self._insert(
                "programs",
                digest=put.program_digest,
                raw_size=put.program_raw_size,
                codec=put.codec,
                blob=program.digest,
            )
        self._db.executemany(
            "INSERT OR IGNORE INTO components (digest, name, description) VALUES (?, ?, ?)",
            [
                (put.components[name], name, put.details[name])
                for name in protocol.DESCRIBED_COMPONENTS
                if name in put.details
            ],
        )
        now = time.time()
        self._insert(
            "entries",
            key=put.key,
            module_name=put.module_name,
            platform=put.platform,
            device_kind=put.device_kind,
            jaxlib_version=put.jaxlib_version,
            blob=put.digest,
            codec=put.codec,
            raw_size=put.raw_size,
            stored_size=put.stored_size,
            compile_seconds=put.compile_seconds,
            created_at=now,
            last_used_at=now,
            hits=0,
            writer_uid=writer.uid,
            writer_pid=writer.pid,
            writer_program=writer.program,
            program=put.program_digest,
            **{f"{name}_component": put.components.get(name) for name in protocol.DESCRIBED_COMPONENTS},
        )
        return loose

    def mark_not_cacheable(self, mark: protocol.MarkNotCacheable) -> None:
        """Within a transaction: remember that there can be no entry; the oldest marks are forgotten first."""
        self._db.execute(
            "INSERT OR REPLACE INTO not_cacheable (key, module_name, reason, created_at) VALUES (?, ?, ?, ?)",
            (mark.key, mark.module_name, mark.reason, time.time()),
        )
        self._db.execute(
            "DELETE FROM not_cacheable WHERE rowid <= (SELECT max(rowid) FROM not_cacheable) - ?", (_MOST_MARKS,)
        )

    def forget_marks(self) -> None:
        """Within a transaction: forget what is known not to be cacheable."""
        self._db.execute("DELETE FROM not_cacheable")

    def remove(self, keys: Iterable[str]) -> list[str]:
        """Within a transaction: delete entries and what only they used. Returns digests of files to delete after."""
        loose: list[str] = []
        for key in keys:
            self._db.execute("DELETE FROM not_cacheable WHERE key = ?", (key,))
            row = self._db.execute("SELECT blob, program FROM entries WHERE key = ?", (key,)).fetchone()
            if row is None:
                continue
            blob, program = row
            self._db.execute("DELETE FROM entries WHERE key = ?", (key,))
            loose += self._drop_blob(blob)
            if not self._refers("entries", "program", program):
                (program_blob,) = self._db.execute("SELECT blob FROM programs WHERE digest = ?", (program,)).fetchone()
                self._db.execute("DELETE FROM programs WHERE digest = ?", (program,))
                loose += self._drop_blob(program_blob)
        return loose

    def delete_files(self, digests: Iterable[str]) -> None:
        """After a commit: delete files that nothing refers to."""
        for digest in digests:
            if not self._is_in_file(digest):
                self._files.delete(digest)

    def totals_now(self) -> dict[str, int]:
        """The totals, for the thread that writes."""
        return _totals(self._db)

    def keys(self) -> list[str]:
        """All keys."""
        return [key for (key,) in self._db.execute("SELECT key FROM entries")]

    def note_uses(self, uses: Mapping[str, Use]) -> None:
        """Within a transaction: add hits and move the last use forward."""
        self._db.executemany(
            "UPDATE entries SET hits = hits + ?, last_used_at = max(last_used_at, ?) WHERE key = ?",
            [(use.hits, use.last_used_at, key) for key, use in uses.items()],
        )

    def add_statistics(self, counts: Mapping[str, float]) -> None:
        """Within a transaction: add to what was counted."""
        self._db.executemany(
            # Clients name the reasons and kinds they count: of those there are few, or something is wrong.
            "INSERT INTO statistics (name, amount) SELECT :name, :amount"
            " WHERE (SELECT count(*) FROM statistics) < :most OR EXISTS (SELECT 1 FROM statistics WHERE name = :name)"
            " ON CONFLICT (name) DO UPDATE SET amount = amount + excluded.amount",
            [{"name": name, "amount": amount, "most": _MOST_COUNTERS} for name, amount in counts.items()],
        )

    def zero_statistics(self) -> None:
        """Within a transaction: begin to count anew."""
        self._db.execute("DELETE FROM statistics")
        self.add_statistics({"since": time.time()})

    def evict(self) -> tuple[int, int]:
        """Make room while there is too much; returns how many entries and bytes went."""
        count = freed = 0
        while self.max_size and (excess := self._total_bytes() - self.max_size) > 0:
            chosen = least_recently_used(self._oldest(), excess)
            if not chosen:
                break
            with self.transaction():
                loose = self.remove(chosen)
                self.add_statistics({"evictions": len(chosen)})
            self.delete_files(loose)
            count += len(chosen)
            freed += excess + self.max_size - self._total_bytes()
        return count, freed

    def give_back_room(self) -> None:
        """Return some of the database's free pages to the file system: in steps, so that nobody has to wait."""
        if self._db.execute("PRAGMA freelist_count").fetchone()[0]:
            # It frees one page a step, and execute() takes only one where a statement has no columns.
            self._db.executescript(f"PRAGMA incremental_vacuum({_PAGES_AT_ONCE})")

    def sweep(self) -> int:
        """Delete files no row speaks of: what was written just before a crash."""
        count = self._files.clear_unfinished()
        for digest in self._files.all():
            if not self._is_in_file(digest):
                self._files.delete(digest)
                count += 1
        return count

    def _oldest(self) -> Iterator[Candidate]:
        """The entries used longest ago."""
        cursor = self._db.execute(
            # CROSS JOIN keeps the order of the tables: the index of last_used_at, then two look-ups for each row.
            "SELECT entries.key, entries.stored_size, entries.program, blobs.stored_size,"
            " (SELECT count(*) FROM (SELECT 1 FROM entries other WHERE other.program = entries.program LIMIT :more))"
            " FROM entries CROSS JOIN programs ON programs.digest = entries.program"
            " CROSS JOIN blobs ON blobs.digest = programs.blob ORDER BY entries.last_used_at LIMIT :most",
            {"most": _EVICTED_AT_ONCE, "more": _EVICTED_AT_ONCE + 1},
        )
        return (Candidate(*row) for row in cursor.fetchall())

    def _total_bytes(self) -> int:
        return self.totals_now()["bytes"]

    def _is_in_file(self, digest: str) -> bool:
        row = self._db.execute("SELECT content IS NULL FROM blobs WHERE digest = ?", (digest,)).fetchone()
        return row is not None and bool(row[0])

    def _has_blob(self, digest: str) -> bool:
        return self._refers("blobs", "digest", digest)

    def _refers(self, table: str, column: str, value: str) -> bool:
        sql = f"SELECT 1 FROM {table} WHERE {column} = ? LIMIT 1"  # noqa: S608 - names of our own
        return self._db.execute(sql, (value,)).fetchone() is not None

    def _insert_blob(self, source: Source) -> None:
        if self._has_blob(source.digest):
            self._db.execute("UPDATE blobs SET content = ? WHERE digest = ?", (source.content, source.digest))
        else:
            self._insert("blobs", digest=source.digest, stored_size=source.size, content=source.content)

    def _drop_blob(self, digest: str) -> Sequence[str]:
        if self._refers("entries", "blob", digest) or self._refers("programs", "blob", digest):
            return ()
        self._db.execute("DELETE FROM blobs WHERE digest = ?", (digest,))
        return (digest,)

    def _insert(self, table: str, **row: object) -> None:
        places = ", ".join("?" * len(row))
        sql = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})"  # noqa: S608 - names of our own
        self._db.execute(sql, tuple(row.values()))

    def _open(self) -> sqlite3.Connection:
        found = self._version_found()
        if found > _SCHEMA_VERSION:
            raise NewerStoreError(
                f"{self._path} was written by a newer xcache (schema {found}; this one knows {_SCHEMA_VERSION})"
            )
        connection = self._connect()
        if found < _SCHEMA_VERSION:
            # sqlite-utils takes 200 ms to import, which only a store that has to change is worth.
            from sqlite_utils import Database

            from xcached.schema import migrations

            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            migrations.apply(Database(connection, execute_plugins=False))
            with contextlib.suppress(OSError):
                self._path.chmod(0o600)
        return connection

    def _version_found(self) -> int:
        """The version of the store that is there, found without writing to it; 0 if there is none."""
        if not self._path.exists():
            return 0
        with contextlib.closing(sqlite3.connect(f"{self._path.as_uri()}?mode=ro", uri=True, timeout=10)) as connection:
            return int(connection.execute("PRAGMA user_version").fetchone()[0])

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=10, isolation_level=None, check_same_thread=False)
        # FULL: what was acknowledged survives a power cut.
        for pragma in ("synchronous = FULL", "mmap_size = 268435456", "foreign_keys = OFF"):
            connection.execute(f"PRAGMA {pragma}")
        return connection


def _totals(connection: sqlite3.Connection) -> dict[str, int]:
    return dict(connection.execute("SELECT name, amount FROM totals").fetchall())
