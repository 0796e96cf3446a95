"""Counters of what one process asks for, and what of them the daemon has not been told yet."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xcache.statistics import Statistics


class Counting:
    """Thread-safe counters, and what of them the daemon has not been told yet.

    Names with a colon (``errors:damaged entry``) become the entry of a dictionary.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._total: defaultdict[str, float] = defaultdict(float)
        self._untold: defaultdict[str, float] = defaultdict(float)

    def add(self, **counts: float) -> None:
        """Add to plain counters."""
        self._add(counts)

    def uncacheable(self, reason: str) -> None:
        """Count a program that could not be cached."""
        self._add({"requests": 1, f"uncacheable:{reason}": 1})

    def reclassify_miss(self, reason: str) -> None:
        """What was counted as a miss turned out to be uncacheable."""
        self._add({"misses": -1, f"uncacheable:{reason}": 1})

    def error(self, kind: str) -> None:
        """Count something that went wrong."""
        self._add({f"errors:{kind}": 1})

    def _add(self, counts: dict[str, float]) -> None:
        with self._lock:
            for name, amount in counts.items():
                self._total[name] += amount
                self._untold[name] += amount

    def take_untold(self) -> dict[str, float]:
        """What was counted since the last call."""
        with self._lock:
            untold = dict(self._untold)
            self._untold.clear()
        return untold

    def put_back(self, untold: dict[str, float]) -> None:
        """What was taken could not be told."""
        with self._lock:
            for name, amount in untold.items():
                self._untold[name] += amount

    def for_child(self) -> Counting:
        """The same totals with a lock of its own, and nothing to tell that the parent will tell."""
        child = Counting()
        child._total.update(self._total)
        return child

    def snapshot(self) -> Statistics:
        """The totals so far."""
        # A dataclass takes a millisecond to make, and few programs ask.
        from xcache.statistics import Statistics

        with self._lock:
            total = dict(self._total)
        groups: dict[str, dict[str, int]] = {"uncacheable": {}, "errors": {}}
        plain: dict[str, Any] = {}
        for name, amount in total.items():
            group, colon, kind = name.partition(":")
            if colon:
                groups[group][kind] = int(amount)
            else:
                plain[name] = amount if name.endswith("_seconds") else int(amount)
        return Statistics(uncacheable=groups["uncacheable"], errors=groups["errors"], **plain)
