"""The ledgers of several runs as numbers: what was saved and lost, hits, and the causes of misses."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from xcache import start_up
from xcache.cli import advice
from xcache.cli.ledger_file import StoredRun
from xcache.cli.report.churn import Use
from xcache.wire import ledger
from xcache.wire.ledger import Row

NOT_CACHEABLE = "not cacheable: "
_LINE = re.compile(r":\d+(?= in |$)")
# The lengths in seconds that a bar over time may stand for: minutes to weeks.
_STEPS = (60, 300, 900, 3600, 4 * 3600, 86400, 7 * 86400)
_MOST_BARS = 60


class Got(NamedTuple):
    """How a run got one program."""

    run: StoredRun
    row: Row
    # Seconds of the program's own threads.
    stages: dict[str, float]

    @property
    def seconds(self) -> float:
        """All of its stages together."""
        return sum(self.stages.values())

    @property
    def compile_seconds(self) -> float:
        """Seconds that the compiler took."""
        return self.stages.get("compile", 0.0)

    @property
    def is_found(self) -> bool:
        """Whether the cache had it."""
        return self.row.outcome in (ledger.HIT, ledger.AHEAD)

    @property
    def is_miss(self) -> bool:
        """Whether the cache could have had it, and did not."""
        return self.row.outcome in (ledger.MISS, ledger.COMPILING)

    @property
    def is_by_itself(self) -> bool:
        """Whether what was asked for was found or new, so that no flag, eviction or fault had it compiled."""
        return self.is_found or self.cause in advice.NEW

    @property
    def cause(self) -> str:
        """The cause of a compile without its details."""
        found = kinds(self.row.cause)
        return f"{NOT_CACHEABLE}{found}" if self.row.outcome == ledger.UNCACHEABLE else found or "not known"


def kinds(cause: str) -> str:
    """Return a row's cause without its details."""
    return "; ".join(ledger.kinds_of(cause))


def got(run: StoredRun, rows: Iterable[Row]) -> list[Got]:
    """Return how a run got the programs that it asked for."""
    return [Got(run, row, start_up.seconds_of([row])) for row in rows if row.outcome != ledger.UNUSED]


def meaning(cause: str) -> str:
    """Return a sentence for a cause."""
    reason = cause.removeprefix(NOT_CACHEABLE)
    return f"it cannot be cached: {reason}" if reason != cause else advice.meaning_of(cause)


def compile_seconds_by_key(programs: Iterable[Got], stored: Mapping[str, float]) -> dict[str, float]:
    """Return what compiling each key takes: as the store says, else as a run in the ledger has measured."""
    measured = {each.row.key: each.compile_seconds for each in programs if each.row.key and each.compile_seconds}
    return measured | dict(stored)


def saved_by(each: Got, known: Mapping[str, float]) -> float:
    """Return the seconds that finding a program saved, as ``xcache stats`` counts them."""
    if not each.is_found or each.row.key not in known:
        return 0.0
    return known[each.row.key] - each.stages.get("lookup", 0.0) - each.stages.get("load", 0.0)


def over_time(programs: Sequence[Got], known: Mapping[str, float], begin: float, end: float) -> list[dict[str, Any]]:
    """Return sums for equal stretches of time: what was saved, and lost to compiles that were new and that were not."""
    step = next((step for step in _STEPS if (end - begin) / step <= _MOST_BARS), (end - begin) / _MOST_BARS)
    first = int(begin // step)
    sums = {"hits": 0, "misses": 0, "saved": 0.0, "new": 0.0, "again": 0.0}
    bars: list[dict[str, Any]] = [
        {"begin": number * step, "end": (number + 1) * step, **sums} for number in range(first, int(end // step) + 1)
    ]
    for each in programs:
        bar = bars[min(max(int(each.run.run.began_at // step) - first, 0), len(bars) - 1)]
        bar["hits"] += each.is_found
        bar["misses"] += each.is_miss
        bar["saved"] += saved_by(each, known)
        if not each.is_found:
            bar["new" if each.row.cause == "new" else "again"] += each.compile_seconds
    return bars


def by_cause(programs: Iterable[Got]) -> list[dict[str, Any]]:
    """Return for each cause of a compile how many programs it concerned and what compiling them took, dearest first."""
    found: defaultdict[str, dict[str, Any]] = defaultdict(lambda: {"count": 0, "seconds": 0.0, "functions": {}})
    for each in programs:
        if each.is_found or each.row.outcome == ledger.FAILED:
            continue
        of_cause = found[each.cause]
        of_cause["count"] += 1
        of_cause["seconds"] += each.compile_seconds
        functions = of_cause["functions"]
        functions[each.row.module_name] = functions.get(each.row.module_name, 0.0) + each.compile_seconds
    return sorted(
        ({"cause": cause, "meaning": meaning(cause)} | sums for cause, sums in found.items()),
        key=lambda row: (-row["seconds"], -row["count"]),
    )


def uses(programs: Iterable[Got]) -> dict[tuple[str, str, str], list[Use]]:
    """Return the uses of each function by program, name and place; ``programs`` in the order of time.

    Only the first program of each shape counts: another one of the same shape was compiled for something else, such as
    a constant, a static argument or a flag, and so was one that the cache would have had otherwise.
    """
    found: defaultdict[tuple[str, str, str], list[Use]] = defaultdict(list)
    first_key: dict[object, str] = {}
    for each in programs:
        row = each.row
        if not row.shapes or not each.is_by_itself or row.outcome == ledger.FAILED:
            continue
        # The line of a call moves with every edit of the file.
        function = each.run.run.program, row.module_name, _LINE.sub("", row.site)
        if first_key.setdefault((function, row.shapes), row.key) == row.key:
            found[function].append(Use(each.run.id, row.shapes, not each.is_found, each.seconds, row.position))
    return dict(found)
