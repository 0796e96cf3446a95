"""Clocks of the daemon."""

from __future__ import annotations

import time

# CLOCK_BOOTTIME runs while the machine is suspended; CLOCK_MONOTONIC does not.
_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def steady() -> float:
    """Return the seconds since the machine started."""
    return time.clock_gettime(_CLOCK)


class GuardedClock:
    """The wall clock as it was at the start, going on steadily: no jump of it makes all entries too old at once."""

    def __init__(self, last_use: float) -> None:
        """``last_use`` is the latest time of a use that the store knows (0: none)."""
        self._last_use = last_use
        self._wall, self._start = time.time(), steady()

    def now(self, max_age: float) -> float:
        """Return the time by which entries age. Time without a daemon counts as at most half of ``max_age``."""
        began = min(self._wall, self._last_use + max_age / 2) if self._last_use else self._wall
        return began + steady() - self._start
