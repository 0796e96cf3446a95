"""Read the store without a daemon, by plain SQL on a database that is opened read-only."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from xcache.config.config import Config
from xcache.errors import ClosedStoreError, DamagedError, NewerStoreError, StoreError
from xcache.wire.bounded import UnreadableError, content_of
from xcache.wire.checks import is_text_of
from xcache.wire.envelope import MAX_RAW_SIZE
from xcache.wire.protocol import DATABASE, DESCRIBED_COMPONENTS
from xcache.wire.schema import SCHEMA_VERSION

# The schemas that brought toolchains, pins and the ledger.
_TOOLCHAINS_SCHEMA = 4
_PINS_SCHEMA = 3
_LEDGER_SCHEMA = 9
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
    """A selection of entries and its order; None and 0 do not restrict."""

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
        """Return the WHERE clause and its parameters."""
        # A name matches as text or as a pattern, because module names may hold a pattern's brackets.
        tests = {
            "(instr(lower(module_name), lower(?)) OR lower(module_name) GLOB lower(?))": (self.name, self.name),
            "lower(platform) = lower(?)": (self.platform,),
            # 0.10 matches 0.10.2, but not 0.1.
            "(jaxlib_version = ? OR instr(jaxlib_version, ? || '.') = 1)": (self.jaxlib, self.jaxlib),
            "toolchain_component = ?": (self.toolchain,),
            "created_at < ?": (self.created_before,),
            "created_at > ?": (self.created_after,),
        }
        used = {test: values for test, values in tests.items() if values[0] is not None}
        return " AND ".join(used) or "1", [value for values in used.values() for value in values]

    def order(self) -> str:
        """Return the ORDER BY clause."""
        column, _, direction = SORTS[self.sort].rpartition(" ")
        return f"{column} {_REVERSED[direction] if self.reverse else direction}, key"


@contextlib.contextmanager
def open_store(settings: Config) -> Iterator[StoreReader | None]:
    """Yield a reader of the store as it is at this moment, or None if there is no store yet."""
    if not is_there(settings):
        yield None
        return
    path = settings.dir / DATABASE
    try:
        with contextlib.closing(_connect(path)) as connection:
            (schema,) = connection.execute("PRAGMA user_version").fetchone()
            if schema > SCHEMA_VERSION:
                raise NewerStoreError(
                    f"{path} was written by a newer xcache (schema {schema}; this one knows {SCHEMA_VERSION})"
                )
            # 0: a daemon has made the file, but no tables yet.
            yield StoreReader(connection, settings.dir, schema) if schema else None
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be read: {error}") from None


def is_there(settings: Config) -> bool:
    """Return whether there is a store; raise ClosedStoreError if only its daemon can tell."""
    if _exists(settings.dir / DATABASE):
        return True
    if settings.daemon_user and not settings.dir.exists():
        # A container may have been given only the socket.
        raise ClosedStoreError(f"{settings.dir} does not exist here; the daemon of all users may have it elsewhere")
    return False


def _exists(path: Path) -> bool:
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise StoreError(f"{_no_folder(path.parent)} is not a directory, so that there is no store") from None
    except PermissionError:
        raise ClosedStoreError(f"only root and the daemon may read {path.parent}") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from None
    if not is_file:
        # SQLite would wait for a writer of a pipe.
        raise StoreError(f"{path} is not a file")
    return True


def _no_folder(path: Path) -> Path:
    """Return the part of a path that exists and is no folder."""
    return next((each for each in (path, *path.parents) if each.exists()), path)


def _connect(path: Path) -> sqlite3.Connection:
    """Open the database in one transaction, so that everything read is of the same moment."""
    try:
        return _begin(f"{path.as_uri()}?mode=ro")
    except sqlite3.OperationalError:
        # SQLite cannot make its index in a read-only folder; without a journal it can read the file as immutable.
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


def checked(blob: str, content: bytes) -> bytes:
    """Return a content; raise DamagedError unless it has the digest under which it is stored."""
    if hashlib.sha256(content).hexdigest() != blob:
        raise DamagedError(f"the content {blob[:12]} is damaged: its digest differs")
    return content


class StoreReader:
    """Queries of a store; rows are dictionaries by column name."""

    empty = EMPTY
    """The message for a store without entries."""
    what = "entry"
    """The noun for its entries in messages."""
    _stale = (
        "EXISTS (SELECT 1 FROM toolchains WHERE toolchains.digest = toolchain_component AND stale_since IS NOT NULL)"
    )

    def __init__(self, connection: sqlite3.Connection, directory: Path, schema: int) -> None:
        # Older than ours until a daemon of this version has opened the store; columns and tables may be missing.
        self._schema = schema
        self.connection = connection
        self._pinned = "pinned" if schema >= _PINS_SCHEMA else "0 AS pinned"
        if schema < _TOOLCHAINS_SCHEMA:
            self._stale = "0"
        self._directory = directory

    @property
    def has_ledger(self) -> bool:
        """Whether the store is new enough to have a ledger."""
        return self._schema >= _LEDGER_SCHEMA

    def totals(self) -> dict[str, int]:
        """Return the numbers of entries and bytes."""
        return dict(self.connection.execute("SELECT name, amount FROM totals").fetchall())

    def statistics(self) -> dict[str, float]:
        """Return all counts by name."""
        return dict(self.connection.execute("SELECT name, amount FROM statistics").fetchall())

    def entries(self, wanted: Wanted) -> tuple[list[Row], int]:
        """Return the selected entries up to the limit, and how many there are without it."""
        where, values = wanted.conditions()
        # The clauses consist of constants; the user's values are bound.
        ((matched,),) = self.connection.execute(f"SELECT count(*) FROM entries WHERE {where}", values)  # noqa: S608
        rows = self._rows(
            "SELECT key, module_name, platform, device_kind, jaxlib_version, raw_size, stored_size, compile_seconds,"  # noqa: S608
            f" created_at, last_used_at, hits, writer_uid, {self._pinned}, {self._stale} AS stale"
            f" FROM entries WHERE {where} ORDER BY {wanted.order()} LIMIT ?",
            *values,
            wanted.limit or -1,
        )
        for row in rows:
            row |= {name: bool(row[name]) for name in ("pinned", "stale")}
        return rows, matched

    def stale_entries(self) -> int:
        """Return how many entries are not served because their toolchain is no longer installed anywhere."""
        return int(self._rows(f"SELECT count(*) AS count FROM entries WHERE {self._stale}")[0]["count"])  # noqa: S608

    def freed_by(self, wanted: Wanted) -> int:
        """Return the bytes that removing these entries would free: theirs, and the programs no other entry has."""
        where, values = wanted.conditions()
        programs = "JOIN programs ON programs.digest = program AND programs.writer_uid = {0}.writer_uid"
        contents = "SELECT blob FROM {0} UNION SELECT programs.blob FROM {0} " + programs  # noqa: S608
        ((size,),) = self.connection.execute(
            f"WITH going AS (SELECT rowid AS id, blob, program, writer_uid FROM entries WHERE {where}),"  # noqa: S608
            " staying AS (SELECT blob, program, writer_uid FROM entries WHERE rowid NOT IN (SELECT id FROM going))"
            f" SELECT coalesce(sum(stored_size), 0) FROM blobs WHERE digest IN ({contents.format('going')})"
            f" AND digest NOT IN ({contents.format('staying')})",
            values,
        )
        return int(size)

    def beginning_with(self, prefix: str, limit: int) -> list[Row]:
        """Return key and module name of the entries whose key begins with the prefix."""
        # "g" comes after every hexadecimal digit, and a range uses the index.
        return self._rows(
            "SELECT key, module_name FROM entries WHERE key >= ? AND key < ? GROUP BY key ORDER BY key LIMIT ?",
            prefix,
            f"{prefix}g",
            limit,
        )

    def module_names(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the names of modules by key, of those keys that are here."""
        sql = "SELECT DISTINCT key, module_name FROM entries WHERE key IN (SELECT value FROM json_each(?))"
        return dict(self.connection.execute(sql, (json.dumps(list(keys)),)).fetchall())

    def own_keys(self, keys: Sequence[str]) -> set[str]:
        """Return those of these keys under which this user has an entry."""
        sql = "SELECT key FROM entries WHERE writer_uid = ? AND key IN (SELECT value FROM json_each(?))"
        return {key for (key,) in self.connection.execute(sql, (os.getuid(), json.dumps(list(keys))))}

    def entry(self, key: str) -> Row:
        """Return all columns of one entry, this user's own if several users have it."""
        return self._row("SELECT * FROM entries WHERE key = ? ORDER BY writer_uid = ? DESC LIMIT 1", key, os.getuid())

    def program(self, digest: str, writer: int) -> Row:
        """Return all columns of one writer's program, with its stored size."""
        return self._row(
            "SELECT programs.*, blobs.stored_size FROM programs JOIN blobs ON blobs.digest = programs.blob"
            " WHERE programs.digest = ? AND programs.writer_uid = ?",
            digest,
            writer,
        )

    def quarantined(self) -> list[Row]:
        """Return the entries that were set aside, latest first."""
        rows = self._rows("SELECT * FROM quarantined ORDER BY id DESC")
        for row in rows:
            row["file"] = row["file"] and str(self._directory / "quarantine" / row["file"])
        return rows

    def toolchains(self) -> list[Row]:
        """Return the toolchains and their installations, the one with the most entries first."""
        if self._schema < _TOOLCHAINS_SCHEMA:
            return []
        rows = self._rows(
            # A toolchain that no client announced is known only from the entries it made.
            "SELECT known.digest, platform, jaxlib_version, description, first_seen, stale_since, entries, bytes,"
            " compile_seconds FROM (SELECT digest FROM toolchains UNION SELECT toolchain_component FROM entries) known"
            " LEFT JOIN toolchains ON toolchains.digest = known.digest"
            " LEFT JOIN (SELECT toolchain_component, count(*) AS entries, sum(compile_seconds) AS compile_seconds"
            " FROM entries GROUP BY toolchain_component) made ON made.toolchain_component = known.digest"
            # A content that several entries share counts once.
            " LEFT JOIN (SELECT toolchain_component, sum(stored_size) AS bytes FROM"
            " (SELECT DISTINCT toolchain_component, blob, stored_size FROM entries) GROUP BY toolchain_component) kept"
            " ON kept.toolchain_component = known.digest"
            " WHERE known.digest IS NOT NULL ORDER BY entries DESC, first_seen DESC"
        )
        for row in rows:
            if not is_text_of(row["description"], row["digest"]):
                row |= dict.fromkeys(("platform", "jaxlib_version", "description"))
            row["state"] = "unknown" if row["first_seen"] is None else "live" if row["stale_since"] is None else "stale"
            row["installations"] = self._rows(
                "SELECT place, state, uid, seen_at FROM installations WHERE toolchain = ? ORDER BY seen_at DESC",
                row["digest"],
            )
            row |= {name: row[name] or 0 for name in ("entries", "bytes", "compile_seconds")}
        return rows

    def installations(self, toolchain: str, uid: int) -> list[Row]:
        """Return where a user has or had a toolchain: those that are there first, then the one seen last."""
        if self._schema < _TOOLCHAINS_SCHEMA:
            return []
        return self._rows(
            "SELECT place, state FROM installations WHERE toolchain = ? AND uid = ?"
            " ORDER BY state = 'here' DESC, seen_at DESC",
            toolchain,
            uid,
        )

    def is_stale(self, toolchain: str) -> bool:
        """Return whether a toolchain's entries are not served, because it is no longer installed anywhere."""
        sql = "SELECT 1 FROM toolchains WHERE digest = ? AND stale_since IS NOT NULL"
        return self._schema >= _TOOLCHAINS_SCHEMA and bool(self._rows(sql, toolchain))

    def invalidations(self, limit: int) -> list[Row]:
        """Return the invalidations, latest first."""
        if self._schema < _TOOLCHAINS_SCHEMA:
            return []
        sql = "SELECT at, toolchain, reason, entries, bytes FROM invalidations ORDER BY rowid DESC LIMIT ?"
        return self._rows(sql, limit)

    def description(self, component: str) -> str | None:
        """Return the text of a component, if one was kept."""
        rows = self._rows("SELECT description FROM components WHERE digest = ?", component)
        # An older daemon kept what a user made up.
        return rows[0]["description"] if rows and is_text_of(rows[0]["description"], component) else None

    def lowered_by(self, program: str) -> str:
        """Return the version of jaxlib that a program was stored for first; others come from ``xcache rewarm``."""
        rows = self._rows("SELECT jaxlib_version FROM entries WHERE program = ? ORDER BY rowid LIMIT 1", program)
        return rows[0]["jaxlib_version"] if rows else ""

    def file_of(self, blob: str) -> Path | None:
        """Return the file of a content, or None if the content is in the database."""
        row = self._row("SELECT content IS NULL AS outside FROM blobs WHERE digest = ?", blob)
        return self._directory / "blobs" / blob[:2] / blob if row["outside"] else None

    def content(self, blob: str) -> bytes:
        """Return the bytes of a content, checked against its digest."""
        path = self.file_of(blob)
        if path is None:
            content: bytes = self._row("SELECT content FROM blobs WHERE digest = ?", blob)["content"]
        else:
            try:
                content = content_of(path, MAX_RAW_SIZE)
            except (OSError, UnreadableError) as error:
                raise StoreError(f"{path}: {getattr(error, 'strerror', error)}") from None
        return checked(blob, content)

    def like(self, entry: Row, limit: int, before: float) -> list[Row]:
        """Return key, program and writer of older entries of the same program, or else name, the newest first.

        Only those count that were stored ``before``.
        """
        columns = ", ".join(("key", "program", "writer_uid", *(f"{name}_component" for name in DESCRIBED_COMPONENTS)))
        for column in ("program", "module_name"):
            rows = self._rows(
                f"SELECT {columns} FROM entries WHERE {column} = ? AND key != ?"  # noqa: S608 - names of our own
                " AND rowid < (SELECT min(rowid) FROM entries WHERE key = ?) AND created_at < ? ORDER BY rowid DESC"
                " LIMIT ?",
                *(entry[column], entry["key"], entry["key"], before, limit),
            )
            if rows:
                return rows
        return []

    def _row(self, sql: str, digest: str, *more: Any) -> Row:
        rows = self._rows(sql, digest, *more)
        if not rows:
            raise DamagedError(f"the store refers to {digest[:12]} but does not have it")
        return rows[0]

    def _rows(self, sql: str, *values: Any) -> list[Row]:
        cursor = self.connection.execute(sql, values)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]
