"""What is compiled is stored behind the program's back: a queue and its thread, and what that does with each."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from xcache import keys, payload, protocol
from xcache.client import Client
from xcache.clock import monotonic
from xcache.counting import Counting
from xcache.errors import UncacheableError
from xcache.request import Request

logger = logging.getLogger("xcache")

Job = TypeVar("Job")

_LONGEST = 4096
_LINGER = 1.0


class Compiled(NamedTuple):
    """What is to be stored, and the lease under which it was compiled (0 for none)."""

    request: Request
    executable: Any
    seconds: float
    lease: int
    raw: bytes | None


class Storer:
    """Serializes, compresses and sends."""

    def __init__(
        self, client: Client, counting: Counting, announce: Callable[[Request], None], *, overwrite: bool
    ) -> None:
        self._client = client
        self._counting = counting
        self._announce = announce
        self._overwrite = overwrite

    def store(self, compiled: Compiled) -> None:
        """Have it stored, unless it turns out to be of a kind that cannot be."""
        request = compiled.request
        raw = compiled.raw or self._serialize(request, compiled.executable)
        if raw is not None:
            self._put(request, raw, compiled.seconds)

    def _put(self, request: Request, raw: bytes, seconds: float) -> None:
        key = request.key
        self._announce(request)
        sealed, program = payload.seal(key.digest, raw), payload.compress(request.program)
        message = protocol.Put(
            key=key.digest,
            overwrite=self._overwrite,
            module_name=request.module_name[:500],
            platform=request.platform,
            device_kind=request.device_kind,
            jaxlib_version=request.jaxlib_version,
            codec=payload.CODEC,
            raw_size=len(raw),
            compile_seconds=seconds,
            digest=keys.digest(sealed),
            stored_size=len(sealed),
            program_digest=key.components["program"],
            program_raw_size=len(request.program),
            program_stored_digest=keys.digest(program),
            program_stored_size=len(program),
            components=dict(key.components),
            details=dict(request.details()),
            payload=None,
            program=None,
        )
        self._client.put(message, sealed, program)
        self._counting.add(stores=1, bytes_written=len(sealed))
        logger.debug("stored: %s %s (%d bytes)", request.module_name, key.digest[:12], len(sealed))

    def _serialize(self, request: Request, executable: Any) -> bytes | None:
        """The executable's bytes; None, remembered with the reason, for a kind that XLA cannot serialize."""
        try:
            return request.serialize(executable)
        except UncacheableError as error:
            reason = str(error)
        except Exception as error:
            if "UNIMPLEMENTED" not in str(error):
                raise
            reason = "not serializable"
            logger.debug("%s: %s", request.module_name, error)
        logger.debug("not cached: %s: %s", request.module_name, reason)
        # It was taken for a miss, which is something another run could find.
        self._counting.reclassify_miss(reason)
        self._client.mark_not_cacheable(request.key.digest, request.module_name[:500], reason)
        return None


class StoreQueue(Generic[Job]):
    """Does each job on one daemonic thread, started when there is something to do.

    Thread-safe. ``tell`` is called on the same thread when the work is done for the moment, at most once a second.
    """

    def __init__(self, work: Callable[[Job], None], tell: Callable[[], None], patience: float) -> None:
        self._work = work
        self._tell = tell
        self._patience = patience
        self._jobs: deque[tuple[Job, float]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._working = 0.0
        self._busy = False
        self._finishing = False
        self._soon = False

    def add(self, job: Job, weight: float) -> bool:
        """Queue a job whose loss would cost ``weight`` seconds; False when it cannot be done."""
        with self._changed:
            if len(self._jobs) >= _LONGEST:
                return False
            self._jobs.append((job, weight))
            if self._wake():
                return True
            self._jobs.pop()
            return False

    def tell_soon(self) -> None:
        """Have ``tell`` called within about a second."""
        with self._changed:
            self._soon = True
            # One that is there looks again within a second; to wake it would keep the program from running.
            if self._thread is None:
                self._wake()

    def finish(self, seconds: float | None = None) -> int:
        """Wait until everything is done, and return how many jobs had to be dropped.

        Without ``seconds`` the bound is the patience with a daemon, or a tenth of the seconds it took to compile what
        would be lost, whichever is longer.
        """
        with self._changed:
            if seconds is None:
                seconds = max(self._patience, 0.1 * (self._working + sum(weight for _, weight in self._jobs)))
            deadline = monotonic() + seconds
            self._finishing = True
            self._wake()
            thread = self._thread
            self._changed.wait_for(lambda: self._thread is None, max(0.0, deadline - monotonic()))
            dropped = len(self._jobs) + self._busy
            self._jobs.clear()
            self._finishing = False
        if thread:
            # It may have said its last word in here and still have to go.
            thread.join(max(0.0, deadline - monotonic()))
        return dropped

    def _wake(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="xcache-store", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # No thread to be had, or none any more: the interpreter is on its way out.
                return False
            self._thread = thread
        self._changed.notify_all()
        return True

    def _run(self) -> None:
        try:
            while not self._rest():
                pass
        finally:
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None
                self._changed.notify_all()

    def _rest(self) -> bool:
        """Do one job; whether there was none for a while and the thread may go."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._finishing, _LINGER)
            job, self._working = self._jobs.popleft() if self._jobs else (None, 0.0)
            self._busy = job is not None
        if job is not None:
            self._work(job)
            return False
        self._soon = False
        self._tell()
        with self._changed:
            if self._jobs or self._soon:
                return False
            # Under the lock, so that whoever adds a job from here on starts another thread.
            self._thread = None
            return True
