"""A store and its writer without a socket, and what must hold of it at any time."""

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

from places import put_message

from xcache import protocol
from xcached.administration import removed
from xcached.room import Room
from xcached.store import Entry, Source, Store, Writer
from xcached.writer import PutJob, WriterThread

WRITER = Writer(1, 2, "test")


class Shelf:
    """A store that is written by its thread, as in a daemon."""

    def __init__(
        self,
        directory: Path,
        max_size: int = 0,
        *,
        user_quota: int = 0,
        max_entries: int = 0,
        max_age: float = 0.0,
        min_free: str = "0",
    ) -> None:
        self.directory = directory
        self.store = Store(directory, max_size, user_quota, max_age)
        self.room = Room(self.store, max_entries, min_free)
        self.damage: list[Exception] = []
        self.writer = WriterThread(self.store, self.damage.append, self.room)

    def close(self) -> None:
        """Finish and close."""
        assert self.writer.stop(20)
        self.store.close()

    def begin_put(self, key: str, payload: bytes, program: bytes, **changes: Any) -> Future[protocol.Message]:
        """Have something stored, by descriptor what is large; the answer comes later."""
        message = put_message(key, payload, program, **changes)
        done: Future[protocol.Message] = Future()
        sources = (
            source_of(message.digest, message.stored_size, payload),
            source_of(message.program_stored_digest, message.program_stored_size, program),
        )
        self.writer.submit(PutJob(message, *sources, WRITER, done))
        return done

    def put(self, key: str, payload: bytes, program: bytes, **changes: Any) -> protocol.Message:
        """Have something stored, and wait for the answer and all that is done after it."""
        answer = self.begin_put(key, payload, program, **changes).result(20)
        self.sync()
        return answer

    def begin_call(self, call: Any) -> Future[protocol.Message]:
        """Have something done on the writer's thread; the answer comes later."""
        return self.writer.call(lambda: call(self.store))

    def call(self, call: Any) -> protocol.Message:
        """Have something done on the writer's thread."""
        return self.begin_call(call).result(20)

    def sync(self) -> None:
        """Wait until everything is written, and what was too much is gone."""
        self.call(lambda store: self.writer.catch_up())

    def begin_remove(self, *keys: str) -> Future[protocol.Message]:
        """Have entries removed; the answer comes later."""
        return self.begin_call(lambda store: removed(store, [Entry(key, WRITER.uid) for key in keys]))

    def remove(self, *keys: str) -> protocol.Message:
        """Remove entries."""
        return self.begin_remove(*keys).result(20)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Keep the writer busy, so that what is asked of it meanwhile is done together."""
        gate = threading.Event()
        self.begin_call(lambda store: gate.wait(20))
        yield
        gate.set()

    def get(self, key: str) -> bytes | None:
        """What is stored under a key."""
        hits = self.store.reading.find(key)
        if not hits:
            return None
        (hit,) = hits
        assert hit.answer
        if hit.is_inline:
            return hit.answer.message.payload
        with open(self.store.files.open(hit.digest), "rb") as file:
            return file.read()

    def keys(self) -> set[str]:
        """The keys of all entries."""
        return {key for (key,) in self.query("SELECT key FROM entries")}

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows, read from outside."""
        with contextlib.closing(sqlite3.connect(self.directory / "store.db")) as database:
            return database.execute(sql).fetchall()

    def change(self, sql: str, *values: object) -> None:
        """Alter the database behind the daemon's back."""
        with contextlib.closing(sqlite3.connect(self.directory / "store.db")) as database, database:
            database.execute(sql, values)

    def check(self) -> None:
        """Totals are the sums of what is there, and nothing is there that nothing refers to."""
        check_tables(self.query, self.directory)
        assert self.store.reading.totals()["entries"] == len(self.keys())


def check_tables(query: Callable[[str], list[tuple[Any, ...]]], directory: Path) -> None:
    """The store in this folder, which ``query`` reads, is whole in itself: sums, references and files."""
    entries = query("SELECT blob, program FROM entries")
    programs = dict(query("SELECT digest, blob FROM programs"))
    blobs = query("SELECT digest, stored_size, content FROM blobs")
    assert set(programs) == {program for _, program in entries}
    assert {digest for digest, _, _ in blobs} == {blob for blob, _ in entries} | set(programs.values())
    assert dict(query("SELECT name, amount FROM totals")) == {
        "entries": len(entries),
        "bytes": sum(size for _, size, _ in blobs),
    }
    described = {digest for (digest,) in query("SELECT digest FROM components")}
    keys = query("SELECT options_component, flags_component, platform_component, toolchain_component FROM entries")
    assert described == {digest for key in keys for digest in key}
    files = {path.name: path.stat().st_size for path in directory.glob("blobs/*/*") if path.is_file()}
    assert files == {digest: size for digest, size, content in blobs if content is None}


def source_of(digest: str, size: int, content: bytes) -> Source:
    """A content on its way in."""
    if len(content) <= protocol.INLINE_LIMIT:
        return Source(digest, size, content, None)
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return Source(digest, size, None, os.dup(file.fileno()))


@contextlib.contextmanager
def shelf(directory: Path, max_size: int = 0, **limits: Any) -> Iterator[Shelf]:
    """An open store for as long as the block lasts."""
    made = Shelf(directory, max_size, **limits)
    try:
        yield made
    finally:
        made.close()


def quick_folder() -> Path:
    """A folder in memory where there can be one, for what has many steps and is not about the disk."""
    with contextlib.suppress(OSError):
        return Path(tempfile.mkdtemp(prefix="xc", dir="/dev/shm"))
    return Path(tempfile.mkdtemp(prefix="xc"))
