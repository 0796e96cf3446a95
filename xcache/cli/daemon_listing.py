"""Read the entries that the daemon lists to users who may not read the store of a whole machine."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence

from xcache.cli import daemon, store_file
from xcache.client.connection import Connection
from xcache.config.config import Config
from xcache.errors import ClosedStoreError, UnavailableError
from xcache.wire import bounded, commands, envelope, protocol
from xcache.wire.schema import SCHEMA_VERSION

_COLUMNS = (
    *("key", "module_name", "platform", "device_kind", "jaxlib_version", "raw_size", "stored_size"),
    *("compile_seconds", "created_at", "last_used_at", "hits", "writer_uid", "pinned", "stale"),
)


class ListedReader(store_file.StoreReader):
    """A reader of the entries that the daemon listed, with the same methods as one of the store."""

    _stale = "stale"


class AskedReader(store_file.StoreReader):
    """A reader of single entries that this user may load, which the daemon hands out one by one."""

    def __init__(self, settings: Config, connection: Connection) -> None:
        self._settings = settings
        self._asked = connection
        # Texts of components and contents of programs that came with the entries, by digest.
        self._texts: dict[str, str] = {}
        self._programs: dict[str, store_file.Row] = {}
        self._contents: dict[str, bytes] = {}
        # By program.
        self._jaxlibs: dict[str, str] = {}

    def entry(self, key: str) -> store_file.Row:
        """Return an entry with what belongs to it; raise RefusedError if there is none that this user may load."""
        found = self._asked.demand(commands.AskProgram(key), commands.StoredProgram, self._settings.timeout)
        entry = dict(found.entry)
        self._jaxlibs.setdefault(str(entry["program"]), str(entry.get("jaxlib_version", "")))
        self._programs[str(entry["program"])] = {"digest": entry["program"], "blob": found.blob, **found.sizes}
        self._texts |= {str(entry[f"{name}_component"]): text for name, text in found.texts.items()}
        content = found.content
        if content is None:
            with open(self._asked.take_descriptor(), "rb") as file:
                content = bounded.read_some(file, envelope.MAX_RAW_SIZE)
        self._contents[found.blob] = content
        return entry

    def description(self, component: str) -> str | None:
        """Return the text of a component of an entry that was asked for."""
        return self._texts.get(component)

    def program(self, digest: str, writer: int) -> store_file.Row:  # noqa: ARG002 - as the daemon chose it
        """Return the program of an entry that was asked for."""
        return self._programs[digest]

    def lowered_by(self, program: str) -> str:
        """Return the version of jaxlib of the first entry of a program that was asked for."""
        return self._jaxlibs.get(program, "")

    def content(self, blob: str) -> bytes:
        """Return the bytes of a program of an entry that was asked for."""
        return store_file.checked(blob, self._contents[blob])

    def like(self, entry: store_file.Row, limit: int, before: float) -> list[store_file.Row]:  # noqa: ARG002
        """Return nothing: the daemon has named the nearest entry, and lists no others."""
        return []


@contextlib.contextmanager
def open_store_or_listing(
    settings: Config, prefixes: Sequence[str] = ("",), *, latest: bool = False
) -> Iterator[store_file.StoreReader | None]:
    """Yield a reader of the store, or of the daemon's listing if only the daemon may read the store.

    ``prefixes`` restrict the listing. With ``latest``, the daemon first writes what it has not written yet.
    """
    with contextlib.ExitStack() as stack:
        try:
            store_file.is_there(settings)
        except ClosedStoreError as closed:
            yield _listed(settings, prefixes, closed, stack)
        else:
            if latest:
                daemon.flush(settings)
            yield stack.enter_context(store_file.open_store(settings))


def _listed(
    settings: Config, prefixes: Sequence[str], closed: ClosedStoreError, stack: contextlib.ExitStack
) -> ListedReader:
    connection = daemon.find(settings)
    if connection is None:
        raise UnavailableError(f"nobody listens on {settings.socket}, and {closed}")
    with contextlib.closing(connection):
        connection.demand(commands.Sync(), protocol.Done, settings.timeout)
        rows = [row for prefix in prefixes for row in _pages(settings, connection, prefix)]
    each = {(row["key"], row["writer_uid"]): row for row in rows}
    database = stack.enter_context(_table_of(list(each.values())))
    reader = ListedReader(database, settings.dir, SCHEMA_VERSION)
    if os.getuid() != 0:
        # The daemon lists everybody's entries to root.
        reader.empty, reader.what = "you have stored nothing here", "entry of yours"
    return reader


def _pages(settings: Config, connection: Connection, prefix: str) -> Iterator[dict[str, protocol.Scalar]]:
    asked = commands.AskEntries(prefix, "", 0)
    while True:
        rows = connection.demand(asked, commands.Entries, settings.timeout).entries
        yield from rows
        if len(rows) < protocol.MAX_LISTED:
            return
        key, writer = rows[-1]["key"], rows[-1]["writer_uid"]
        assert isinstance(key, str)  # noqa: S101 - as listing.py writes it
        assert isinstance(writer, int)  # noqa: S101
        asked = commands.AskEntries(prefix, key, writer)


@contextlib.contextmanager
def _table_of(rows: list[dict[str, protocol.Scalar]]) -> Iterator[sqlite3.Connection]:
    """Yield a database in memory that holds these entries."""
    with contextlib.closing(sqlite3.connect(":memory:")) as made:
        made.execute(f"CREATE TABLE entries ({', '.join(_COLUMNS)})")
        made.execute("CREATE TABLE totals (name, amount)")
        named = ", ".join(f":{column}" for column in _COLUMNS)
        made.executemany(f"INSERT INTO entries VALUES ({named})", rows)  # noqa: S608 - names of our own
        made.execute("INSERT INTO totals SELECT 'entries', count(*) FROM entries")
        made.execute("INSERT INTO totals SELECT 'bytes', coalesce(sum(stored_size), 0) FROM entries")
        yield made


@contextlib.contextmanager
def open_store_or_asking(settings: Config) -> Iterator[store_file.StoreReader | None]:
    """Yield a reader of the store, or one that asks the daemon for single entries if only it may read the store."""
    with contextlib.ExitStack() as stack:
        try:
            store_file.is_there(settings)
        except ClosedStoreError as closed:
            connection = daemon.find(settings)
            if connection is None:
                raise UnavailableError(f"nobody listens on {settings.socket}, and {closed}") from None
            yield AskedReader(settings, stack.enter_context(contextlib.closing(connection)))
        else:
            yield stack.enter_context(store_file.open_store(settings))
