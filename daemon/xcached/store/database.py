"""The SQLite file: opened, migrated, and renamed out of the way when it is damaged."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from xcache.errors import NewerStoreError, RefusedError, StoreError
from xcache.wire import protocol
from xcache.wire.schema import SCHEMA_VERSION
from xcached.store.disk import Reserve, usage_of

logger = logging.getLogger("xcached")

# Seconds to wait for a lock of another process: the serving thread can hardly wait, the writer thread can.
_READING_BUSY_SECONDS, _WRITING_BUSY_SECONDS = 0.05, 10.0
_SUFFIXES = ("", "-wal", "-shm", "-journal")
# SQLite truncates the journal (WAL) to this size when it restarts it after a large transaction.
_USUAL_JOURNAL_BYTES = 4 * 1024 * 1024
# A long read transaction keeps the journal from restarting; beyond this size writes are refused.
MOST_JOURNAL_BYTES = 64 * 1024 * 1024
# The number of damaged databases that are kept.
_MOST_DAMAGED_KEPT = 5


class GoneError(StoreError):
    """The store was deleted or replaced while the daemon used it."""


def is_damage(error: BaseException) -> bool:
    """Return whether an error says that the database file itself is damaged."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_full(error: BaseException) -> bool:
    """Return whether an error says that the disk is full."""
    code = getattr(error, "sqlite_errorcode", None)
    # The journal's index has a file of its own.
    return code is not None and (code & 0xFF == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE)


def _full(why: str) -> sqlite3.OperationalError:
    """Return the error that SQLite would raise on a full disk."""
    error = sqlite3.OperationalError(f"the disk is full: {why}")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


class Database:
    """Two connections: one writes; the other only reads, and never waits for the writer."""

    def __init__(self, directory: Path) -> None:
        """Open or make the database in a folder; rename a damaged one out of the way and make a fresh one."""
        self.path = directory / protocol.DATABASE
        self._journal = directory / f"{protocol.DATABASE}-wal"
        self.reserve = Reserve(directory)
        self._damage_marker = directory / f"{protocol.DATABASE}.is-damaged"
        try:
            if self._damage_marker.exists():
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
        """Close both connections, which removes the journal."""
        self.reading.close()
        self.writing.close()
        if not self._is_own(self.path, 0) and self._is_own(self._journal, 1):
            # SQLite leaves the journal of a database that was replaced, and would apply it to the new one.
            for suffix in _SUFFIXES[1:]:
                with contextlib.suppress(OSError):
                    self.path.with_name(self.path.name + suffix).unlink()

    def _is_own(self, path: Path, number: int) -> bool:
        try:
            return path.stat().st_ino == self._own_inodes[number]
        except OSError:
            return False

    def note_damage(self) -> None:
        """Have the next daemon that opens this database replace it."""
        with contextlib.suppress(OSError):
            self._damage_marker.touch(mode=0o600)

    @contextlib.contextmanager
    def transaction(self, *, frees: bool = False) -> Iterator[None]:
        """Commit everything inside, durably, or nothing of it.

        Raise RefusedError while the journal is too large; a transaction that ``frees`` room may grow it to twice that.
        Without the reserve only such transactions are taken: what others wrote could take the room that these need.
        """
        self._check_in_place()
        self._check_journal(MOST_JOURNAL_BYTES * (2 if frees else 1))
        if not frees and not self.may_grow():
            raise _full("what little room there is is kept for removals")
        try:
            with self._between("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"):
                yield
                if not frees:
                    self._check_room()
        except sqlite3.Error as error:
            if is_full(error):
                self.checkpoint()
            raise

    def may_grow(self) -> bool:
        """Return whether the reserve is there, or was made now: what is written then cannot take its room."""
        if not self.reserve.size:
            self.keep_reserve()
        return bool(self.reserve.size)

    def keep_reserve(self) -> int:
        """Make the reserve, unless the store is being deleted; return how many bytes were written for it now."""
        size = self.reserve.size
        written = self.reserve.keep() if self.is_in_place() else 0
        if self.reserve.size != size:
            self._bound_journal()
        return written

    def _bound_journal(self) -> None:
        """Have SQLite checkpoint so often that half of the reserve suffices to do it on a full disk."""
        most = self.reserve.size // 2 or _USUAL_JOURNAL_BYTES
        ((page_size,),) = self.writing.execute("PRAGMA page_size").fetchall()
        for pragma in (f"wal_autocheckpoint = {most // page_size}", f"journal_size_limit = {most}"):
            self.writing.execute(f"PRAGMA {pragma}").fetchall()

    def _check_room(self) -> None:
        """Raise an error of a full disk, at the end of a transaction, unless its checkpoint will have room as well."""
        pages, page_size = (
            self.writing.execute(f"PRAGMA {name}").fetchall()[0][0] for name in ("page_count", "page_size")
        )
        growth = pages * page_size - _size_of(self.path)
        # Its pages are written to the journal first.
        if growth > 0 and usage_of(self.path.parent).free < 2 * growth:
            raise _full("the database cannot grow by what was to be written")

    def use_reserve(self) -> bool:
        """Delete the reserve and empty the journal, to make room on a full disk; return whether there was a reserve."""
        kept = self.reserve.give_up()
        self.checkpoint()
        return kept

    def checkpoint(self) -> None:
        """Checkpoint the journal without waiting for readers, so that the next write starts at its beginning."""
        with contextlib.suppress(sqlite3.OperationalError):
            self.writing.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def shrink_journal(self, most: int) -> None:
        """Truncate a journal larger than ``most`` or than usual; raise RefusedError if a reader prevents it."""
        with contextlib.suppress(sqlite3.OperationalError):
            self._check_journal(min(most, _USUAL_JOURNAL_BYTES))

    def sizes(self) -> tuple[int, int]:
        """Return the bytes of the journal and of the database on the disk."""
        return _size_of(self._journal), _size_of(self.path)

    @contextlib.contextmanager
    def kept_in_memory(self) -> Iterator[None]:
        """Hold a transaction's pages in memory, so that one that is undone writes nothing to the disk."""
        self.writing.execute("PRAGMA cache_spill = OFF")
        try:
            yield
        finally:
            self.writing.execute("PRAGMA cache_spill = ON")

    @contextlib.contextmanager
    def savepoint(self) -> Iterator[None]:
        """Within a transaction: apply everything inside, or nothing of it."""
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

    def _check_journal(self, most: int) -> None:
        """Truncate a journal larger than ``most``; raise RefusedError if a reader prevents it."""
        try:
            if self._journal.stat().st_size <= most:
                return
        except OSError:
            return
        self.writing.execute("PRAGMA busy_timeout = 0")
        try:
            (busy, _, _) = self.writing.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self.writing.execute(f"PRAGMA busy_timeout = {int(_WRITING_BUSY_SECONDS * 1000)}")
        if busy:
            raise RefusedError(
                "store busy", "another process has kept a read transaction on the database open for too long"
            )

    def _check_in_place(self) -> None:
        """Raise GoneError if the database was deleted or replaced: writes to the open file would be lost."""
        if not self.is_in_place():
            raise GoneError(f"{self.path} or its journal was deleted or replaced")

    def is_in_place(self) -> bool:
        """Return whether the database and its journal are still the files that were opened."""
        return self._is_own(self.path, 0) and self._is_own(self._journal, 1)

    def _open(self) -> None:
        found = self._version_found()
        if found > SCHEMA_VERSION:
            raise NewerStoreError(
                f"{self.path} was written by a newer xcache (schema {found}; this one knows {SCHEMA_VERSION})"
            )
        with contextlib.ExitStack() as on_failure:
            self.writing = self._connect(_WRITING_BUSY_SECONDS)
            on_failure.callback(self.writing.close)
            if found < SCHEMA_VERSION:
                self._migrate()
            # A savepoint's undo data fits into memory. A migration's may not, and had temporary files above.
            self.writing.execute("PRAGMA temp_store = MEMORY")
            self.reading = self._connect(_READING_BUSY_SECONDS)
            on_failure.callback(self.reading.close)
            # A damaged file fails on its first read.
            self.reading.execute("SELECT * FROM entries, totals, statistics LIMIT 1").fetchall()
            # This read has made the journal, if there was none.
            self._own_inodes = self.path.stat().st_ino, self._journal.stat().st_ino
            on_failure.pop_all()

    def _migrate(self) -> None:
        # Importing sqlite-utils takes 200 ms; only a migration is worth that.
        with _without("numpy", "pandas"):
            from sqlite_utils import Database as Tables

        from xcached.store.schema import migrations

        self.writing.execute("PRAGMA auto_vacuum = INCREMENTAL")
        self.writing.execute("PRAGMA journal_mode = WAL")
        migrations.apply(Tables(self.writing, execute_plugins=False))
        # On a small disk the journal of all that leaves too little room for the reserve.
        with contextlib.suppress(sqlite3.OperationalError):
            self.writing.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        with contextlib.suppress(OSError):
            self.path.chmod(0o600)

    def _version_found(self) -> int:
        """Return the schema version of the store, read without writing to it; 0 if there is no store."""
        if not self.path.exists():
            return 0
        if not self.path.is_file():
            # SQLite would wait for a writer of a pipe.
            raise StoreError(f"{self.path} cannot be opened: it is not a file")
        try:
            version, tables = self._look("ro")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_READONLY:
                raise
            # A killed daemon left it half migrated: SQLite has to roll that back before anyone can read it.
            version, tables = self._look("rw")
        if version == 0 and tables - {"_sqlite_migrations"}:
            foreign = sqlite3.DatabaseError("it is not an xcache store")
            foreign.sqlite_errorcode = sqlite3.SQLITE_NOTADB
            raise foreign
        return version

    def _look(self, mode: str) -> tuple[int, set[str]]:
        """Return the file's user_version and the names of its tables."""
        with contextlib.closing(
            sqlite3.connect(f"{self.path.as_uri()}?mode={mode}", uri=True, timeout=10)
        ) as connection:
            ((version,),) = connection.execute("PRAGMA user_version").fetchall()
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        return version, {name for (name,) in tables}

    def _connect(self, patience: float) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=patience, isolation_level=None, check_same_thread=False)
        # Text that another program altered must not fail the whole statement; checks find it later.
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        # FULL: an acknowledged write survives a power cut.
        for pragma in ("synchronous = FULL", "foreign_keys = OFF", f"journal_size_limit = {_USUAL_JOURNAL_BYTES}"):
            connection.execute(f"PRAGMA {pragma}")
        # INSERT OR REPLACE must fire the delete triggers that keep the totals.
        connection.execute("PRAGMA recursive_triggers = ON")
        # No mmap_size: a truncated file or a failing disk would raise a fatal signal.
        return connection

    def _set_aside(self) -> None:
        """Rename the file to ``*.damaged-<time>``, and keep it for an investigation."""
        name = f"{self.path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}"
        for suffix in _SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                self.path.with_name(self.path.name + suffix).rename(self.path.with_name(name + suffix))
        self._damage_marker.unlink(missing_ok=True)
        # When damage recurs, the newest copies are the most useful.
        all_of_it = self.path.parent.glob(f"{self.path.name}.damaged-*")
        kept = sorted(path for path in all_of_it if not path.name.endswith(_SUFFIXES[1:]))
        for old in kept[:-_MOST_DAMAGED_KEPT]:
            for suffix in _SUFFIXES:
                old.with_name(old.name + suffix).unlink(missing_ok=True)
        logger.error("%s was damaged and is kept as %s; starting with an empty one", self.path, name)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


@contextlib.contextmanager
def _without(*modules: str) -> Iterator[None]:
    """Have imports of these modules fail: sqlite-utils takes those that it finds, with many megabytes each."""
    hidden = dict.fromkeys(module for module in modules if module not in sys.modules)
    # None makes an import fail.
    sys.modules.update(hidden)  # type: ignore[arg-type] # mypy does not know that
    try:
        yield
    finally:
        for module in hidden:
            del sys.modules[module]
