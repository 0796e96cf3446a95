"""The circuit breaker: the time a program may lose to its daemon, and when to stop asking the daemon."""

from __future__ import annotations

import threading

from xcache.clock import monotonic
from xcache.errors import NotAskedError

# An answer within this time is a good sign. A wait within _FREE_SECONDS is too short to notice and is not charged.
SWIFT_SECONDS, _FREE_SECONDS = 0.25, 0.01
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 1.0, 60.0
# One wait may use this share of what is left; the rest is for a daemon that turns out to work again.
_SHARE_PER_WAIT = 7 / 8
# With less than this share of the timeout left, the daemon is not asked.
_MIN_SHARE = 1 / 50
# The allowance comes back at this rate, so that a program of days asks again and loses at most a hundredth of its time.
_REFILL_RATE = 0.01
# An answer in the background that takes more than this share of the timeout is a sign of trouble.
_SLOW_SHARE = 1 / 5


class _Overlap:
    """Waits of several threads that overlap: they cost the program the time they take together, not their sum."""

    def __init__(self, start: float) -> None:
        self.start = self.end = start
        # The sum of the waits that have ended, less refunds, and the charge for them.
        self.waited = self.charged = 0.0

    def cost(self, end: float, waiting: float = 0.0) -> float:
        """Return the seconds to charge by ``end``, if unfinished waits have taken ``waiting`` seconds so far."""
        return min(end - self.start, self.waited + waiting)


class Wait:
    """One thread's wait for the daemon."""

    def __init__(self, overlap: _Overlap, start: float, seconds: float) -> None:
        self.overlap = overlap
        self.start = start
        # The time it may take.
        self.seconds = seconds
        # The time it took, if that was worth charging.
        self.charged = 0.0


class Breaker:
    """Charges every wait of a program for its daemon to one allowance of ``timeout`` seconds. Thread-safe.

    The breaker opens after a failure, and after a very slow answer in the background. While it is open, the foreground
    does not ask. The background tries the daemon again after a second, then after twice as long each time, up to a
    minute; one swift answer closes the breaker. The foreground does not ask while the allowance is used up, either.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._left, self._refilled_at = timeout, monotonic()
        self._overlap = _Overlap(self._refilled_at)
        self._unfinished: set[Wait] = set()
        self._lock = threading.RLock()
        self._pause = _FIRST_PAUSE_SECONDS
        self._retry_at: float | None = None
        # Whether it is open because of a failure, which has already been reported.
        self.has_failed = False
        # Seconds that the program has lost so far, for the statistics.
        self.lost = 0.0

    def begin(self) -> Wait:
        """Begin a wait of the program; raise NotAskedError while open, or if too little is left."""
        with self._lock:
            if self._retry_at is not None:
                raise NotAskedError("the daemon failed and has not answered in the background since")
            seconds = _SHARE_PER_WAIT * self.left()
            if seconds < _MIN_SHARE * self._timeout:
                raise NotAskedError("the daemon's slow answers have cost this program enough")
            start = monotonic()
            wait = Wait(self._overlap_with(start), start, seconds)
            self._unfinished.add(wait)
            return wait

    def check_background(self) -> bool:
        """Return whether the daemon must be tried first, the breaker being open; raise NotAskedError if too soon."""
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
            waiting = [now - wait.start for wait in self._still_unfinished(now)]
            uncharged = self._overlap.cost(now, sum(waiting)) - self._overlap.charged if waiting else 0.0
            return max(0.0, self._left - uncharged)

    def end(self, wait: Wait, seconds: float) -> None:
        """End a wait that took so long, and charge it."""
        with self._lock:
            self._unfinished.discard(wait)
            if seconds <= SWIFT_SECONDS:
                self._pause = _FIRST_PAUSE_SECONDS
            if seconds > _FREE_SECONDS:
                wait.charged = seconds
                wait.overlap.end = monotonic()
                self._charge(wait.overlap, seconds)

    def waited(self, seconds: float) -> None:
        """Charge a wait that has just ended."""
        start = monotonic() - seconds
        with self._lock:
            self.end(Wait(self._overlap_with(start), start, seconds), seconds)

    def was_worth(self, wait: Wait, seconds: float) -> None:
        """Refund so much of a charged wait: its answer has saved the program as much."""
        with self._lock:
            self._charge(wait.overlap, -seconds)

    def _overlap_with(self, start: float) -> _Overlap:
        """Return the waits that a wait overlaps which began at ``start``."""
        if self._overlap.end < start and not self._still_unfinished(start):
            self._overlap = _Overlap(start)
        self._overlap.start = min(self._overlap.start, start)
        return self._overlap

    def _still_unfinished(self, now: float) -> set[Wait]:
        """Return the waits that are going on; an exception can keep one from being ended, so its time limit ends it."""
        self._unfinished = {wait for wait in self._unfinished if now < wait.start + wait.seconds}
        return self._unfinished

    def _charge(self, overlap: _Overlap, seconds: float) -> None:
        overlap.waited += seconds
        charge = overlap.cost(overlap.end) - overlap.charged
        overlap.charged += charge
        self._left = min(self._timeout, self._left - charge)
        self.lost += charge

    def failed(self) -> None:
        """Open the breaker: a request failed."""
        with self._lock:
            self.has_failed = True
            self._open()

    def was_slow(self, seconds: float) -> None:
        """Open the breaker if an answer in the background took so long that the program should not wait for one."""
        with self._lock:
            if seconds > max(SWIFT_SECONDS, _SLOW_SHARE * self._timeout) and self._retry_at is None:
                self._open()

    def answered(self, seconds: float) -> None:
        """Close the breaker if the daemon, tried in the background, answered swiftly."""
        with self._lock:
            if seconds > SWIFT_SECONDS:
                self._open()
            else:
                self._retry_at = None
                self.has_failed = False

    def _open(self) -> None:
        self._retry_at = monotonic() + self._pause
        self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS)
