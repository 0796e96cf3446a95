"""The circuit breaker: the time a program may lose to its daemon, and when to stop asking the daemon."""

from __future__ import annotations

import threading
from collections import deque

from xcache.clock import monotonic
from xcache.errors import NobodyThereError, NotAskedError, TimeSpentError

# An answer within this time is a good sign. A wait within _FREE_SECONDS is too short to notice and is not charged.
SWIFT_SECONDS, _FREE_SECONDS = 0.25, 0.01
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 1.0, 60.0
# One wait may use this share of what is left; the rest is for a daemon that turns out to work again.
_SHARE_PER_WAIT = 7 / 8
# The daemon is not asked if a wait could take less than this share of the timeout: a busy machine may give this thread
# no turn for so long, and the daemon would be blamed.
_MIN_SHARE = 1 / 10
# The number of charged waits that are remembered, to find those that overlap.
_MAX_SPANS = 256
# The allowance comes back at this rate, so that a program of days asks again and loses at most a hundredth of its time.
_REFILL_RATE = 0.01
# An answer in the background that takes more than this share of the timeout is a sign of trouble.
_SLOW_SHARE = 1 / 5


class _Span:
    """A time for which a thread waited, and that is charged."""

    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start, end


class Wait:
    """One request's waits for the daemon: for an answer and, while another program compiles, for heartbeats."""

    def __init__(self, start: float, seconds: float) -> None:
        # When the wait that is going on began, the time it may take, and the time for which it is not charged.
        self.start, self.seconds, self.free_seconds = start, seconds, _FREE_SECONDS
        self.spans: list[_Span] = []

    @property
    def charged(self) -> float:
        """The seconds of the waits that were charged."""
        return sum(span.end - span.start for span in self.spans)


class Breaker:
    """Charges every wait of a program for its daemon to one allowance of ``timeout`` seconds. Thread-safe.

    Waits of several threads that overlap cost the time that they take together, not their sum.

    The breaker opens after a failure, and after a very slow read in the background. While it is open, the foreground
    does not ask. The background tries the daemon again after a second, then after twice as long each time, up to a
    minute; one swift answer closes the breaker. Nor does the foreground ask while the allowance is nearly used up.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._left, self._refilled_at = timeout, monotonic()
        self._unfinished: set[Wait] = set()
        self._spans: deque[_Span] = deque(maxlen=_MAX_SPANS)
        self._lock = threading.RLock()
        self._next_pause = _FIRST_PAUSE_SECONDS
        self._retry_at: float | None = None
        # Whether it is open because of a failure, which has already been reported.
        self.has_failed = False
        # The failure, for those who are told why it was not asked.
        self._failure, self._nobody_there = "", False
        # Seconds that the program has lost so far, for the statistics.
        self.lost = 0.0

    def begin(self) -> Wait:
        """Begin a wait of the program; raise NotAskedError while open, or if too little is left."""
        with self._lock:
            if self._retry_at is not None:
                failed = f"it failed before: {self._failure}" if self._failure else "it answered too slowly before"
                raise NotAskedError(failed, nobody_there=self._nobody_there)
            seconds = _SHARE_PER_WAIT * self.left()
            if seconds < _MIN_SHARE * self._timeout:
                raise TimeSpentError("the daemon's slow answers have cost this program enough")
            wait = Wait(monotonic(), seconds)
            self._unfinished.add(wait)
            return wait

    def continue_wait(self, wait: Wait, free_seconds: float) -> None:
        """Let the wait go on from now until the daemon's next heartbeat, which is due within ``free_seconds``."""
        with self._lock:
            wait.start, wait.free_seconds = monotonic(), free_seconds
            wait.seconds = max(self.left(), free_seconds)
            self._unfinished.add(wait)

    def check_background(self) -> bool:
        """Return True if the breaker is open, so that the daemon is tried first; raise NotAskedError during a pause."""
        with self._lock:
            if self.pause():
                raise NotAskedError("the daemon failed too recently to be asked again")
            return self._retry_at is not None

    def pause(self) -> float:
        """Return for how many seconds the background must not ask."""
        # Without the lock: a signal handler may interrupt its holder and wait for the thread that asks here.
        retry_at = self._retry_at
        return 0.0 if retry_at is None else max(0.0, retry_at - monotonic())

    def left(self) -> float:
        """Return how many seconds this program may still lose to its daemon."""
        with self._lock:
            now = monotonic()
            self._left = min(self._timeout, self._left + _REFILL_RATE * (now - self._refilled_at))
            self._refilled_at = now
            # An exception can keep a wait from being ended; such a wait expires at its time limit.
            self._unfinished = {wait for wait in self._unfinished if now < wait.start + wait.seconds}
            # The waits that are going on count already.
            starts = [wait.start for wait in self._unfinished if now > wait.start + wait.free_seconds]
            return max(0.0, self._left - (self._uncharged(min(starts), now) if starts else 0.0))

    def end(self, wait: Wait, seconds: float) -> None:
        """End a wait that took so long, and charge it."""
        with self._lock:
            self._unfinished.discard(wait)
            if seconds <= SWIFT_SECONDS:
                self._next_pause = _FIRST_PAUSE_SECONDS
            if seconds > wait.free_seconds:
                end = monotonic()
                span = _Span(end - seconds, end)
                self._charge(self._uncharged(span.start, span.end))
                self._spans.append(span)
                wait.spans.append(span)

    def charge(self, seconds: float) -> None:
        """Charge a wait that has just ended."""
        self.end(Wait(monotonic() - seconds, seconds), seconds)

    def refund(self, wait: Wait, seconds: float) -> None:
        """Refund a charged wait, as far as its answer saved the program this time."""
        with self._lock:
            for span in wait.spans:
                start, span.start = span.start, min(span.end, span.start + seconds)
                seconds -= span.start - start
                self._charge(-self._uncharged(start, span.start))

    def _uncharged(self, start: float, end: float) -> float:
        """Return how much of this time no charged wait covers."""
        uncharged, reached = 0.0, start
        for span in sorted(self._spans, key=_start_of):
            if reached < span.end and span.start < end:
                uncharged += max(0.0, span.start - reached)
                reached = span.end
        return uncharged + max(0.0, end - reached)

    def _charge(self, seconds: float) -> None:
        self._left = min(self._timeout, self._left - seconds)
        self.lost += seconds

    def note_failure(self, error: Exception) -> None:
        """Open the breaker: a request failed."""
        with self._lock:
            self.has_failed = True
            self._failure, self._nobody_there = str(error), isinstance(error, NobodyThereError)
            self._open()

    def note_slow_read(self, seconds: float) -> None:
        """Open the breaker if a read in the background took so long that the program should not wait for one."""
        with self._lock:
            if seconds > max(SWIFT_SECONDS, _SLOW_SHARE * self._timeout) and self._retry_at is None:
                self._open()

    def note_probe(self, seconds: float) -> None:
        """Close the breaker if the daemon, tried in the background, answered swiftly."""
        with self._lock:
            if seconds > SWIFT_SECONDS:
                self._open()
            else:
                self._retry_at = None
                self.has_failed = False
                self._failure, self._nobody_there = "", False

    def _open(self) -> None:
        self._retry_at = monotonic() + self._next_pause
        self._next_pause = min(2 * self._next_pause, _MAX_PAUSE_SECONDS)


def _start_of(span: _Span) -> float:
    return span.start
