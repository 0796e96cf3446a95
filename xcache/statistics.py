"""What one process counts about its own requests."""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict
from typing import Any


@dataclasses.dataclass(frozen=True)
class Statistics:
    """A snapshot: every request ends as a hit, a miss or uncacheable; errors are counted beside them."""

    requests: int = 0
    hits: int = 0
    misses: int = 0
    stores: int = 0
    uncacheable: dict[str, int] = dataclasses.field(default_factory=dict)
    errors: dict[str, int] = dataclasses.field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0
    saved_seconds: float = 0.0
    wait_seconds: float = 0.0
    prefetched: int = 0
    prefetches_dropped: int = 0

    def __str__(self) -> str:
        text = f"{self.hits} hits, {self.misses} misses, {self.saved_seconds:.1f} s saved"
        for name, counts in (("uncacheable", self.uncacheable), ("errors", self.errors)):
            if counts:
                text += f"; {name}: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
        return text


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
