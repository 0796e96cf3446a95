"""What one process counts about its own requests."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter


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
        self._lock = threading.Lock()
        self._total: Counter[str] = Counter()
        self._untold: Counter[str] = Counter()

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
                # Counter's annotations know integers only; seconds are counted just as well.
                self._total[name] += amount  # type: ignore[assignment]
                self._untold[name] += amount  # type: ignore[assignment]

    def take_untold(self) -> dict[str, float]:
        """What was counted since the last call."""
        with self._lock:
            untold: dict[str, float] = dict(self._untold)
            self._untold.clear()
        return untold

    def for_child(self) -> Counting:
        """The same totals with a lock of its own, and nothing to tell that the parent will tell."""
        child = Counting()
        child._total.update(self._total)
        return child

    def snapshot(self) -> Statistics:
        """The totals so far."""
        with self._lock:
            total = dict(self._total)
        plain = {name: amount for name, amount in total.items() if ":" not in name}
        for group in ("uncacheable", "errors"):
            start = f"{group}:"
            plain[group] = {n.removeprefix(start): int(c) for n, c in total.items() if n.startswith(start)}  # type: ignore[assignment]
        return Statistics(**plain)  # type: ignore[arg-type]
