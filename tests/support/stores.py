"""A store and its writer without a socket, and the checks that must always hold."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from support.conversation import open_file
from support.places import begin_store, put_message
from xcache.wire import protocol
from xcached.requests.removals import removed
from xcached.store.entries import EntryKey, Source, Writer
from xcached.store.evictor import Evictor
from xcached.store.intake import Intake
from xcached.store.jobs import PutJob
from xcached.store.limits import Limits
from xcached.store.store import Store
from xcached.store.tables import ROWS
from xcached.store.writer import WriterThread

WRITER = Writer(1, 2, "test")


class Shelf:
    """A store with its writer thread, as in a daemon."""

    def __init__(
        self,
        directory: Path,
        max_size: int = 0,
        *,
        shared: bool = False,
        begun: bool = True,
        **limits: Any,
    ) -> None:
        """Open the store there; if there is none, begin with an empty one, or have the store make all of it."""
        self.directory = directory
        if begun:
            begin_store(directory)
        # Stale toolchains, as Toolchains would report them: digests, each with a writer.
        self.stale: set[tuple[str, int]] = set()
        self.store = Store(directory, Limits(max_size, **limits), shared=shared)
        self.evictor = Evictor(self.store, lambda: self.stale)
        self.damage: list[Exception] = []
        self.writer = WriterThread(self.store, self.damage.append, self.evictor)
        self.writer.start()
        self.intake = Intake(self.store.files, self.writer)

    def limit(self, **changes: Any) -> None:
        """Change some limits, as the daemon does when its settings change."""
        self.call(lambda store: self.evictor.set_limits(store.limits._replace(**changes)))

    def close(self) -> None:
        """Finish and close."""
        assert self.intake.close(20)
        assert self.writer.stop(20)
        self.store.close()

    def begin_put(
        self, key: str, payload: bytes, program: bytes, *, uid: int = WRITER.uid, **changes: Any
    ) -> Future[protocol.Message]:
        """Put an entry of a user, large contents by descriptor; return the pending answer."""
        message = put_message(key, payload, program, **changes)
        done: Future[protocol.Message] = Future()
        sources = (
            source_of(message.digest, message.stored_size, payload),
            source_of(message.program_stored_digest, message.program_stored_size, program),
        )
        job = PutJob(message, *sources, WRITER._replace(uid=uid), done)
        if any(source.descriptor is not None for source in sources):
            self.intake.submit(job, None)
        else:
            self.writer.submit(job, None)
        return done

    def put(self, key: str, payload: bytes, program: bytes, **changes: Any) -> protocol.Message:
        """Put an entry, and wait for the answer and all work that follows."""
        answer = self.begin_put(key, payload, program, **changes).result(20)
        self.sync()
        return answer

    def begin_call(self, call: Any) -> Future[protocol.Message]:
        """Call a function on the writer thread; return the pending answer."""
        return self.writer.call(lambda: call(self.store))

    def call(self, call: Any) -> protocol.Message:
        """Call a function on the writer thread."""
        return self.begin_call(call).result(20)

    def sync(self) -> None:
        """Wait until everything is written and evictions are done."""
        self.writer.call_by_steps(self.writer.catch_up(), None, in_order=True).result(20)

    def begin_remove(self, *keys: str) -> Future[protocol.Message]:
        """Remove entries; return the pending answer."""
        return self.begin_call(lambda store: removed(store, [EntryKey(key, WRITER.uid) for key in keys]))

    def remove(self, *keys: str) -> protocol.Message:
        """Remove entries."""
        return self.begin_remove(*keys).result(20)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Keep the writer busy, so that jobs queued meanwhile go into one transaction."""
        gate = threading.Event()
        self.begin_call(lambda store: gate.wait(20))
        yield
        gate.set()

    def get(self, key: str) -> bytes | None:
        """Return the content stored under a key."""
        hits = self.store.reader.find(key)
        if not hits:
            return None
        (hit,) = hits
        assert hit.is_sound
        if hit.inline_bytes is not None:
            return self.store.reader.content(hit.digest)
        with open(self.store.files.open(hit.digest).descriptor, "rb") as file:
            return file.read()

    def keys(self) -> set[str]:
        """Return the keys of all entries."""
        return {key for (key,) in self.query("SELECT key FROM entries")}

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Return rows, read over another connection."""
        with contextlib.closing(sqlite3.connect(self.directory / "store.db")) as database:
            return database.execute(sql).fetchall()

    def change(self, sql: str, *values: object) -> None:
        """Alter the database behind the daemon's back."""
        with contextlib.closing(sqlite3.connect(self.directory / "store.db")) as database, database:
            database.execute(sql, values)

    def check(self) -> None:
        """Check that totals are sums of what is there, and that nothing is unreferenced."""
        check_tables(self.query, self.directory)
        assert [(self.store.reader.totals()["entries"],)] == self.query("SELECT count(*) FROM entries")


def check_tables(query: Callable[[str], list[tuple[Any, ...]]], directory: Path) -> None:
    """Check the store in this folder, which ``query`` reads: sums, references and files."""
    entries = query("SELECT blob, program FROM entries")
    programs = dict(query("SELECT digest, blob FROM programs"))
    blobs = query("SELECT digest, stored_size, content FROM blobs")
    assert set(programs) == {program for _, program in entries}
    assert {program for (program,) in query("SELECT program FROM aliases")} <= set(programs)
    assert {digest for digest, _, _ in blobs} == {blob for blob, _ in entries} | set(programs.values())
    assert dict(query("SELECT name, amount FROM totals")) == {
        "entries": len(entries),
        "bytes": sum(size for _, size, _ in blobs),
    } | {
        total: sum(
            query(f"SELECT coalesce(sum({size.format('')}), 0) FROM {name}")[0][0]  # noqa: S608 - names of our own
            for name, size in tables.items()
        )
        for total, tables in ROWS.items()
    }
    described = {digest for (digest,) in query("SELECT digest FROM components")}
    keys = query("SELECT options_component, flags_component, platform_component, toolchain_component FROM entries")
    assert described == {digest for key in keys for digest in key}
    files = {path.name: path.stat().st_size for path in directory.glob("blobs/*/*") if path.is_file()}
    assert files == {digest: size for digest, size, content in blobs if content is None}


def source_of(digest: str, size: int, content: bytes) -> Source:
    """Return a content for a put."""
    if len(content) <= protocol.INLINE_LIMIT:
        return Source(digest, size, content, None)
    with open_file(content) as descriptor:
        return Source(digest, size, None, os.dup(descriptor))


@contextlib.contextmanager
def shelf(directory: Path, max_size: int = 0, **limits: Any) -> Iterator[Shelf]:
    """Open a store for the length of the block."""
    made = Shelf(directory, max_size, **limits)
    try:
        yield made
    finally:
        made.close()


def quick_folder() -> Path:
    """Return a folder in memory if possible, for tests with many steps that do not test the disk."""
    with contextlib.suppress(OSError):
        return Path(tempfile.mkdtemp(prefix="xc", dir="/dev/shm"))
    return Path(tempfile.mkdtemp(prefix="xc"))
