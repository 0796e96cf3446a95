"""The SQLite file: opened, migrated, and set aside when it is damaged."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from xcache import protocol
from xcache.errors import NewerStoreError, StoreError
from xcached.disk import Reserve

logger = logging.getLogger("xcached")

SCHEMA_VERSION = 6
# One that finds the database locked by somebody else waits: the thread that serves everybody hardly, the writer longer.
_READING_PATIENCE, _WRITING_PATIENCE = 0.05, 10.0
_SUFFIXES = ("", "-wal", "-shm", "-journal")
# A journal that grew with one large transaction shrinks to this when it begins anew.
_LARGEST_JOURNAL = 4 * 1024 * 1024
# Of those that were set aside.
_MOST_KEPT = 5


class GoneError(StoreError):
    """The store is not where it was any more."""


def is_damage(error: BaseException) -> bool:
    """Whether an error says that the database file itself is damaged."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_full(error: BaseException) -> bool:
    """Whether an error says that there was no room on the disk."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF == sqlite3.SQLITE_FULL


class Database:
    """A connection that writes, and one that reads and is never kept waiting."""

    def __init__(self, directory: Path) -> None:
        """Open or make the database in a folder; a damaged one is set aside and a fresh one begun."""
        self.path = directory / protocol.DATABASE
        self.reserve = Reserve(directory)
        self._note = directory / f"{protocol.DATABASE}.is-damaged"
        try:
            if self._note.exists():
                self._set_aside()
            try:
                self._open()
            except sqlite3.DatabaseError as error:
                if is_damage(error):
                    logger.error("%s is damaged: %s", self.path, error)
                    self._set_aside()
                elif not self.reserve.give_up():
                    raise
                self._open()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{self.path} cannot be opened: {error}") from None

    def close(self) -> None:
        """Close, which leaves no journal behind."""
        self.reading.close()
        self.writing.close()

    def note_damage(self) -> None:
        """Have the next one that opens this database set it aside."""
        with contextlib.suppress(OSError):
            self._note.touch(mode=0o600)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside, or nothing of it, is on disk when this is left."""
        self._check_in_place()
        try:
            with self._between("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"):
                yield
        except sqlite3.Error as error:
            if is_full(error):
                self.empty_journal()
            raise

    def make_do(self) -> bool:
        """Where the disk is full, and what is written next makes room: whether something was kept for that."""
        kept = self.reserve.give_up()
        self.empty_journal()
        return kept

    def empty_journal(self) -> None:
        """Bring what is in it to the database, waiting for nobody; what is written next begins at its start."""
        with contextlib.suppress(sqlite3.OperationalError):
            self.writing.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """Within a transaction: everything inside, or nothing of it."""
        with self._between("SAVEPOINT part", "RELEASE part", "ROLLBACK TO part; RELEASE part"):
            yield

    @contextlib.contextmanager
    def _between(self, begin: str, end: str, undo: str) -> Iterator[None]:
        self.writing.execute(begin)
        try:
            yield
            self.writing.execute(end)
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                for statement in undo.split("; "):
                    self.writing.execute(statement)
            raise

    def _check_in_place(self) -> None:
        """What is written to a database that somebody deleted is lost, however well it is written."""
        try:
            there = self.path.stat().st_ino == self._inode
        except OSError:
            there = False
        if not there:
            raise GoneError(f"{self.path} was deleted or replaced")

    def _open(self) -> None:
        found = self._version_found()
        if found > SCHEMA_VERSION:
            raise NewerStoreError(
                f"{self.path} was written by a newer xcache (schema {found}; this one knows {SCHEMA_VERSION})"
            )
        with contextlib.ExitStack() as on_failure:
            self.writing = self._connect(_WRITING_PATIENCE)
            on_failure.callback(self.writing.close)
            if found < SCHEMA_VERSION:
                self._migrate()
            # What a part may have to put back is not worth a temporary file each time; what a migration may is.
            self.writing.execute("PRAGMA temp_store = MEMORY")
            self._inode = self.path.stat().st_ino
            self.reading = self._connect(_READING_PATIENCE)
            on_failure.callback(self.reading.close)
            # What a damaged file shows first.
            self.reading.execute("SELECT * FROM entries, totals, statistics LIMIT 1").fetchall()
            on_failure.pop_all()

    def _migrate(self) -> None:
        # sqlite-utils takes 200 ms to import, which only a store that has to change is worth.
        from sqlite_utils import Database as Tables

        from xcached.schema import migrations

        self.writing.execute("PRAGMA auto_vacuum = INCREMENTAL")
        self.writing.execute("PRAGMA journal_mode = WAL")
        migrations.apply(Tables(self.writing, execute_plugins=False))
        with contextlib.suppress(OSError):
            self.path.chmod(0o600)

    def _version_found(self) -> int:
        """The version of the store that is there, found without writing to it; 0 if there is none."""
        if not self.path.exists():
            return 0
        try:
            version, tables = self._look("ro")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_READONLY:
                raise
            # One that was made halfway: nobody can read it before it is brought back to what it was.
            version, tables = self._look("rw")
        if version == 0 and tables - {"_sqlite_migrations"}:
            foreign = sqlite3.DatabaseError("it is no store")
            foreign.sqlite_errorcode = sqlite3.SQLITE_NOTADB
            raise foreign
        return version

    def _look(self, mode: str) -> tuple[int, set[str]]:
        """The version that stands in the file, and its tables."""
        with contextlib.closing(
            sqlite3.connect(f"{self.path.as_uri()}?mode={mode}", uri=True, timeout=10)
        ) as connection:
            ((version,),) = connection.execute("PRAGMA user_version").fetchall()
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        return version, {name for (name,) in tables}

    def _connect(self, patience: float) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=patience, isolation_level=None, check_same_thread=False)
        # What was altered behind our back is to be found out, and not to stop the statement.
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        # FULL: what was acknowledged survives a power cut.
        for pragma in ("synchronous = FULL", "foreign_keys = OFF", f"journal_size_limit = {_LARGEST_JOURNAL}"):
            connection.execute(f"PRAGMA {pragma}")
        # No mmap_size: a mapped file that somebody truncates, or a disk that fails, is a fatal signal.
        return connection

    def _set_aside(self) -> None:
        """Give the file another name that begins with its own; it is kept for who wants to look into it."""
        name = f"{self.path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}"
        for suffix in _SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                self.path.with_name(self.path.name + suffix).rename(self.path.with_name(name + suffix))
        self._note.unlink(missing_ok=True)
        # Where it happens again and again, the first ones tell no more than the last.
        all_of_it = self.path.parent.glob(f"{self.path.name}.damaged-*")
        kept = sorted(path for path in all_of_it if not path.name.endswith(_SUFFIXES[1:]))
        for old in kept[:-_MOST_KEPT]:
            for suffix in _SUFFIXES:
                old.with_name(old.name + suffix).unlink(missing_ok=True)
        logger.error("%s was damaged and is kept as %s; a fresh one is begun", self.path, name)
