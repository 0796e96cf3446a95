"""The one thread that changes the store. What is queued while it works is done together in the next transaction."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

from xcache import protocol
from xcache.errors import RefusedError
from xcached.database import is_damage
from xcached.store import MOST_COUNTERS, Entry, Source, Store, Use, Writer

logger = logging.getLogger("xcached")

_BATCH = 100
# Uses and statistics are written this often when nothing else is.
_FLUSH_EVERY = 5.0
_LARGEST_COUNT = 2.0**53


class PutJob(NamedTuple):
    """One entry to be written."""

    put: protocol.Put
    executable: Source
    program: Source
    writer: Writer
    done: Future[protocol.Message]

    @property
    def entry(self) -> Entry:
        """What it would become."""
        return Entry(self.put.key, self.writer.uid)


class CallJob(NamedTuple):
    """Something else to be done between transactions."""

    call: Callable[[Store], protocol.Message]
    done: Future[protocol.Message]


Job = PutJob | CallJob


class WriterThread:
    """Owns the writing side of a store. ``submit`` and the ``note`` methods may be called from one other thread."""

    def __init__(self, store: Store, on_damage: Callable[[Exception], None]) -> None:
        """``on_damage`` is told, on this thread, that the database itself is damaged."""
        self._store = store
        self._on_damage = on_damage
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._uses: dict[Entry, Use] = {}
        self._counts: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="xcached-writer", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; its future is resolved on the writer's thread."""
        self._jobs.put(job)

    def note_use(self, entry: Entry, now: float) -> None:
        """An entry was asked for; written later, with others."""
        with self._lock:
            # Taken out, so that they stand in the order of their last use.
            before = self._uses.pop(entry, None)
            self._uses[entry] = Use(before.hits + 1 if before else 1, now)

    def note_counts(self, counts: Mapping[str, float]) -> None:
        """Something was counted; written later, with others. What cannot be a count is passed over."""
        with self._lock:
            for name, amount in counts.items():
                known = name in self._counts or len(self._counts) < MOST_COUNTERS
                if known and abs(amount) <= _LARGEST_COUNT:
                    self._counts[name] = self._counts.get(name, 0) + amount

    def stop(self, seconds: float) -> bool:
        """Finish everything that is queued; whether that worked within ``seconds``."""
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._guard(lambda: logger.debug("swept %d leftover files", self._store.sweep()))
        self._guard(self._evict)
        going = True
        while going:
            batch = self._next_batch()
            going = None not in batch
            self._guard(self._flush)
            self._do(batch)
            self._guard(self._flush)
            self._guard(self._evict)
            self._guard(self._store.give_back_room)

    def _do(self, batch: list[Job | None]) -> None:
        """All of it in the order in which it was asked for; neighbouring puts share a transaction."""
        puts: list[PutJob] = []
        for job in [*batch, None]:
            if isinstance(job, PutJob):
                puts.append(job)
                continue
            if puts:
                self._put(puts)
                self._guard(self._flush)
                puts = []
            if job is not None:
                self._call(job)

    def _next_batch(self) -> list[Job | None]:
        batch: list[Job | None] = []
        with contextlib.suppress(queue.Empty):
            batch.append(self._jobs.get(timeout=_FLUSH_EVERY))
            while len(batch) < _BATCH:
                batch.append(self._jobs.get_nowait())
        return batch

    def _put(self, jobs: list[PutJob]) -> None:
        results: list[protocol.Message] = []
        loose: list[str] = []
        try:
            accepted = [self._accept(job) for job in jobs]
            with self._store.transaction():
                for job, refused in zip(jobs, accepted, strict=True):
                    results.append(refused or self._put_one(job, loose))
        except Exception as error:  # noqa: BLE001 - told to each client; the daemon goes on
            self._failed(error, "entries could not be written")
            results = [refusal(error)] * len(jobs)
        else:
            kept = [job.put.stored_size for job, r in zip(jobs, results, strict=True) if r == protocol.Stored(True)]
            self.note_counts({"stores": len(kept), "bytes_written": sum(kept)} if kept else {})
        # A file brought in for an entry that was not kept is as loose as one that was replaced, by a row perhaps.
        brought = [source.digest for job in jobs for source in (job.executable, job.program)]
        self._guard(lambda: self._store.delete_files([*loose, *brought]))
        for job, reply in zip(jobs, results, strict=True):
            job.done.set_result(reply)

    def _accept(self, job: PutJob) -> protocol.Refused | None:
        """Have the contents checked and brought to disk, ahead of the transaction that speaks of them."""
        try:
            self._refuse_too_large(job.put)
            if job.put.overwrite or not self._store.has(job.entry):
                self._store.accept(job.executable)
                self._store.accept(job.program)
        except Exception as error:  # noqa: BLE001 - one bad put must not take the others with it
            return refusal(error)
        finally:
            for source in (job.executable, job.program):
                if source.descriptor is not None:
                    os.close(source.descriptor)
        return None

    def _put_one(self, job: PutJob, loose: list[str]) -> protocol.Message:
        if not job.put.overwrite and self._store.has(job.entry):
            return protocol.Stored(kept=False)
        try:
            with self._store.part():
                loose += self._store.put(job.put, job.executable, job.program, job.writer)
        except Exception as error:
            if is_damage(error):
                raise
            return refusal(error)
        return protocol.Stored(kept=True)

    def _refuse_too_large(self, put: protocol.Put) -> None:
        together = put.stored_size + put.program_stored_size
        for limit, whose in ((self._store.max_size, "the store"), (self._store.user_quota, "one user's entries")):
            if limit and together > limit:
                raise RefusedError("too large", f"{together} bytes are more than {whose} may hold")

    def _evict(self) -> None:
        count, freed = self._store.evict()
        if count:
            logger.info("evicted %d entries, %d bytes", count, freed)

    def _flush(self) -> None:
        with self._lock:
            uses, self._uses = self._uses, {}
            counts, self._counts = self._counts, {}
        if uses or counts:
            with self._store.transaction():
                self._store.note_uses(uses)
                self._store.add_statistics(counts)

    def _call(self, job: CallJob) -> None:
        try:
            job.done.set_result(job.call(self._store))
        except Exception as error:  # noqa: BLE001 - told to the client; the daemon goes on
            self._failed(error, "a request failed")
            job.done.set_result(refusal(error))

    def _guard(self, work: Callable[[], object]) -> None:
        """Do something whose failure concerns no client in particular, and must not end the thread."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - see above
            self._failed(error, "the store could not be written")

    def _failed(self, error: Exception, what: str) -> None:
        logger.error("%s: %s", what, error)
        if is_damage(error):
            self._on_damage(error)


def refusal(error: Exception) -> protocol.Refused:
    """What a client is told about an error."""
    if isinstance(error, RefusedError):
        return protocol.Refused(error.kind, str(error))
    if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
        return protocol.Refused("disk full", str(error))
    return protocol.Refused("store error", f"{type(error).__name__}: {error}")
