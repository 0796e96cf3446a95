"""Counters of one process's requests, and the share of them that is still to be reported to the daemon."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from xcache.wire import ledger

if TYPE_CHECKING:
    from xcache.statistics import Statistics


class Counting:
    """Thread-safe counters: totals, and the counts that are still to be reported to the daemon.

    A name with a colon (``errors:damaged entry``) names a dictionary of the statistics and a key in it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._total: defaultdict[str, float] = defaultdict(float)
        self._unreported: defaultdict[str, float] = defaultdict(float)

    def add(self, **counts: float) -> None:
        """Add to plain counters."""
        self._add(counts)

    def uncacheable(self, reason: str) -> None:
        """Count a program that could not be cached."""
        self._add({"requests": 1, f"uncacheable:{reason}": 1})

    def miss(self, cause: str) -> None:
        """Count a program that the cache did not have."""
        self._add({"requests": 1, "misses": 1, f"causes:{_kind(cause)}": 1})

    def reclassify_miss(self, reason: str, cause: str = "") -> None:
        """Count a former miss as uncacheable, and not by its cause, if it had one."""
        of_cause = {f"causes:{_kind(cause)}": -1} if cause else {}
        self._add({"misses": -1, f"uncacheable:{reason}": 1, **of_cause})

    def call(self, outcome: str) -> None:
        """Count a call that jax's fast path did not know."""
        self._add({f"calls:{outcome}": 1})

    def lowering(self, outcome: str, instead_of: str = "") -> None:
        """Count a program by the reason why it was lowered, or as skipped, and take back what it was counted as."""
        counts: dict[str, float] = {f"lowerings:{outcome}": 1}
        if instead_of:
            counts[f"lowerings:{instead_of}"] = -1
        self._add(counts)

    def error(self, kind: str) -> None:
        """Count something that went wrong."""
        self._add({f"errors:{kind}": 1})

    def _add(self, counts: dict[str, float]) -> None:
        with self._lock:
            for name, amount in counts.items():
                self._total[name] += amount
                self._unreported[name] += amount

    def take_unreported(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        with self._lock:
            unreported = dict(self._unreported)
            self._unreported.clear()
        return unreported

    def put_back(self, unreported: dict[str, float]) -> None:
        """Keep counts that could not be reported for the next report."""
        with self._lock:
            for name, amount in unreported.items():
                self._unreported[name] += amount

    def for_child(self) -> Counting:
        """Return a copy for a forked child: the same totals, and nothing to report, since the parent reports that."""
        child = Counting()
        child._total.update(self._total)
        return child

    def snapshot(self, lost_seconds: float = 0.0) -> Statistics:
        """Return the totals so far; ``lost_seconds`` is the time this process has lost waiting for its daemon."""
        # Defining a dataclass takes a millisecond, and few programs ask for statistics.
        from xcache.statistics import Statistics

        with self._lock:
            total = dict(self._total)
        groups: dict[str, dict[str, int]] = {
            "uncacheable": {}, "errors": {}, "lowerings": {}, "calls": {}, "causes": {}
        }  # fmt: skip
        plain: dict[str, Any] = dict(groups)
        for name, amount in total.items():
            group, colon, kind = name.partition(":")
            if colon and amount:
                groups[group][kind] = int(amount)
            elif not colon:
                plain[name] = amount if name.endswith("_seconds") else int(amount)
        plain["lost_seconds"] = lost_seconds
        return Statistics(**plain)


def _kind(cause: str) -> str:
    """Return a cause without its details."""
    return "; ".join(ledger.kinds_of(cause))
