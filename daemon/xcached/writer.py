"""The one thread that changes the store. What is queued while it works is done together in the next transaction."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from typing import NamedTuple

from xcache import protocol
from xcache.errors import RefusedError
from xcached.database import is_damage
from xcached.room import Room, Tally
from xcached.store import MOST_COUNTERS, Entry, Source, Store, Use, Writer
from xcached.trace import Trace

logger = logging.getLogger("xcached")

_BATCH = 100
# Uses and statistics are written this often when nothing else is.
_FLUSH_EVERY = 5.0
# Of room that can be given back when the daemon leaves.
_LAST_SECONDS = 1.0
# What has just come, and is worth less than all others, goes after this time.
_SOON = 0.5
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

    work: Callable[[], protocol.Message | None]
    done: Future[protocol.Message]


class LongJob(NamedTuple):
    """Something that takes long: done step by step, and what others want comes in between."""

    steps: Generator[None, None, protocol.Message]
    done: Future[protocol.Message]


Job = PutJob | CallJob | LongJob


class WriterThread:
    """Owns the writing side of a store. What is noted may come from one other thread, jobs from any."""

    def __init__(
        self, store: Store, on_damage: Callable[[Exception], None], room: Room | None = None, trace: Trace | None = None
    ) -> None:
        """``on_damage`` is told, on this thread, that the database itself is damaged."""
        self._store = store
        self._room = room or Room(store)
        self._on_damage = on_damage
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._uses: dict[Entry, Use] = {}
        self._counts: dict[str, float] = {}
        # What is done when nobody else wants anything.
        self._more_to_do = False
        self._trace = trace or Trace(None)
        self._thread = threading.Thread(target=self._run, name="xcached-writer", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; its future is resolved on the writer's thread."""
        self._jobs.put(job)

    def call(self, work: Callable[[], protocol.Message | None]) -> Future[protocol.Message]:
        """Queue something else; its answer is Done where it says none."""
        done: Future[protocol.Message] = Future()
        self.submit(CallJob(work, done))
        return done

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

    def catch_up(self) -> protocol.Message:
        """On the writer's thread: whatever may go does, also what has just come."""
        self._room.begin()
        # What was held back is written all the same.
        self._guard(functools.partial(self._make_room, []))
        return protocol.Done()

    def _run(self) -> None:
        self._guard(lambda: logger.debug("swept %d leftover files", self._store.sweep()))
        # A limit may be less than it was.
        self._guard(lambda: self._make_room([]))
        going = True
        while going:
            batch = self._next_batch()
            going = None not in batch
            self._guard(self._flush)
            self._room.begin()
            brought = self._do(batch)
            self._guard(self._flush)
            self._more_to_do = False
            self._guard(functools.partial(self._make_room, brought, leaving=not going))
        self._guard(self._give_back_some)

    def _do(self, batch: list[Job | None]) -> list[int]:
        """All of it in the order in which it was asked for; neighbouring puts share a transaction.

        Returns the sizes of what was put.
        """
        brought: list[int] = []
        puts: list[PutJob] = []
        for job in [*batch, None]:
            if isinstance(job, PutJob):
                puts.append(job)
                brought.append(job.put.stored_size + job.put.program_stored_size)
                continue
            if puts:
                self._put(puts)
                self._guard(self._flush)
                puts = []
            if isinstance(job, LongJob):
                self._step(job)
            elif job is not None:
                self._call(job)
        return brought

    def _next_batch(self) -> list[Job | None]:
        batch: list[Job | None] = []
        with contextlib.suppress(queue.Empty):
            patience = _SOON if self._room.waits else _FLUSH_EVERY
            batch.append(self._jobs.get(not self._more_to_do, patience))
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
                # Here, and not with what else is counted: that would be another transaction, and another sync.
                kept = [job.put.stored_size for job, r in zip(jobs, results, strict=True) if r == protocol.Stored(True)]
                if kept:
                    self._count_puts(len(kept), sum(kept))
        except Exception as error:  # noqa: BLE001 - told to each client; the daemon goes on
            self._failed(error, "entries could not be written")
            results = [refusal(error)] * len(jobs)
        # A file brought in for an entry that was not kept is as loose as one that was replaced.
        sources = [source for job in jobs for source in (job.executable, job.program)]
        brought = [source.digest for source in sources if source.descriptor is not None]
        self._guard(lambda: self._store.delete_files([*loose, *brought]))
        for job, reply in zip(jobs, results, strict=True):
            job.done.set_result(reply)

    def _count_puts(self, count: int, size: int) -> None:
        """Within the transaction. That they were not counted is no reason to do without them."""
        try:
            with self._store.part():
                self._store.add_statistics({"stores": count, "bytes_written": size})
                self._store.age_clock.note()
        except sqlite3.Error as error:
            if is_damage(error):
                raise
            self._failed(error, "what was put is not counted")

    def _accept(self, job: PutJob) -> protocol.Refused | None:
        """Have the contents checked and brought to disk, ahead of the transaction that speaks of them."""
        try:
            if job.put.overwrite or not self._store.has(job.entry):
                self._room.admit(job.put, job.writer.uid)
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

    def _make_room(self, brought: list[int], *, leaving: bool = False) -> None:
        """Evict what is too much. While others wait that is only as much as came, so that it never becomes more.

        So it is where somebody waits for the daemon to leave: the next one has the rest.
        """
        gone = Tally()
        while (freed := self._room.step()) is not None:
            gone.add(freed)
            waited_for = leaving or not self._jobs.empty()
            if waited_for and gone.bytes >= sum(brought) and gone.entries >= len(brought):
                self._more_to_do = True
                break
        if gone.entries:
            logger.info("evicted %s", gone)
        if self._jobs.empty():
            self._more_to_do |= self._room.give_back() > 0
        self._room.keep_reserve()

    def _give_back_some(self) -> None:
        """Before it leaves: nobody may come again for days."""
        until = time.monotonic() + _LAST_SECONDS
        while self._room.give_back() and time.monotonic() < until:
            pass

    def _flush(self) -> None:
        with self._lock:
            uses, self._uses = self._uses, {}
            counts, self._counts = self._counts, {}
        self._trace.write()
        if uses or counts:
            with self._store.transaction():
                self._store.note_uses(uses)
                self._store.add_statistics(counts)
                self._store.age_clock.note()

    def _call(self, job: CallJob) -> None:
        try:
            answer = job.work()
            job.done.set_result(protocol.Done() if answer is None else answer)
        except Exception as error:  # noqa: BLE001 - told to the client; the daemon goes on
            self._failed(error, "a request failed")
            job.done.set_result(refusal(error))

    def _step(self, job: LongJob) -> None:
        """One step, and the next when everybody else has had their turn."""
        try:
            next(job.steps)
        except StopIteration as end:
            job.done.set_result(end.value)
        except Exception as error:  # noqa: BLE001 - told to the client; the daemon goes on
            self._failed(error, "a request failed")
            job.done.set_result(refusal(error))
        else:
            self._jobs.put(job)

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
