"""Data for the template, made from what was gathered."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from xcache import start_up
from xcache._version import __version__
from xcache.cli.compare import side_by_side
from xcache.cli.output import counted, duration, middle_cut, size
from xcache.cli.report import charts, ledger_facts, tables, timeline, verdict
from xcache.cli.report.churn import Churn, of_functions
from xcache.cli.report.gathering import Gathered, RunOf
from xcache.cli.report.redaction import Redaction, folder_of
from xcache.cli.why import alike
from xcache.wire import ledger

_MOST_CHURNS = 12
_MOST_SMALL_NAMED = 6
_MOST_LINES = 10
_FACTS = (
    "host",
    "directory",
    "python",
    "jax",
    "jaxlib",
    "xcache",
    "mode",
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "JAX_PLATFORMS",
)


def content(found: Gathered, *, redact: bool) -> dict[str, Any]:
    """Return all that the template shows."""
    programs = [each for of in found.period for each in of.programs]
    every_churn = _churns(found, programs)
    churns, small = ([each for each in every_churn if each.is_small is is_small] for is_small in (False, True))
    shown = {of.stored.id: _shown(of, redact) for of in (*found.period, *filter(None, (found.focus, found.other)))}
    made = {
        "version": __version__,
        "made_at": time.strftime("%Y-%m-%d %H:%M", time.localtime(found.now)),
        "is_redacted": redact,
        "run": _run(found, churns, shown) if found.focus else None,
        "comparison": _comparison(found, shown) if found.focus and found.other else None,
        "churns": [_churn(churn, verdict.names_of(churn, found.explained)) for churn in churns[:_MOST_CHURNS]],
        "small_churns": _small_churns(small),
        "left_out_churns": max(0, len(churns) - _MOST_CHURNS),
        "period": _period(found, programs, shown),
        "store": _store(found, programs),
    }
    return _redaction(found)(made) if redact else made


def _shown(of: RunOf, redact: bool) -> dict[str, Any]:
    run = of.stored.run
    sums = start_up.of_run(run, of.stored.state, [each.row for each in of.programs])
    if redact and run.arguments:
        sums["command"] = f"{run.program} ({counted(len(run.arguments), 'argument')})"
    return sums


def _churns(found: Gathered, programs: Sequence[ledger_facts.Got]) -> list[Churn]:
    """Return the functions of all runs that were compiled for many shapes; those of this program come first."""
    churns = of_functions(ledger_facts.uses(programs))
    mine = found.focus.stored.run.program if found.focus else ""
    return sorted(churns, key=lambda churn: churn.program != mine)


def _run(found: Gathered, churns: Sequence[Churn], shown: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    assert found.focus is not None  # noqa: S101 - the caller has checked it
    of = found.focus
    run = of.stored.run
    drawn = timeline.drawn(of.programs)
    sums = verdict.without_pauses(shown[of.stored.id], timeline.pause_seconds(of.programs))
    shown_churns = {f"shapes-{number}": churn for number, churn in enumerate(churns[:_MOST_CHURNS])}
    parts = verdict.parts_of(sums)
    headline = verdict.headline(sums, of.programs, found.known)
    compiled = [each for each in of.programs if not each.is_found]
    saved = sum(ledger_facts.saved_by(each, found.known) for each in of.programs)
    spans = [span for each in of.programs for span in start_up.spans_of(each.row) if span.is_beside]
    beside = {
        stage: sum(span.seconds for span in spans if span.stage == stage) for stage in ("load", "serialize", "store")
    }
    return {
        "id": run.run,
        "command": sums["command"],
        "program": run.program,
        "state": sums["state"],
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.began_at)),
        "pid": run.pid,
        "facts": [(name, run.facts[name]) for name in _FACTS if run.facts.get(name)],
        "ready": duration(sums["ready_seconds"]),
        "headline": headline,
        "verdict": f"{duration(sums['ready_seconds'])} {headline}" if of.programs else headline,
        "parts": charts.stacked(parts),
        "beside": [(stage, duration(seconds)) for stage, seconds in beside.items() if seconds >= 0.0005],
        "actions": [
            action._asdict() | {"stake": action.stake}
            for action in verdict.actions(sums, of.programs, found.explained, shown_churns)
        ],
        "figures": [
            (f"{len(of.programs) - len(compiled)} of {len(of.programs)}", "programs came from the cache"),
            (duration(saved), "saved by the cache in this run"),
            (duration(sum(each.compile_seconds for each in compiled)), "spent compiling"),
        ],
        "timeline": drawn,
        "misses": [
            _miss(first, found.texts) | {"others": [_brief(each) for each in others]}
            for first, *others in alike(found.explained)
        ],
        "left_out_misses": len([each for each in compiled if each.row.outcome != ledger.FAILED]) - len(found.explained),
        "programs": tables.programs(
            "programs", of.programs, (each["position"] for each in found.explained), found.texts
        ),
        "texts": [
            (key, name, found.texts[key])
            for key, name in {each.row.key: each.row.module_name for each in of.programs}.items()
            if key in found.texts
        ],
    }


def _miss(each: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    changed = [
        (name, sign, line)
        for name, sides in each["components"].items()
        for side, sign in (("here", "+"), ("there", "\N{MINUS SIGN}"))
        for line in sides[side][:_MOST_LINES]
    ]
    return {
        **{name: each[name] for name in ("module_name", "site", "key", "nearest", "meaning", "earlier")},
        "position": each["position"],
        "shapes": middle_cut(each["shapes"], 600),
        "seconds": duration(each["seconds"]),
        "cause": each["cause"] if each["outcome"] != ledger.UNCACHEABLE else "not cacheable",
        "changed": changed,
        "differences": each["differences"],
        "advice": each["advice"],
        "not_stored": each["stored"].removeprefix("no: ") if each["stored"].startswith("no") else "",
        "is_compiling": each["outcome"] == ledger.COMPILING,
        "has_text": each["key"] in texts,
    }


def _brief(each: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is told of a miss whose like is told in full."""
    return {
        **{name: each[name] for name in ("module_name", "site", "position")},
        "shapes": middle_cut(each["shapes"]),
        "seconds": duration(each["seconds"]),
    }


def _comparison(found: Gathered, shown: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    assert found.focus is not None and found.other is not None  # noqa: S101 - the caller has checked it
    sides = [found.other, found.focus]
    sums = [verdict.without_pauses(shown[of.stored.id], timeline.pause_seconds(of.programs)) for of in sides]
    rows = [[each.row for each in of.programs] for of in sides]
    programs = side_by_side(*rows)
    parts = [dict(verdict.parts_of(each)) for each in sums]
    names = [name for name in ("imports", *ledger.STAGES, "other") if any(name in each for each in parts)]
    most = max([*parts[0].values(), *parts[1].values(), 0.0]) or 1.0
    only = [
        sum(bool(row[side]["compiled"]) > bool(row[other]["compiled"]) for row in programs)
        for side, other in ("ab", "ba")
    ]
    more = sums[1]["ready_seconds"] - sums[0]["ready_seconds"]
    grown = max(
        names,
        key=lambda name: (parts[1].get(name, 0.0) - parts[0].get(name, 0.0)) * (1 if more >= 0 else -1),
        default="",
    )
    return {
        "sides": [
            {"name": side, "command": each["command"], "run": each["run"], "ready": duration(each["ready_seconds"])}
            for side, each in zip("AB", sums, strict=True)
        ],
        "headline": f"B took {duration(abs(more))} {'more' if more >= 0 else 'less'} than A, most of it in {grown}."
        f" {counted(only[0], 'program')} compiled only in A, {counted(only[1], 'program')} only in B.",
        "stages": [
            {
                "name": name,
                "a": duration(parts[0].get(name, 0.0)),
                "b": duration(parts[1].get(name, 0.0)),
                "a_width": 100 * parts[0].get(name, 0.0) / most,
                "b_width": 100 * parts[1].get(name, 0.0) / most,
            }
            for name in names
        ],
        "table": tables.compared(programs),
    }  # fmt: skip


def _small_churns(churns: Sequence[Churn]) -> dict[str, Any]:
    # A function that is called in several places is one function.
    names = [*dict.fromkeys(churn.module_name for churn in churns)]
    listed = ", ".join(names[:_MOST_SMALL_NAMED]) + (" and others" if len(names) > _MOST_SMALL_NAMED else "")
    return {
        "count": len(names),
        "functions": counted(len(names), "small function") + (" was" if len(names) == 1 else " were"),
        "seconds": duration(sum(churn.seconds for churn in churns)),
        "names": listed,
    }


def _churn(churn: Churn, names: Mapping[int, str]) -> dict[str, Any]:
    return {
        "program": churn.program,
        "module_name": churn.module_name,
        "site": churn.site,
        "shapes": churn.shapes,
        "compiles": churn.compiles,
        "runs": counted(churn.runs, "run"),
        "seconds": duration(churn.seconds),
        "axes": [
            {"where": axis.where(names), "sizes": _listed(sorted(set(axis.sizes.values())))} for axis in churn.axes[:4]
        ],
        "left_out_axes": max(0, len(churn.axes) - 4),
        "strip": charts.strip(churn, names),
    }  # fmt: skip


def _listed(sizes: Sequence[int]) -> str:
    if len(sizes) <= 12:
        return ", ".join(map(str, sizes))
    return f"{', '.join(map(str, sizes[:10]))}, \N{HORIZONTAL ELLIPSIS} {sizes[-1]} ({len(sizes)} sizes)"


def _period(
    found: Gathered, programs: Sequence[ledger_facts.Got], shown: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any] | None:
    if not found.period:
        return None
    begin = max(found.since, min(of.stored.run.began_at for of in found.period))
    hits, misses = (sum(getattr(each, name) for each in programs) for name in ("is_found", "is_miss"))
    compiled = sum(each.compile_seconds for each in programs if not each.is_found)
    new = sum(each.compile_seconds for each in programs if not each.is_found and each.row.cause == "new")
    saved = sum(ledger_facts.saved_by(each, found.known) for each in programs)
    return {
        "begin": time.strftime("%Y-%m-%d %H:%M", time.localtime(begin)),
        "left_out_runs": found.left_out_runs,
        "figures": [
            (counted(len(found.period), "run"), f"{len(programs)} programs"),
            (f"{hits / (hits + misses):.0%}" if hits + misses else "\N{EN DASH}", "hit rate of what can be cached"),
            (duration(saved), "saved: compile times of hits, less their loading"),
            (duration(compiled), f"spent compiling, {duration(compiled - new)} of it programs that were not new"),
        ],
        "chart": charts.over_time(ledger_facts.over_time(programs, found.known, begin, found.now)),
        "causes": tables.causes(ledger_facts.by_cause(programs)),
        "runs": tables.runs(found.period, found.known, shown),
    }


def _store(found: Gathered, programs: Sequence[ledger_facts.Got]) -> dict[str, Any] | None:
    held = found.held
    if held is None:
        return None
    totals = held["totals"]
    stored, most = totals.get("bytes", 0), found.max_size
    missed: dict[str, tuple[int, float]] = {}
    for each in programs:
        if each.is_miss:
            count, lost = missed.get(each.cause, (0, 0.0))
            missed[each.cause] = count + 1, lost + each.compile_seconds
    unused = held["unused"]
    compilers = [
        (" ".join(str(row[name] or "") for name in ("platform", "device_kind", "jaxlib_version")), row)
        for row in held["compilers"]
    ]
    functions = [(row["module_name"] or "", row) for row in held["functions"]]
    top = functions[:6]
    of_entries = sum(row["bytes"] or 0 for _, row in compilers)
    others = {"other functions": of_entries - sum(row["bytes"] or 0 for _, row in top), "programs": stored - of_entries}
    return {
        "figures": [
            (tables.number(totals.get("entries", 0)).text, "entries"),
            (size(stored), f"of {size(most)} ({stored / most:.0%})" if most else "stored"),
            (
                f"{unused['entries']}",
                f"entries never used again, {size(unused['bytes'] or 0)}",
            ),
            (f"{held['statistics'].get('evictions', 0):.0f}", "entries evicted since the statistics began"),
        ],
        "parts": charts.stacked(
            [(name, row["bytes"] or 0) for name, row in top] + [item for item in others.items() if item[1] > 0], size
        )
        if stored
        else [],
        "ages": charts.stacked([(row["age"], row["bytes"] or 0) for row in held["ages"]], size),
        "functions": tables.groups("functions", "Entries by function, the largest first", "function", functions),
        "compilers": tables.groups("compilers", "Entries by device and jaxlib", "made for", compilers),
        "dearest": tables.dearest(held["dearest"]),
        "gone": tables.gone(held["gone"], missed),
        "toolchains": tables.toolchains(held["toolchains"]),
        "changes": [
            {
                "at": time.strftime("%Y-%m-%d %H:%M", time.localtime(change["at"])),
                "text": f"{counted(change['entries'], 'entry')}, {size(change['bytes'])}: {change['reason']}",
            }
            for change in held["changes"]
        ],
    }  # fmt: skip


def _redaction(found: Gathered) -> Redaction:
    """Return what takes the folders, hosts and arguments of all runs out."""
    runs = [of.stored.run for of in (*found.period, *filter(None, (found.focus, found.other)))]
    sites = {each.row.site for of in (*found.period, *filter(None, (found.focus,))) for each in of.programs}
    folders = {folder_of(site) for site in sites}
    folders |= {run.facts.get("directory", "") for run in runs} | {
        folder_of(run.facts.get("script", "")) for run in runs
    }
    for toolchain in (found.held or {}).get("toolchains", ()):
        folders |= {one["place"] for one in toolchain["installations"]}
    hosts = {run.facts.get("host", "") for run in runs}
    # Options stay: they are the program's, not the user's.
    given = {part for run in runs for argument in run.arguments for part in argument.split("=", 1)}
    return Redaction(folders, hosts | {part for part in given if not part.startswith("-")})
