"""When not to ask: a daemon in trouble costs a program one timeout in all, and not one for each of its compiles."""

from __future__ import annotations

import threading

from xcache.clock import monotonic
from xcache.errors import NotAskedError

# An answer within this time is no trouble, however often it is asked for.
SWIFT = 0.25
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
# What may be lost to a daemon that seems to be well again.
_SECOND_CHANCE = 1 / 8


class Breaker:
    """Open after a failure, or after slow answers have used up what a program may lose to its daemon.

    While it is open nothing is asked in the foreground. In the background the daemon is tried again after a second,
    then after twice as long each time, a minute at most; one swift answer there closes it. Thread-safe.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._allowance = timeout
        self._lock = threading.RLock()
        self._pause = _FIRST_PAUSE
        self._until: float | None = None
        # Whether it is open because of a failure, which somebody has heard of.
        self.has_failed = False

    def check_foreground(self) -> float:
        """The seconds that asking may take; NotAskedError while open."""
        with self._lock:
            if self._until is not None:
                raise NotAskedError("not asked again before it has answered in the background")
            return min(self._timeout, self._allowance)

    def check_background(self) -> bool:
        """Whether it has to be tried first, being open; NotAskedError when that is too soon."""
        with self._lock:
            if self._until is not None and monotonic() < self._until:
                raise NotAskedError("not asked again so soon after a failure")
            return self._until is not None

    def waited(self, seconds: float) -> None:
        """The foreground had its answer after ``seconds``."""
        with self._lock:
            if seconds <= SWIFT:
                self._pause = _FIRST_PAUSE
                return
            self._allowance -= seconds
            if self._allowance <= 0:
                self._open()

    def failed(self) -> None:
        """Something was asked, and there was no proper answer."""
        with self._lock:
            self.has_failed = True
            self._open()

    def answered(self, seconds: float) -> None:
        """The background tried, and had an answer after ``seconds``."""
        with self._lock:
            if seconds > SWIFT:
                self._open()
            else:
                self._until = None
                self.has_failed = False
                self._allowance = _SECOND_CHANCE * self._timeout

    def _open(self) -> None:
        self._until = monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
