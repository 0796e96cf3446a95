"""Counts of what happened, by name, in rows of the store. Belongs to the writer thread."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping

MOST_COUNTERS = 1000


class Statistics:
    """The rows; all methods are called within a transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def add(self, counts: Mapping[str, float]) -> None:
        """Add to the counts."""
        there = {name for (name,) in self._db.execute("SELECT name FROM statistics")}
        accepted: list[tuple[str, float]] = []
        for name, amount in counts.items():
            # Clients choose the names of reasons and kinds, so their number is limited.
            if name in there or is_own_counter(name) or len(there) < MOST_COUNTERS:
                there.add(name)
                accepted.append((name, amount))
        self._db.executemany(
            "INSERT INTO statistics (name, amount) VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET amount = amount + excluded.amount",
            accepted,
        )

    def zero(self) -> None:
        """Restart the counts and the list of invalidations."""
        self._db.execute("DELETE FROM statistics")
        self._db.execute("DELETE FROM invalidations")
        self.add({"since": time.time()})


def is_own_counter(name: str) -> bool:
    """Return whether xcache itself chose a counter's name; clients' reasons and kinds follow a colon."""
    return ":" not in name
