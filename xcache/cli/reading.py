"""The store, read by plain SQL from a database that is opened read-only: no daemon is needed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xcache.config import Config
from xcache.errors import ClosedStoreError, DamagedError, NewerStoreError, StoreError
from xcache.protocol import DATABASE

# The newest schema that is understood here: ``PRAGMA user_version``, as the daemon writes it.
SCHEMA = 6
_TOOLCHAINS_SINCE = 4
_PINNING = 3
EMPTY = "the store is empty"
_BUSY_SECONDS = 5.0

Row = dict[str, Any]

SORTS = {
    "used": "last_used_at DESC",
    "created": "created_at DESC",
    "size": "stored_size DESC",
    "hits": "hits DESC",
    "compile": "compile_seconds DESC",
    "name": "module_name COLLATE NOCASE ASC",
}
_REVERSED = {"DESC": "ASC", "ASC": "DESC"}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which entries, in which order; None and 0 do not restrict."""

    name: str | None = None
    platform: str | None = None
    jaxlib: str | None = None
    toolchain: str | None = None
    created_before: float | None = None
    created_after: float | None = None
    sort: str = "used"
    reverse: bool = False
    limit: int = 0

    def conditions(self) -> tuple[str, list[Any]]:
        """The WHERE clause, and what its question marks stand for."""
        # A name is taken both ways: module names may hold the brackets that a pattern has.
        tests = {
            "(instr(lower(module_name), lower(?)) OR lower(module_name) GLOB lower(?))": (self.name, self.name),
            "lower(platform) = lower(?)": (self.platform,),
            # 0.10 stands for 0.10.2, and not for 0.1.
            "(jaxlib_version = ? OR instr(jaxlib_version, ? || '.') = 1)": (self.jaxlib, self.jaxlib),
            "toolchain_component = ?": (self.toolchain,),
            "created_at < ?": (self.created_before,),
            "created_at > ?": (self.created_after,),
        }
        used = {test: values for test, values in tests.items() if values[0] is not None}
        return " AND ".join(used) or "1", [value for values in used.values() for value in values]

    def order(self) -> str:
        """The ORDER BY clause."""
        column, _, direction = SORTS[self.sort].rpartition(" ")
        return f"{column} {_REVERSED[direction] if self.reverse else direction}, key"


@contextlib.contextmanager
def reading(settings: Config) -> Iterator[StoreReader | None]:
    """The store as it is at this moment, or None where there is none yet."""
    path = settings.dir / DATABASE
    if not _exists(path):
        if settings.daemon_user and not settings.dir.exists():
            # As in a container that was given the socket alone.
            raise ClosedStoreError(
                f"{settings.dir} is not to be seen here; the daemon of all users may have it elsewhere"
            )
        yield None
        return
    try:
        with contextlib.closing(_connect(path)) as connection:
            (schema,) = connection.execute("PRAGMA user_version").fetchone()
            if schema > SCHEMA:
                raise NewerStoreError(
                    f"{path} was written by a newer xcache (schema {schema}; this one knows {SCHEMA})"
                )
            # 0: a daemon has made the file, and not yet the tables.
            yield StoreReader(connection, settings.dir, schema) if schema else None
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be read: {error}") from None


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except PermissionError:
        raise ClosedStoreError(f"{path.parent} may be looked into by root and by its daemon alone") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from None
    return True


def _connect(path: Path) -> sqlite3.Connection:
    """One transaction for everything that is read, so that the parts fit together."""
    try:
        return _begin(f"{path.as_uri()}?mode=ro")
    except sqlite3.OperationalError:
        # In a folder where SQLite may not make its index, a database that has no journal can be read all the same.
        if os.access(path.parent, os.W_OK) or path.with_name(f"{path.name}-wal").exists():
            raise
        return _begin(f"{path.as_uri()}?immutable=1")


def _begin(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)
    try:
        connection.execute("BEGIN")
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


class StoreReader:
    """What can be asked of a store; rows are dictionaries by the names of the columns."""

    def __init__(self, connection: sqlite3.Connection, directory: Path, schema: int) -> None:
        # Below that of this version until its daemon has opened the store: tables may be missing.
        self._schema = schema
        self._connection = connection
        # A store that no daemon of this version has opened yet.
        self._pinned = "pinned" if schema >= _PINNING else "0 AS pinned"
        self._directory = directory

    def totals(self) -> dict[str, int]:
        """How many entries there are, and how many bytes they take."""
        return dict(self._connection.execute("SELECT name, amount FROM totals").fetchall())

    def statistics(self) -> dict[str, float]:
        """Everything that was counted, by name."""
        return dict(self._connection.execute("SELECT name, amount FROM statistics").fetchall())

    def entries(self, wanted: Wanted) -> tuple[list[Row], int]:
        """Those that are wanted, up to the limit, and how many there are without it."""
        where, values = wanted.conditions()
        # The clauses are put together from constants; whatever the user gave is bound.
        ((matched,),) = self._connection.execute(f"SELECT count(*) FROM entries WHERE {where}", values)  # noqa: S608
        rows = self._rows(
            "SELECT key, module_name, platform, device_kind, jaxlib_version, raw_size, stored_size, compile_seconds,"  # noqa: S608
            f" created_at, last_used_at, hits, writer_uid, {self._pinned} FROM entries"
            f" WHERE {where} ORDER BY {wanted.order()} LIMIT ?",
            *values,
            wanted.limit or -1,
        )
        for row in rows:
            row["pinned"] = bool(row["pinned"])
        return rows, matched

    def freed_by(self, wanted: Wanted) -> int:
        """How many bytes would come free without those entries: theirs, and the programs that no other has."""
        where, values = wanted.conditions()
        programs = "JOIN programs ON programs.digest = program AND programs.writer_uid = {0}.writer_uid"
        contents = "SELECT blob FROM {0} UNION SELECT programs.blob FROM {0} " + programs  # noqa: S608
        ((size,),) = self._connection.execute(
            f"WITH going AS (SELECT rowid AS id, blob, program, writer_uid FROM entries WHERE {where}),"  # noqa: S608
            " staying AS (SELECT blob, program, writer_uid FROM entries WHERE rowid NOT IN (SELECT id FROM going))"
            f" SELECT coalesce(sum(stored_size), 0) FROM blobs WHERE digest IN ({contents.format('going')})"
            f" AND digest NOT IN ({contents.format('staying')})",
            values,
        )
        return int(size)

    def beginning_with(self, prefix: str, limit: int) -> list[Row]:
        """Key and module name of entries whose key begins like this."""
        # "g" comes after every hexadecimal digit, and a range uses the index.
        return self._rows(
            "SELECT key, module_name FROM entries WHERE key >= ? AND key < ? GROUP BY key ORDER BY key LIMIT ?",
            prefix,
            f"{prefix}g",
            limit,
        )

    def entry(self, key: str) -> Row:
        """All columns of one entry: one's own where several users have it."""
        return self._row("SELECT * FROM entries WHERE key = ? ORDER BY writer_uid = ? DESC LIMIT 1", key, os.getuid())

    def program(self, digest: str, writer: int) -> Row:
        """All columns of one writer's program, with its stored size."""
        return self._row(
            "SELECT programs.*, blobs.stored_size FROM programs JOIN blobs ON blobs.digest = programs.blob"
            " WHERE programs.digest = ? AND programs.writer_uid = ?",
            digest,
            writer,
        )

    def quarantined(self) -> list[Row]:
        """What was set aside, the latest first."""
        rows = self._rows("SELECT * FROM quarantined ORDER BY id DESC")
        for row in rows:
            row["file"] = row["file"] and str(self._directory / "quarantine" / row["file"])
        return rows

    def toolchains(self) -> list[Row]:
        """What compiled the entries, and where it is installed; the one with the most entries first."""
        if self._schema < _TOOLCHAINS_SINCE:
            return []
        rows = self._rows(
            # A toolchain that nobody announced is only known from the entries it made.
            "SELECT known.digest, platform, jaxlib_version, description, first_seen, stale_since, entries, bytes,"
            " compile_seconds FROM (SELECT digest FROM toolchains UNION SELECT toolchain_component FROM entries) known"
            " LEFT JOIN toolchains ON toolchains.digest = known.digest"
            " LEFT JOIN (SELECT toolchain_component, count(*) AS entries, sum(stored_size) AS bytes,"
            " sum(compile_seconds) AS compile_seconds FROM entries GROUP BY toolchain_component) made"
            " ON made.toolchain_component = known.digest"
            " WHERE known.digest IS NOT NULL ORDER BY entries DESC, first_seen DESC"
        )
        for row in rows:
            row["state"] = "unknown" if row["first_seen"] is None else "live" if row["stale_since"] is None else "stale"
            row["installations"] = self._rows(
                "SELECT place, state, uid, seen_at FROM installations WHERE toolchain = ? ORDER BY seen_at DESC",
                row["digest"],
            )
            row |= {name: row[name] or 0 for name in ("entries", "bytes", "compile_seconds")}
        return rows

    def is_stale(self, toolchain: str) -> bool:
        """Whether what it made is not served, because it is installed nowhere any more."""
        sql = "SELECT 1 FROM toolchains WHERE digest = ? AND stale_since IS NOT NULL"
        return self._schema >= _TOOLCHAINS_SINCE and bool(self._rows(sql, toolchain))

    def invalidations(self, limit: int) -> list[Row]:
        """What made entries useless, the latest first."""
        if self._schema < _TOOLCHAINS_SINCE:
            return []
        sql = "SELECT at, toolchain, reason, entries, bytes FROM invalidations ORDER BY rowid DESC LIMIT ?"
        return self._rows(sql, limit)

    def description(self, component: str) -> str | None:
        """The text of a component, if one was kept."""
        rows = self._rows("SELECT description FROM components WHERE digest = ?", component)
        return rows[0]["description"] if rows else None

    def file_of(self, blob: str) -> Path | None:
        """The file a content is kept in, or None for one inside the database."""
        row = self._row("SELECT content IS NULL AS outside FROM blobs WHERE digest = ?", blob)
        return self._directory / "blobs" / blob[:2] / blob if row["outside"] else None

    def content(self, blob: str) -> bytes:
        """The bytes of a content, checked against its digest."""
        path = self.file_of(blob)
        if path is None:
            content: bytes = self._row("SELECT content FROM blobs WHERE digest = ?", blob)["content"]
        else:
            try:
                content = path.read_bytes()
            except OSError as error:
                raise StoreError(f"{path}: {error.strerror}") from None
        if hashlib.sha256(content).hexdigest() != blob:
            raise DamagedError(f"the content {blob[:12]} is damaged: its digest differs")
        return content

    def _row(self, sql: str, digest: str, *more: Any) -> Row:
        rows = self._rows(sql, digest, *more)
        if not rows:
            raise DamagedError(f"the store speaks of {digest[:12]} and does not have it")
        return rows[0]

    def _rows(self, sql: str, *values: Any) -> list[Row]:
        cursor = self._connection.execute(sql, values)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]
