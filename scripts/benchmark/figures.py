"""Figures from the samples: medians, spreads, ratios, and the bars they are held against. Reads and writes nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import programs

BUILT_IN, LIMITED, NONE, XCACHE, JIT = "built-in", "built-in, limited", "no cache", "xcache", "xcache.jit"
PROGRAMS = tuple(name for name in programs.PROGRAMS if name != "nothing")
# At most this much of the built-in cache's time for a warm start.
WARM_BARS = {"training": 0.72, "many-small": 0.65, "serving": 0.75, "library": 0.80, "scan-model": 0.85}
# And for a warm crowd, by the wall and by the processors.
CROWD_BARS = {"training": 0.85, "many-small": 0.80}
MIB = 1024**2
Found = dict[str, Any]


class Ratio(NamedTuple):
    """The median of the rounds' own ratios, with their quartiles.

    A machine that is fast at one time and slow at another is so for all in a round; medians of each alone, and a ratio
    of these, would depend on how many rounds of either were in which.
    """

    value: float
    low: float
    high: float
    rounds: int


class Bar(NamedTuple):
    """One promise, and what was measured of it: nothing, where that part did not run."""

    what: str
    bar: str
    measured: str = "not measured"
    spread: str = ""
    met: bool | None = None


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile; both are the value itself if there is only one."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the ratio of two series that were measured side by side."""
    pairs = [mine / other for mine, other in zip(ours, theirs, strict=False)]
    return Ratio(statistics.median(pairs), *quartiles(pairs), len(pairs))


def series(found: Found, name: str, kind: str, peer: str, of: str | Callable[[Any], float]) -> list[float]:
    """Return one figure of all samples of a program with a peer; empty where it did not run."""
    samples = found["parts"].get(name, {}).get(kind, {}).get(peer, [])
    return [of(sample) if callable(of) else sample[of] for sample in samples]


def against(found: Found, name: str, kind: str, ours: str, theirs: str, of: Any, of_theirs: Any = None) -> Ratio | None:
    """Return the ratio of two peers on one program, or None where one of them did not run."""
    mine = series(found, name, kind, ours, of)
    other = series(found, name, kind, theirs, of_theirs or of)
    return ratio(mine, other) if mine and other else None


def floor(found: Found, name: str, *, traced: bool = True) -> Ratio | None:
    """Return built-in's warm start without its compile path and lowering, and without tracing, against how it is."""

    def what_is_left(sample: Any) -> float:
        avoidable = sample["compile path"] + sample["lower"] + (0.0 if traced else sample["trace"])
        # jax's lowering imports scipy for programs that call LAPACK, and they cannot run without it.
        return float(sample["wall"] - avoidable + sample["lapack"])

    return against(found, name, "warm", BUILT_IN, BUILT_IN, what_is_left, "wall")


def crowd_floor(found: Found, name: str) -> Ratio | None:
    """Return the processor time of built-in's warm start without its lowering, against how it is.

    A crowd keeps all processors busy, so what is done on other threads is not saved: each process loads what it wants.
    """
    return against(
        found,
        name,
        "warm",
        BUILT_IN,
        BUILT_IN,
        lambda sample: sample["cpu"] - sample["lower"] + sample["lapack"],
        "cpu",
    )


def without_serialize(sample: Any) -> float:
    """Return the seconds that a run took beyond serialize() itself."""
    return float(sample["wall"] - sample["serialize"])


def measured(found: Found) -> list[str]:
    """Return the programs that ran."""
    return [name for name in PROGRAMS if name in found["parts"]]


def hits_by_size(found: Found, peer: str, other: str = "file") -> dict[int, Ratio]:
    """Return the cost of a hit without deserialization, against the same from a file."""
    sizes = found["parts"].get("micro", {}).get("sizes", {})
    return {
        int(size): ratio(values["hit"][peer], values["hit"][other])
        for size, values in sizes.items()
        if peer in values["hit"] and other in values["hit"]
    }


def rates(found: Found, kind: str) -> dict[int, Ratio]:
    """Return the answers a second by xcache against redis, for each number of clients."""
    peers = found["parts"].get("micro", {}).get("clients", {}).get(kind, {})
    if "redis" not in peers:
        return {}
    return {
        int(clients): ratio([one["rate"] for one in ours], [one["rate"] for one in peers["redis"][clients]])
        for clients, ours in peers["xcache"].items()
    }


def by_entries(found: Found, what: str, part: str = "entries") -> dict[int, Ratio]:
    """Return the cost of something in a store of each size, against the smallest store of the same run."""
    stores = found["parts"].get("micro", {}).get(part, {})
    counts = sorted(map(int, stores))
    return {count: ratio(stores[str(count)][what], stores[str(counts[0])][what]) for count in counts}


def bars(found: Found) -> list[Bar]:
    """Return every promise, in the order in which they were made."""
    return [*_programs(found), *_costs(found), *_requests(found), *_store(found)]


def _at_most(what: str, limit: float, measured: Ratio | None, beside: str = "") -> Bar:
    if measured is None:
        return Bar(what, f"at most {limit:.2f}")
    spread = f"{measured.low:.2f} to {measured.high:.2f}" if measured.rounds > 1 else "one round"
    return Bar(what, f"at most {limit:.2f}", f"{measured.value:.2f}{beside}", spread, measured.value <= limit)


def _worst(candidates: Iterable[tuple[str, Ratio | None]]) -> tuple[str, Ratio | None]:
    known = [(name, found) for name, found in candidates if found is not None]
    return max(known, key=lambda one: one[1].value) if known else ("", None)


def _programs(found: Found) -> list[Bar]:
    warm = {name: against(found, name, "warm", XCACHE, BUILT_IN, "wall") for name in PROGRAMS}
    rows = [
        _at_most(
            f"warm start of the whole process against built-in: {name}", limit, warm[name], _floor(floor(found, name))
        )
        for name, limit in WARM_BARS.items()
    ]
    worst, slowest = _worst(warm.items())
    rows.append(_at_most("the same in the workload and size where it is worst", 0.90, slowest, f" ({worst})"))
    for name, what in (("training", "`xcache.jit` on the step"), ("serving", "`prepare`")):
        said = against(found, name, "warm", JIT, BUILT_IN, "wall")
        beside = _floor(floor(found, name, traced=False))
        rows.append(_at_most(f"warm start against built-in: {name} with {what}", 0.60, said, beside))
    blocked = against(found, "training", "warm", XCACHE, BUILT_IN, "compile path")
    what = "main thread blocked in the compile path, warm, against built-in: training"
    rows.append(_at_most(what, 0.35, blocked))
    return rows


def _floor(possible: Ratio | None) -> str:
    return f" (floor: {possible.value:.2f})" if possible else ""


def _costs(found: Found) -> list[Bar]:
    worst, slowest = _worst(
        (name, against(found, name, "cold", XCACHE, NONE, without_serialize, "wall")) for name in PROGRAMS
    )
    what = "cold start against no cache, beyond serialize() itself, where it is worst"
    rows = [_at_most(what, 1.03, slowest, f" ({worst})")]
    crowd = found["parts"].get("crowd", {}).get("4 training", {})
    cpu: dict[str, Ratio] = {}
    for peer in (XCACHE, BUILT_IN) if crowd else ():
        cpu[peer] = ratio(*([sample["cpu"] for sample in crowd[kind][peer]] for kind in ("cold", "alone")))
    beside = ""
    if cpu:
        # The other three at least start, trace and load; warm processes of the same crowd show what that costs.
        least = (
            1 + 3 / 4 * ratio(*([sample["cpu"] for sample in crowd[kind][XCACHE]] for kind in ("warm", "alone"))).value
        )
        beside = f" (built-in: {cpu[BUILT_IN].value:.2f}; if the other three only did what warm ones do: {least:.2f})"
    rows.append(_at_most("crowd of 4, cold: processor time against one alone", 1.5, cpu.get(XCACHE), beside))
    crowds = found["parts"].get("crowd", {})
    for name, limit in CROWD_BARS.items():
        beside = _floor(crowd_floor(found, name))
        for size in (4, 16):
            kinds = crowds.get(f"{size} {name}", {}).get("warm")
            for of, what in (("wall", "time"), ("cpu", "processor time")):
                found_ratio = kinds and ratio(*([sample[of] for sample in kinds[peer]] for peer in (XCACHE, BUILT_IN)))
                rows.append(
                    _at_most(f"crowd of {size}, warm: {what} against built-in: {name}", limit, found_ratio, beside)
                )
    on, off = (found["parts"].get("nothing", {}).get(peer, []) for peer in (XCACHE, NONE))
    what, limit = "xcache on and nothing to compile: process time against off", "at most +40 ms"
    if on:
        more = [(mine["wall"] - other["wall"]) * 1e3 for mine, other in zip(on, off, strict=True)]
        value, (low, high) = statistics.median(more), quartiles(more)
        rows.append(Bar(what, limit, f"{value:+.0f} ms", f"{low:+.0f} to {high:+.0f} ms", value <= 40))
    else:
        rows.append(Bar(what, limit))
    return rows


def _requests(found: Found) -> list[Bar]:
    large = [(f"{size // MIB} MiB", r) for size, r in hits_by_size(found, XCACHE).items() if size >= MIB]
    worst, slowest = _worst(large)
    what = "hit without deserialization against open, read and decompress of the file, from 1 MiB on, where it is worst"
    rows = [_at_most(what, 1.15, slowest, f" ({worst})")]
    small = hits_by_size(found, XCACHE, "round trip").get(4096)
    rows.append(_at_most("hit of 4 KiB, one client, against a bare round trip on a Unix socket", 2.0, small))
    answers = rates(found, "miss").get(32)
    what, limit = "negative answers a second, 32 clients, against redis-server's GET", 1 / 3
    if answers:
        spread = f"{answers.low:.2f} to {answers.high:.2f}"
        rows.append(Bar(what, f"at least {limit:.2f}", f"{answers.value:.2f}", spread, answers.value >= limit))
    else:
        absent = "micro" in found["parts"]
        rows.append(Bar(what, f"at least {limit:.2f}", "redis-server is not installed" if absent else "not measured"))
    return rows


def _store(found: Found) -> list[Bar]:
    rows = [
        _at_most("a miss at 1,000,000 entries against 1,000", 1.3, by_entries(found, "miss").get(1_000_000)),
    ]
    theirs = by_entries(found, "put that evicts", "limited")
    most = max(theirs, default=0)
    beside = f" (JAX's bounded cache, {most:,} against 1,000: {theirs[most].value:.1f})" if most else ""
    ours = by_entries(found, "put that evicts").get(1_000_000)
    rows.append(_at_most("a put that evicts at 1,000,000 entries against 1,000", 1.5, ours, beside))
    full = found["parts"].get("micro", {}).get("entries", {}).get("1000000")
    ready, memory = "daemon with 1,000,000 entries: ready", "daemon with 1,000,000 entries: memory then"
    if full is None:
        return [*rows, Bar(ready, "under 1 s"), Bar(memory, "under 120 MB")]
    low, high = quartiles(full["ready after"])
    seconds = statistics.median(full["ready after"])
    most_bytes = max(*full["memory at the start"], full["memory after"])
    return [
        *rows,
        Bar(ready, "under 1 s", f"{seconds:.2f} s", f"{low:.2f} to {high:.2f} s", seconds < 1),
        Bar(memory, "under 120 MB", f"{most_bytes / 1e6:.0f} MB", "the most of all starts", most_bytes < 120e6),
    ]
