"""What each request means."""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from xcache import protocol
from xcache.config import Config
from xcached.store import Source, Store, Writer
from xcached.writer import CallJob, PutJob, WriterThread

logger = logging.getLogger("xcached")

_DIGITS = frozenset("0123456789abcdef")
_COUNTERS = frozenset({"requests", "hits", "misses", "bytes_read", "compile_seconds", "load_seconds", "saved_seconds"})
_GROUPS = ("uncacheable:", "errors:")
_LARGEST = 2**53


class Client(NamedTuple):
    """Who is asking: what the kernel says, and what they say of themselves."""

    pid: int
    uid: int
    program: str


class Reply(NamedTuple):
    """An answer, and a descriptor that goes with it."""

    message: protocol.Message
    descriptor: int | None = None


Answer = Reply | Future[protocol.Message]


class Service:
    """Answers requests from the store; reads at once, changes on the writer's thread."""

    def __init__(self, store: Store, config: Config, version: str, stop: Callable[[str], None]) -> None:
        self._store = store
        self._config = config
        self._version = version
        self._stop = stop
        self._writer = WriterThread(store)
        self._started = time.time()
        self.connections = 0
        self._handlers: dict[type[Any], Callable[[Client, Any, Sequence[int]], Answer]] = {
            protocol.Get: self._get,
            protocol.Put: self._put,
            protocol.MarkNotCacheable: self._mark_not_cacheable,
            protocol.Report: self._report,
            protocol.Remove: self._remove,
            protocol.Clear: self._clear,
            protocol.Sync: self._sync,
            protocol.ZeroStatistics: self._zero_statistics,
            protocol.AskStatus: self._status,
            protocol.Stop: self._stop_daemon,
        }

    def handle(self, client: Client, message: protocol.Message, descriptors: Sequence[int]) -> Answer:
        """Answer one request, now or later; descriptors that are not passed on are the caller's to close."""
        handler = self._handlers.get(type(message))
        if handler is None:
            return Reply(protocol.Refused("protocol error", f"{type(message).__name__} is not a request"))
        return handler(client, message, descriptors)

    def welcome(self) -> protocol.Welcome:
        """The answer to Hello."""
        return protocol.Welcome(protocol.VERSION, self._version, os.getpid(), protocol.path_text(self._config.dir))

    def finish(self, seconds: float) -> bool:
        """Write what is still to be written, and close the store."""
        done = self._writer.stop(seconds)
        if done:
            self._store.close()
        return done

    def _get(self, client: Client, message: protocol.Get, descriptors: Sequence[int]) -> Answer:
        hit = self._store.get(message.key)
        if hit is None:
            reason = self._store.why_not(message.key)
            return Reply(protocol.Missing() if reason is None else protocol.NotCacheable(reason))
        descriptor = None
        if hit.content is None:
            descriptor = self._store.open_file(hit.digest)
            if descriptor is None:
                logger.error("the file of %r is gone; its entry is dropped", message.key)
                self._call(lambda store: _removed(store, [message.key]))
                return Reply(protocol.Missing())
        self._writer.note_use(message.key, time.time())
        return Reply(protocol.Found(hit.digest, hit.stored_size, hit.compile_seconds, hit.content), descriptor)

    def _put(self, client: Client, message: protocol.Put, descriptors: Sequence[int]) -> Answer:
        named = (message.key, message.digest, message.program_digest, message.program_stored_digest)
        for digest in (*named, *message.components.values()):
            if not _is_digest(digest):
                return Reply(protocol.Refused("protocol error", f"{digest[:80]!r} is not a digest"))
        if missing := [name for name in protocol.DESCRIBED_COMPONENTS if name not in message.components]:
            return Reply(protocol.Refused("protocol error", f"the key has no {missing[0]}"))
        sizes = (message.raw_size, message.stored_size, message.program_raw_size, message.program_stored_size)
        if not all(0 <= size <= _LARGEST for size in sizes) or not 0 <= message.compile_seconds <= _LARGEST:
            return Reply(protocol.Refused("protocol error", "a size or a time that cannot be"))
        if len(descriptors) != message.wants_descriptors:
            came = f"{len(descriptors)} descriptors came, not {message.wants_descriptors}"
            return Reply(protocol.Refused("protocol error", came))
        copies = _duplicates(descriptors)
        of_executable = copies.pop(0) if message.payload is None else None
        of_program = copies.pop(0) if message.program is None else None
        executable = Source(message.digest, message.stored_size, message.payload, of_executable)
        program = Source(message.program_stored_digest, message.program_stored_size, message.program, of_program)
        done: Future[protocol.Message] = Future()
        self._writer.submit(PutJob(message, executable, program, Writer(client.uid, client.pid, client.program), done))
        return done

    def _mark_not_cacheable(
        self, client: Client, message: protocol.MarkNotCacheable, descriptors: Sequence[int]
    ) -> Answer:
        def mark(store: Store) -> protocol.Message:
            with store.transaction():
                store.mark_not_cacheable(message)
            return protocol.Done()

        if not _is_digest(message.key):
            return Reply(protocol.Refused("protocol error", f"{message.key[:80]!r} is not a digest"))
        return self._call(mark)

    def _report(self, client: Client, message: protocol.Report, descriptors: Sequence[int]) -> Answer:
        counts = {
            name: amount
            for name, amount in message.counts.items()
            if name in _COUNTERS or (name.startswith(_GROUPS) and len(name) < 200)
        }
        self._writer.note_counts(counts)
        return Reply(protocol.Done())

    def _remove(self, client: Client, message: protocol.Remove, descriptors: Sequence[int]) -> Answer:
        return self._call(lambda store: _removed(store, message.keys))

    def _clear(self, client: Client, message: protocol.Clear, descriptors: Sequence[int]) -> Answer:
        def clear(store: Store) -> protocol.Message:
            with store.transaction():
                store.forget_marks()
            return _removed(store, store.keys())

        return self._call(clear)

    def _sync(self, client: Client, message: protocol.Sync, descriptors: Sequence[int]) -> Answer:
        # The writer writes what it holds back before it comes to this.
        return self._call(lambda _: protocol.Done())

    def _zero_statistics(self, client: Client, message: protocol.ZeroStatistics, descriptors: Sequence[int]) -> Answer:
        def zero(store: Store) -> protocol.Message:
            with store.transaction():
                store.zero_statistics()
            return protocol.Done()

        return self._call(zero)

    def _status(self, client: Client, message: protocol.AskStatus, descriptors: Sequence[int]) -> Answer:
        totals = self._store.totals()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Reply(
            protocol.Status(
                {
                    "pid": os.getpid(),
                    "version": self._version,
                    "uptime_seconds": round(time.time() - self._started, 3),
                    "connections": self.connections,
                    "entries": totals["entries"],
                    "bytes": totals["bytes"],
                    "max_size": self._config.max_size,
                    "peak_memory": peak,
                }
            )
        )

    def _stop_daemon(self, client: Client, message: protocol.Stop, descriptors: Sequence[int]) -> Answer:
        self._stop(f"asked by process {client.pid} ({client.program!r}): {message.reason[:200]!r}")
        return Reply(protocol.Done())

    def _call(self, call: Callable[[Store], protocol.Message]) -> Answer:
        done: Future[protocol.Message] = Future()
        self._writer.submit(CallJob(call, done))
        return done


def _removed(store: Store, keys: Sequence[str]) -> protocol.Message:
    entries = total = 0
    # In steps, so that clearing a large store does not keep others waiting for one long transaction.
    for start in range(0, len(keys), 500):
        before = store.totals_now()
        with store.transaction():
            loose = store.remove(keys[start : start + 500])
        store.delete_files(loose)
        after = store.totals_now()
        entries += before["entries"] - after["entries"]
        total += before["bytes"] - after["bytes"]
    return protocol.Removed(entries, total)


def _duplicates(descriptors: Sequence[int]) -> list[int]:
    """Descriptors of the same files, or none of them."""
    copies: list[int] = []
    try:
        for descriptor in descriptors:
            copies.append(os.dup(descriptor))  # noqa: PERF401 - what was copied before a failure has to be known
    except OSError:
        for copy in copies:
            os.close(copy)
        raise
    return copies


def _is_digest(text: str) -> bool:
    return len(text) == 64 and _DIGITS.issuperset(text)
