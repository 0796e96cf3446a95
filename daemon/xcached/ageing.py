"""A clock by which entries age: it goes on while no daemon runs, and jumps of the system's clock hardly matter."""

from __future__ import annotations

import sqlite3
import time

_DAY = 86400.0
_LONGEST_ABSENCE = 30 * _DAY
_NOTED_EVERY = 60.0
# Other than the monotonic clock it goes on while the machine sleeps.
_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def steady() -> float:
    """Seconds since the machine was started."""
    return time.clock_gettime(_CLOCK)


class AgeClock:
    """Seconds that only ever go on. How long nobody was there is known from a clock that jumps, so it is bounded."""

    def __init__(self, database: sqlite3.Connection, max_age: float) -> None:
        """With ``max_age`` an absence makes nobody older than half of that."""
        self._db = database
        longest = min(_LONGEST_ABSENCE, max_age / 2) if max_age else _LONGEST_ABSENCE
        seen: dict[str, float] = dict(database.execute("SELECT name, amount FROM clocks").fetchall())
        absent = time.time() - seen.get("seen at", time.time())
        self._began = steady()
        self._base = seen.get("age", 0.0) + min(max(absent, 0.0), longest)
        self._noted = 0.0

    def now(self) -> float:
        """What it shows."""
        return self._base + steady() - self._began

    def note(self) -> None:
        """Within a transaction, now and then: keep what it shows for the next daemon."""
        now = self.now()
        if not self._noted or now - self._noted >= _NOTED_EVERY:
            self._noted = now
            self._db.executemany(
                "INSERT OR REPLACE INTO clocks (name, amount) VALUES (?, ?)", [("age", now), ("seen at", time.time())]
            )
