"""Store compiled executables in the background: a queue, its thread, and the work on each executable."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from xcache.aliases import Aliases
from xcache.announcing import Announcer
from xcache.client.client import Client
from xcache.clock import monotonic
from xcache.counters import Counting
from xcache.errors import UncacheableError, XcacheError
from xcache.recording import Ledger, Program
from xcache.request import Request
from xcache.signals import reraise_if_the_programs
from xcache.threads import usual_stack
from xcache.wire import envelope, hashing, protocol

logger = logging.getLogger("xcache")

Job = TypeVar("Job")

_MAX_JOBS = 4096
# While the daemon must not be asked, fewer jobs are kept, because each holds an executable. During a longer pause none
# is: the program may be waiting for the thread to end.
_MAX_KEPT_JOBS, _LONGEST_PAUSE_SECONDS = 64, 2.0
# The thread ends after this long without a job.
_LINGER_SECONDS = 1.0
# Seconds between two checks, while the program exits, of whether the daemon is late.
_EXIT_POLL_SECONDS = 0.05


class Compiled(NamedTuple):
    """An executable to store, and the lease it was compiled under (0 for none)."""

    request: Request
    executable: Any
    seconds: float
    lease: int
    serialized: bytes | BaseException | None
    """The result of serializing it before the program got it; None if that was not tried."""
    complaints: tuple[protocol.Complain, ...]
    located: bytes
    program: Program


class Storer:
    """Serializes and compresses executables, and sends them to the daemon."""

    def __init__(
        self,
        client: Client,
        counting: Counting,
        announcer: Announcer,
        aliases: Aliases,
        ledger: Ledger,
        *,
        overwrite: bool,
    ) -> None:
        self._client = client
        self._counting = counting
        self._announcer = announcer
        self._aliases = aliases
        self._ledger = ledger
        self._overwrite = overwrite

    def store(self, compiled: Compiled) -> bool:
        """Store an executable, or mark its key as not cacheable if it cannot be serialized.

        Return whether there can be an entry, now or after another run.
        """
        for complaint in compiled.complaints:
            self._complain(complaint)
        serialized = compiled.serialized
        if serialized is None:
            try:
                with self._ledger.stage("serialize"):
                    serialized = compiled.request.serialize(compiled.executable)
            except BaseException as error:  # noqa: BLE001 - whatever jaxlib raises
                serialized = error
        if isinstance(serialized, bytes):
            # An entry that jaxlib did not load stays in the store until this one replaces it.
            with self._ledger.stage("store"):
                self._put(compiled, serialized, instead=any(complaint.whole for complaint in compiled.complaints))
            compiled.program.stored = "yes"
            return True
        return self._note_failure(compiled.request, serialized, tried_first=compiled.serialized is not None)

    def _complain(self, complaint: protocol.Complain) -> None:
        try:
            self._client.complain(complaint)
        except XcacheError as error:
            logger.debug("could not tell the daemon of an unusable entry: %s", error)

    def _put(self, compiled: Compiled, raw: bytes, *, instead: bool) -> None:
        request, seconds = compiled.request, compiled.seconds
        key = request.key
        self._announcer.announce(request, in_background=True)
        message, sealed, program = stored_form(request, raw, seconds, compiled.located)
        message = message._replace(overwrite=self._overwrite or instead)
        self._client.put(message, sealed, program)
        self._counting.add(stores=1, bytes_written=len(sealed))
        if request.alias is not None:
            # The daemon takes it only now that there is an entry of its program.
            self._aliases.note(request.alias)
        logger.debug("stored: %s %s (%d bytes)", request.module_name, key.digest[:12], len(sealed))

    def _note_failure(self, request: Request, error: BaseException, *, tried_first: bool) -> bool:
        """Have the daemon remember that an executable could not be serialized; return whether a later run could."""
        if isinstance(error, UncacheableError):
            reason = str(error)
        elif "UNIMPLEMENTED" not in str(error):
            raise error
        elif tried_first:
            reason = "not serializable"
        else:
            # The program may have run it by now, and XLA:CPU changes some executables when they run.
            reason = protocol.SERIALIZE_FIRST
        logger.debug("not cached: %s: %s (%s)", request.module_name, reason, error)
        self._ledger.tell(stored=f"no: {reason}")
        if reason != protocol.SERIALIZE_FIRST:
            # It was counted as a miss, but no later run will find it.
            self._counting.reclassify_miss(reason, self._ledger.current().cause)
        self._client.mark_not_cacheable(request.key.digest, request.module_name[: protocol.MAX_NAME], reason)
        return reason == protocol.SERIALIZE_FIRST


def stored_form(request: Request, raw: bytes, seconds: float, located: bytes) -> tuple[protocol.Put, bytes, bytes]:
    """Return the message that stores an executable, and its contents: the sealed executable and its program.

    ``raw`` is the serialized executable, ``located`` the program with its locations, or nothing.
    """
    key = request.key
    sealed = envelope.seal(key.digest, raw)
    program = envelope.compress_program(request.program, located) if located else envelope.compress(request.program)
    message = protocol.Put(
        key=key.digest,
        overwrite=False,
        module_name=request.module_name[: protocol.MAX_NAME],
        platform=request.platform,
        device_kind=request.device_kind,
        jaxlib_version=request.jaxlib_version,
        codec=envelope.CODEC,
        raw_size=len(raw),
        compile_seconds=seconds,
        digest=hashing.digest(sealed),
        stored_size=len(sealed),
        program_digest=key.components["program"],
        program_raw_size=len(request.program),
        program_stored_digest=hashing.digest(program),
        program_stored_size=len(program),
        components=dict(key.components),
        details=dict(request.details()),
        payload=None,
        program=None,
    )
    return message, sealed, program


def serialize_first(request: Request, executable: Any) -> bytes | BaseException:
    """Serialize before the program gets the executable; the queue's thread handles a returned exception."""
    try:
        return request.serialize(executable)
    except BaseException as error:  # noqa: BLE001 - whatever jaxlib raises
        reraise_if_the_programs(error)
        return error.with_traceback(None)


def located_first(request: Request) -> bytes:
    """Return the module with its locations, before XLA changes it; nothing if that fails."""
    try:
        return request.located()
    except BaseException as error:  # noqa: BLE001 - whatever MLIR raises, the program compiles
        reraise_if_the_programs(error)
        return b""


class StoreQueue(Generic[Job]):
    """A queue of jobs and the one daemonic thread that does them; the thread runs only while there is work.

    Thread-safe. The thread calls ``report`` when the queue has been empty for a second.
    """

    def __init__(
        self,
        work: Callable[[Job], None],
        report: Callable[[], None],
        is_late: Callable[[], bool],
        pause: Callable[[], float],
    ) -> None:
        """Take the work for each job.

        ``is_late`` returns whether an answer of the daemon is overdue; ``pause``, for how many seconds it must not be
        asked after a failure. Jobs wait for the end of a short pause, unless the queue is to finish.
        """
        self._work = work
        self._report = report
        self._is_late = is_late
        self._pause = pause
        self._jobs: deque[tuple[Job, float]] = deque()
        # Take this lock, never the condition: Ctrl-C in Condition.__enter__, which is Python, would leave it held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._working = 0.0
        self._busy = False
        self._finishing = False
        self._report_soon = False
        self._reported_at = 0.0
        # Seconds of the last ``finish`` that were spent on overdue answers of the daemon.
        self.late_seconds = 0.0

    def add(self, job: Job, weight: float) -> bool:
        """Queue a job whose loss would cost ``weight`` seconds; return False if the queue is full or has no thread."""
        with self._lock:
            if len(self._jobs) >= (_MAX_KEPT_JOBS if self._pause() else _MAX_JOBS):
                return False
            self._jobs.append((job, weight))
            if self._wake():
                return True
            self._jobs.pop()
            return False

    def report_soon(self) -> None:
        """Have the thread call ``report`` within about a second."""
        with self._lock:
            self._report_soon = True
            # A thread that lives looks by itself within a second; waking it would take the GIL from the program.
            if self._thread is None:
                self._wake()

    def finish(self, seconds: float) -> int:
        """Wait until all jobs are done, and return how many had to be dropped.

        The wait ends after ``seconds``, or after a tenth of the time that compiling the pending jobs took, whichever is
        longer. It spends no more than ``seconds`` in all on overdue answers of the daemon; how much it did spend is in
        ``late_seconds``.
        """
        self.late_seconds = 0.0
        with self._lock:
            at_most = max(seconds, 0.1 * (self._working + sum(weight for _, weight in self._jobs)))
            now = start = monotonic()
            self._finishing = True
            is_awake, thread = self._wake(), self._thread
            try:
                while self._thread is not None and now < start + at_most:
                    self._changed.wait(min(_EXIT_POLL_SECONDS, start + at_most - now))
                    before, now = now, monotonic()
                    if self._is_late():
                        self.late_seconds += now - before
                        if self.late_seconds >= seconds:
                            break
            finally:
                # Also after Ctrl-C: the thread must not begin anything more.
                dropped = len(self._jobs) + self._busy
                self._jobs.clear()
                self._finishing = False
        if not is_awake and seconds > 0:
            # Python 3.12 starts no thread once it is ending, and what was counted last is unsaid.
            self._report_now()
        if thread and not dropped:
            # The thread has left the queue, but may not have ended yet.
            thread.join(max(0.0, start + at_most - monotonic()))
        return dropped

    def _wake(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="xcache-store", daemon=True)
            try:
                with usual_stack():
                    thread.start()
            except RuntimeError:
                # The process has no thread left, or the interpreter is shutting down.
                return False
            self._thread = thread
        self._changed.notify_all()
        return True

    def _run(self) -> None:
        try:
            while not self._rest():
                pass
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None
                self._changed.notify_all()

    def _report_now(self) -> None:
        self._report_soon, self._reported_at = False, monotonic()
        self._report()

    def _rest(self) -> bool:
        """Do one job, or report; return whether the thread may end."""
        with self._lock:
            self._changed.wait_for(lambda: self._jobs or self._finishing, _LINGER_SECONDS)
            while self._jobs and not self._finishing and 0 < (seconds := self._pause()) <= _LONGEST_PAUSE_SECONDS:
                self._changed.wait(seconds)
            job, self._working = self._jobs.popleft() if self._jobs else (None, 0.0)
            self._busy = job is not None
        if job is not None:
            self._work(job)
            # A process that is killed amid many compiles leaves its ledger up to the last second.
            if self._report_soon and monotonic() >= self._reported_at + _LINGER_SECONDS:
                self._report_now()
            return False
        self._report_now()
        with self._lock:
            if self._jobs or self._report_soon:
                return False
            # Under the lock, so that the next job starts another thread.
            self._thread = None
            return True
