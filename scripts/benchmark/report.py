"""Writes docs/performance.md from the samples, and from nothing else."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import figures
import plots
import runs
from figures import BUILT_IN, JIT, LIMITED, NONE, XCACHE, Found, Ratio

_WIDTH = 120
OWN = (
    "key, wait for the store, verify and decompress, deserialize, compile, serialize, compress, write the file,"
    " announce the toolchain, notes to the daemon"
)
ALT = {
    "warm": "Warm starts against JAX's built-in cache",
    "phases": "Where the time of a warm start goes",
    "cold": "Cold starts against no cache",
    "crowd": "Processor time of processes that start at once",
    "sizes": "Hits of different sizes against a file",
    "clients": "Answers a second against redis",
    "entries": "What a fuller store costs",
}


def phases_of(samples: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the parts of runs with ``--phases``: the own time of each, without that of another inside it."""
    found: dict[str, list[float]] = {}
    behind = sorted({name for sample in samples for name in sample["behind"]})
    for sample in samples:
        main = sample["main thread"]
        outside = sample["program"] - sample["compile path"] - main["trace"] - main["lower"]
        timed = {f"compile path: {name}": main.get(name, 0.0) for name in OWN.split(", ")}
        parts = {
            "interpreter": sample["interpreter"],
            "import": sample["import"],
            "backend": sample["backend"],
            "trace": main["trace"],
            "lower": main["lower"] - main.get("lapack", 0.0),
            "import scipy, for LAPACK": main.get("lapack", 0.0),
            **timed,
            "compile path: everything else": sample["compile path"] - sum(timed.values()),
            "dispatch, run, transfer": outside,
            "exit": sample["exit"],
            "whole process": sample["wall"],
            "its processor time": sample["cpu"],
            "daemon's processor time": sample["daemon cpu"],
            **{f"other threads: {name}": sample["behind"].get(name, 0.0) for name in behind},
        }
        for name, seconds in parts.items():
            found.setdefault(name, []).append(seconds)
    return found


def write(samples: Path, folder: Path) -> None:
    """Write the report and its plots beside the samples."""
    found: Found = json.loads(samples.read_text())
    drawn = plots.draw(found, folder / "performance")
    sections = [_head(found), _bars(found), *_programs(found), _changed(found), _crowd(found), _sizes(found)]
    sections += [_pieces(found), _clients(found), _entries(found), _how()]
    text = "\n\n".join(section for section in sections if section)
    for name in plots_named(text):
        # A plot stands where its section asks for it, if it was drawn.
        picture = f"![{ALT[name]}](performance/{name}.svg)" if name in drawn else ""
        text = text.replace(f"<{name}>", picture)
    lines = [line if line.startswith(("|", "!", " ")) else _wrapped(line) for line in text.split("\n")]
    (folder / "performance.md").write_text("\n".join(lines) + "\n")


def _wrapped(line: str) -> str:
    """Break a line of prose that is too long."""
    return textwrap.fill(line, _WIDTH, break_long_words=False, break_on_hyphens=False) if len(line) > _WIDTH else line


def plots_named(text: str) -> list[str]:
    """Return the plots that a text has a place for."""
    return [name for name in ALT if f"<{name}>" in text]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(['---'] + ['---:'] * (len(head) - 1))}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _ratio(found: Ratio | None) -> str:
    if found is None:
        return ""
    return f"{found.value:.2f}" + (f" ({found.low:.2f} to {found.high:.2f})" if found.rounds > 1 else "")


def _head(found: Found) -> str:
    what = found["machine"]
    return f"""# Performance

Written by `scripts/bench --{found["mode"]}` from [performance.json](performance.json), which has every sample; nothing
here was typed. The figures are ratios against a peer that was measured in the same run, round by round beside it: the
median of the rounds' own ratios, and in brackets their first and third quartile.

Measured {found["started"]} on {what["processors"]} processors ({what["processor"]}), {what["memory GiB"]:.0f} GiB,
{what["system"]}; Python {what["python"]}, jax {what["jax"]}, jaxlib {what["jaxlib"]}, flax {what["flax"]}, redis
{what["redis"]}, xcache {what["jax-xcache"]} at {what["commit"]}; {found.get("minutes", 0):.0f} minutes. The load
average was {found["load before"]:.1f} before{_caution(found["load before"], what)}, {found.get("load after", 0.0):.1f}
after, of which the last part's own clients are a part."""


def _caution(busy: float, what: dict[str, Any]) -> str:
    return "" if busy < 2 * what["processors"] else ": **others used the machine as well, so this is a trial run**"


def _bars(found: Found) -> str:
    rows = [
        (bar.what, bar.bar, bar.measured, bar.spread, {True: "met", False: "**not met**", None: ""}[bar.met])
        for bar in figures.bars(found)
    ]
    return "## The bars\n\n" + _table(("", "bar", "measured", "spread", ""), rows)


def _programs(found: Found) -> list[str]:
    names = figures.measured(found)
    if not names:
        return []
    warm = [
        (
            name,
            f"{statistics.median(figures.series(found, name, 'warm', BUILT_IN, 'wall')):.2f} s",
            _ratio(figures.against(found, name, "warm", XCACHE, BUILT_IN, "wall")),
            _ratio(figures.floor(found, name)),
            _ratio(jitted := figures.against(found, name, "warm", JIT, BUILT_IN, "wall")),
            _ratio(figures.floor(found, name, traced=False) if jitted else None),
            _ratio(figures.against(found, name, "warm", LIMITED, BUILT_IN, "wall")),
            _ratio(figures.against(found, name, "warm", XCACHE, BUILT_IN, "compile path")),
            _ratio(figures.against(found, name, "warm", XCACHE, BUILT_IN, "cpu")),
            f"{found['parts'][name]['warm'][XCACHE][-1]['asked']}",
        )
        for name in names
    ]
    cold = [
        (
            name,
            f"{statistics.median(figures.series(found, name, 'cold', NONE, 'wall')):.2f} s",
            *(_ratio(figures.against(found, name, "cold", peer, NONE, "wall")) for peer in (XCACHE, BUILT_IN)),
            _ratio(figures.against(found, name, "cold", XCACHE, NONE, figures.without_serialize, "wall")),
            _ratio(figures.against(found, name, "cold", BUILT_IN, NONE, figures.without_serialize, "wall")),
            f"{len(figures.series(found, name, 'cold', XCACHE, 'wall'))}",
        )
        for name in names
    ]
    head = (
        *("", "built-in took", "xcache", "floor", "xcache.jit", "its floor", "built-in, limited"),
        *("blocked in compile path", "processor time", "programs"),
    )
    warm_text = (
        "A second run, with a cache that the first run filled; JAX's built-in cache is 1. The *floor* is built-in's own"
        " time less what it spends on the main thread to lower, to make keys and to load: no cache that traces could be"
        " faster. JAX imports scipy while it lowers programs that call LAPACK; they cannot run without it, so it is"
        " part of the floor. The floor of `xcache.jit` is less all tracing, too; these programs use it for one or two"
        " of their functions. The rest is Python's start and end, imports, the backend and running."
        " [Loading](loading.md) says what jaxlib does while it loads.\n\n<warm>\n\n<phases>"
    )
    cold_head = ("", "no cache took", "xcache", "built-in", "xcache beyond serialize()", "built-in beyond it", "rounds")
    cold_text = "The first run, with an empty store; without any cache is 1.\n\n<cold>"
    return [
        f"## Warm starts\n\n{warm_text}\n\n{_table(head, warm)}",
        f"## Cold starts\n\n{cold_text}\n\n{_table(cold_head, cold)}\n\n{_beside_compiling(found, names)}",
    ]


def _beside_compiling(found: Found, names: Iterable[str]) -> str:
    rows = []
    for name in names:
        without, mine = (phases_of(found["parts"][name]["cold"][peer]) for peer in (NONE, XCACHE))
        took = {phase: statistics.median(seconds) for phase, seconds in mine.items()}
        key, wait, announce, rest = (
            took[f"compile path: {part}"]
            for part in ("key", "wait for the store", "announce the toolchain", "everything else")
        )
        on_main = (took["backend"] - statistics.median(without["backend"]), key, wait + announce, rest)
        whole = sum(on_main) / statistics.median(without["whole process"])
        behind = [took.get(f"other threads: {what}", 0.0) for what in ("serialize", "compress", "send to the daemon")]
        cells = [f"{seconds * 1e3:.0f}" for seconds in (*on_main, *behind, took["daemon's processor time"])]
        rows.append((name, *cells[:4], f"{whole:.1%}", *cells[4:]))
    text = (
        "xcache's own work in cold runs, in milliseconds (medians). *Together* is the main thread's part, as a share of"
        " the time without a cache. The work behind the main thread includes waits for the GIL, a processor and the"
        " disk. `serialize()` holds the GIL."
    )
    head = (
        *("", "backend", "keys", "asking", "the rest", "together"),
        *("behind: serialize()", "compress", "send", "daemon"),
    )
    return f"{text}\n\n{_table(head, rows)}"


def _changed(found: Found) -> str:
    changes = found["parts"].get("changed")
    if not changes:
        return ""
    rows = []
    for name, kinds in changes.items():
        walls, cpus = ({kind: [one[of] for one in kinds[kind]] for kind in kinds} for of in ("wall", "cpu"))
        cells = [
            _ratio(figures.ratio(walls[kind], walls[runs.NOTHING_AHEAD])) for kind in (runs.CHANGED, runs.UNCHANGED)
        ]
        cells += [
            _ratio(figures.ratio(cpus[kind], cpus[runs.NOTHING_AHEAD])) for kind in (runs.CHANGED, runs.UNCHANGED)
        ]
        rows.append((name, *cells, _ratio(figures.ratio(walls[runs.CHANGED], walls[BUILT_IN]))))
    head = ("", "time: changed", "unchanged", "processor time: changed", "unchanged", "changed, against built-in")
    text = (
        "A script that was another program at its last run: the cache has all that it wants, but the wrong entries are"
        " loaded ahead. The same run with `XCACHE_PREFETCH=0` is 1."
    )
    return f"## A program that changed completely\n\n{text}\n\n{_table(head, rows)}"


def _crowd(found: Found) -> str:
    crowds = found["parts"].get("crowd")
    if not crowds:
        return ""
    rows = []
    for name, kinds in crowds.items():
        for kind in ("cold", "warm"):
            cells = []
            for of in ("cpu", "wall"):
                ours, theirs = ([sample[of] for sample in kinds[kind][peer]] for peer in (XCACHE, BUILT_IN))
                cells.append(_ratio(figures.ratio(ours, theirs)))
            compiled = [f"{kinds[kind][peer][-1]['compiled']}" for peer in (XCACHE, BUILT_IN)]
            rows.append((f"{name}, {kind}", *cells, *compiled))
    head = ("", "processor time", "time", "compiled: xcache", "built-in")
    text = (
        "Processes that start at once; the built-in cache is 1. xcache's processor time has its daemon's in it. The"
        " floor in the table of bars is the processor time of one warm start with built-in, less that of lowering: each"
        " process has to import, trace and load, and in a crowd no processor is free to do so beside the program."
    )
    return f"## Crowds\n\n{text}\n\n<crowd>\n\n{_table(head, rows)}"


def _sizes(found: Found) -> str:
    sizes = found["parts"].get("micro", {}).get("sizes")
    if not sizes:
        return ""
    rows = []
    for size, kinds in sizes.items():
        hit, put = kinds["hit"], kinds["put"]
        rows.append(
            (
                plots.short(int(size)),
                *(_ratio(figures.ratio(hit[p], hit["file"])) if p in hit else "" for p in ("xcache", "redis")),
                _ratio(figures.ratio(hit["xcache"], hit["round trip"])) if "round trip" in hit else "",
                *(_ratio(figures.ratio(put[p], put["file"])) if p in put else "" for p in ("xcache", "redis")),
            )
        )
    head = ("", "hit: xcache", "redis", "xcache against a bare round trip", "put: xcache", "redis, synced")
    text = (
        "One client. A hit is everything but the deserialization: asked, received, verified, decompressed; to open,"
        " read and decompress the same file, unverified, is 1. A put is synced to disk; to write, sync and rename a"
        " file is 1. Redis is in memory alone for hits, and syncs each write for puts."
    )
    return f"## Sizes\n\n{text}\n\n<sizes>\n\n{_table(head, rows)}"


def _pieces(found: Found) -> str:
    micro = found["parts"].get("micro", {})
    if "pieces" not in micro:
        return ""
    small, large = (micro["sizes"][size]["hit"] for size in ("4096", "1048576"))
    bare = {"a bare round trip between two processes, 4 KiB": small["round trip"]}
    wholes = {
        "4096": {"all of it": small["xcache"]} | bare,
        "1048576": {"all of it": large["xcache"], "the same with a file": large["file"]} | bare,
    }
    rows = {
        size: [
            (name, f"{statistics.median(times) * 1e6:.1f}") for name, times in (whole | micro["pieces"][size]).items()
        ]
        for size, whole in wholes.items()
    }
    text = (
        "Microseconds, medians. The pieces were measured alone, within one process: they are the work that cannot be"
        " left out. Between two processes each takes several times as long, because the processor's caches are"
        " cold after each change of process. The rest is the event loop, the sockets and the bookkeeping."
    )
    return (
        f"## The pieces of a hit\n\n{text}\n\n{_table(('4 KiB', 'µs'), rows['4096'])}"
        f"\n\n{_table(('1 MiB', 'µs'), rows['1048576'])}"
    )


def _clients(found: Found) -> str:
    ratios = {kind: figures.rates(found, kind) for kind in ("hit", "miss", "put")}
    if not ratios["hit"]:
        return ""
    rows = [(f"{clients}", *(_ratio(ratios[kind].get(clients)) for kind in ratios)) for clients in ratios["hit"]]
    text = (
        "Answers a second for 4 KiB, each client with one request under way, from the same load generator;"
        " redis-server on a Unix socket is 1, for puts one that syncs each write. More is better."
    )
    return f"## Clients\n\n{text}\n\n<clients>\n\n{_table(('clients', 'hit', 'miss', 'put'), rows)}"


def _entries(found: Found) -> str:
    miss = figures.by_entries(found, "miss")
    if not miss:
        return ""
    put = figures.by_entries(found, "put that evicts")
    theirs = figures.by_entries(found, "put that evicts", "limited")
    ready = figures.by_entries(found, "ready after")
    memory = figures.by_entries(found, "memory at the start")
    rows = [
        (f"{count:,}", *(_ratio(column.get(count)) for column in (miss, put, theirs, ready, memory)))
        for count in sorted({*miss, *theirs})
    ]
    head = ("entries", "miss", "put that evicts", "the same in JAX's bounded cache", "daemon's start", "its memory")
    text = "The same with 1,000 entries is 1."
    return f"## Full stores\n\n{text}\n\n<entries>\n\n{_table(head, rows)}"


def _how() -> str:
    return """## How it was measured

* Each run is a process of its own; its time is from its start to its end, exit included.
* In each round every peer has its turn, another one first each time; the first warm round is dropped.
* All stores are on the same disk, and have just been written: none is read from the disk.
* For single requests of up to 64 KiB, and for misses in full stores, client and daemon have a processor each. Otherwise
  the kernel places each pair differently, which changes the times by more than what is compared.
* In full stores the measurements begin ten seconds after the daemons.
* The built-in cache is at its best: no minimum of time or size; with a limit, one that is never reached.
* The daemon runs before the program starts. The digests of jaxlib's libraries, which the first program after an install
  makes, are there.
* The time blocked is the main thread's time in jax's compile path, by jax's own events. xcache leaves all compiles to a
  jax with functions of others in it, so in its runs the benchmark's clocks are in functions of xcache.
* In cold runs, the parts of every peer's compile path are timed, too.
* All runs of a program compute the same, bit for bit, or there is no report."""
