"""Intake threads check large contents and copy them to disk, so that the writer thread only has to rename them.

Users take turns of a few megabytes, so that one user's gigabytes delay nobody else by more than a turn.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Generator
from typing import NamedTuple

from xcache.errors import RefusedError
from xcache.wire import protocol
from xcached.caller import close_all
from xcached.store.blobs import BlobFiles
from xcached.store.entries import Source
from xcached.store.jobs import PutJob
from xcached.store.memory_files import close_files
from xcached.store.writer import WriterThread, refuse_put

logger = logging.getLogger("xcached")

_THREADS = 2
# Bytes that a user of a shared store may have in flight; the first put may be larger.
MOST_IN_FLIGHT_BYTES = 4 * 1024**3


class _Task(NamedTuple):
    """A put, and the generator that copies its contents to disk."""

    job: PutJob
    user: int | None
    steps: Generator[None, None, PutJob]


class Intake:
    """Accepts puts with contents in files, and submits each to the writer once its contents are on disk."""

    def __init__(self, files: BlobFiles, writer: WriterThread) -> None:
        self._files = files
        self._writer = writer
        self._changed = threading.Condition()
        self._tasks: dict[int, deque[_Task]] = {}
        # Users in the order of their turns; a user whose task is being worked on is not in it.
        self._turns: deque[int] = deque()
        self._in_flight: dict[int, int] = {}
        self._closing = False
        self._threads: list[threading.Thread] = []

    def submit(self, job: PutJob, user: int | None, most_in_flight: int = 0) -> None:
        """Queue a put; the writer thread charges its time to this user (None: the daemon).

        Refuses the put of a user with more than ``most_in_flight`` bytes in flight (0: no limit).
        """
        uid, size = job.writer.uid, sum(source.size for source in job.sources if source.descriptor is not None)
        with self._changed:
            in_flight = self._in_flight.get(uid, 0)
            too_much = most_in_flight and in_flight and in_flight + size > most_in_flight
            if not too_much:
                self._in_flight[uid] = in_flight + size
                tasks = self._tasks.setdefault(uid, deque())
                tasks.append(_Task(job, user, self._steps(job)))
                if len(tasks) == 1:
                    self._turns.append(uid)
                    self._changed.notify()
                while len(self._threads) < _THREADS:
                    self._start()
        if too_much:
            close_all(source.descriptor for source in job.sources if source.descriptor is not None)
            text = f"user {uid} has {in_flight} bytes in flight; {size} more are too many"
            job.done.set_result(protocol.Refused("store busy", text))
        else:
            job.done.add_done_callback(lambda _: self._landed(uid, size))

    def copied(self, job: PutJob) -> PutJob:
        """Return a put whose contents are on disk, copied on the calling thread; raise RefusedError."""
        steps = self._steps(job)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                copied: PutJob = end.value
                break
        if any(source.descriptor is not None for source in copied.sources):
            copied.discard(self._files)
            raise RefusedError("disk full", f"{job.size} bytes do not fit beside what is there")
        return copied

    def close(self, seconds: float) -> bool:
        """Finish the queue; return whether that worked within ``seconds``."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._tasks, seconds)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"xcached-intake-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _landed(self, uid: int, size: int) -> None:
        with self._changed:
            # A put of zero bytes may end after the user's count was removed.
            if left := self._in_flight.pop(uid, 0) - size:
                self._in_flight[uid] = left

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._turns or self._closing)
                if not self._turns:
                    return
                uid = self._turns.popleft()
                task = self._tasks[uid][0]
            finished = self._step(task)
            with self._changed:
                tasks = self._tasks[uid]
                if finished:
                    tasks.popleft()
                if tasks:
                    self._turns.append(uid)
                else:
                    del self._tasks[uid]
                self._changed.notify_all()

    def _step(self, task: _Task) -> bool:
        """Take one step of a task; return whether it was the last."""
        try:
            next(task.steps)
        except StopIteration as end:
            self._writer.submit(end.value, task.user)
        except Exception as error:  # noqa: BLE001 - told to the client; the thread goes on
            task.job.done.set_result(refuse_put(error))
        else:
            return False
        return True

    def _steps(self, job: PutJob) -> Generator[None, None, PutJob]:
        executable = program = None
        try:
            executable = yield from self._copy_in(job.executable)
            program = yield from self._copy_in(job.program)
        except BaseException:
            job._replace(executable=executable or job.executable, program=program or job.program).discard(self._files)
            raise
        return job._replace(executable=executable, program=program)

    def _copy_in(self, source: Source) -> Generator[None, None, Source]:
        """Check a content, and copy it to disk if there is room; if not, the writer thread makes room first."""
        if source.descriptor is None:
            return source
        copy = yield from self._files.copy_in(source.descriptor, source.size, source.digest, source.offset)
        if copy is None:
            return source._replace(checked=True)
        # Contents wait on disk for the writer thread, not in memory.
        close_files([source.descriptor])
        return source._replace(descriptor=None, copy=copy, checked=True)
