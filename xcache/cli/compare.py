"""``xcache compare``: two runs side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import click

from xcache import start_up
from xcache.cli.completion import complete_run
from xcache.cli.ledger_file import open_ledger
from xcache.cli.output import (
    Column,
    emit,
    json_option,
    middle_cut,
    note,
    print_facts,
    print_line,
    print_table,
    shortened,
)
from xcache.config import config
from xcache.wire import ledger
from xcache.wire.ledger import Row

_MOST_SHOWN, _LONGEST = 20, 80
# A difference below this is noise.
_LEAST_SECONDS = 0.005
_COLUMNS = (
    Column("function", lambda row: shortened(row["module_name"], _LONGEST), cut=True),
    Column("arguments", lambda row: middle_cut(row["shapes"], _LONGEST), cut=True),
    Column("A", lambda row: _cell(row["a"]), "right"),
    Column("B", lambda row: _cell(row["b"]), "right"),
    Column("B - A", lambda row: f"{row['more_seconds']:+.3f}", "right"),
)


@click.command()
@click.argument("first", metavar="A", shell_complete=complete_run)
@click.argument("second", metavar="B", default="last", shell_complete=complete_run)
@json_option
def compare(first: str, second: str, as_json: bool) -> None:
    """Show two runs side by side: what was compiled in one and found in the other, and what took longer.

    A and B are runs as in `xcache run`; B is the last one unless it is given.

    \b
    JSON: {"a": str, "b": str, "stages": {STAGE: {"a": float, "b": float}}, "ready_seconds": {"a": float, "b": float},
           "programs": [{"module_name": str, "shapes": str, "a": {"count": int, "compiled": int, "seconds": float},
           "b": the same, "more_seconds": float}]}
    """
    settings = config.load()
    with open_ledger(settings) as (reader, _):
        found = [reader.run(first), reader.run(second)]
        if found[0].id == found[1].id:
            note(f"both are run {found[0].run.run[:8]}; `xcache runs` lists others to compare it with")
        both = [reader.rows(each) for each in found]
    runs = [each.run for each in found]
    seconds = [start_up.seconds_of(rows) for rows in both]
    names = [name for name in ledger.STAGES if any(name in each for each in seconds)]
    stages = {
        name: {side: round(each.get(name, 0.0), 6) for side, each in zip("ab", seconds, strict=True)} for name in names
    }
    ready = {side: round(start_up.ready_after(rows), 6) for side, rows in zip("ab", both, strict=True)}
    programs = sorted(side_by_side(*both), key=lambda row: -abs(row["more_seconds"]))
    if as_json:
        emit({"a": runs[0].run, "b": runs[1].run, "stages": stages, "ready_seconds": ready, "programs": programs})
        return
    for side, run in zip("AB", runs, strict=True):
        print_line(f"{side}: {shortened(run.command, _LONGEST)} (run {run.run[:8]})")
    imports = {side: run.seconds_to_hook for side, run in zip("ab", runs, strict=True)}
    shown = {"ready after": ready, "start and imports": imports, **stages}
    print_facts([(name, f"{each['a']:.3f} s  ->  {each['b']:.3f} s") for name, each in shown.items()])
    changed = [row for row in programs if abs(row["more_seconds"]) >= _LEAST_SECONDS or _is_compiled_once(row)]
    if changed:
        print_line()
        print_table(_COLUMNS, changed[:_MOST_SHOWN])


def side_by_side(a: Sequence[Row], b: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the programs of either run by function and types of arguments."""
    sums: defaultdict[tuple[str, str], dict[str, dict[str, Any]]] = defaultdict(
        lambda: {side: {"count": 0, "compiled": 0, "seconds": 0.0} for side in "ab"}
    )
    for side, rows in zip("ab", (a, b), strict=True):
        for row in rows:
            if row.outcome == ledger.UNUSED:
                continue
            found = sums[row.module_name, row.shapes][side]
            found["count"] += 1
            found["compiled"] += row.outcome not in (ledger.HIT, ledger.AHEAD)
            found["seconds"] = round(found["seconds"] + sum(start_up.seconds_of([row]).values()), 6)
    return [
        {
            "module_name": name,
            "shapes": shapes,
            **sides,
            "more_seconds": round(sides["b"]["seconds"] - sides["a"]["seconds"], 6),
        }
        for (name, shapes), sides in sums.items()
    ]


def _is_compiled_once(row: dict[str, Any]) -> bool:
    return bool(row["a"]["compiled"]) != bool(row["b"]["compiled"])


def _cell(side: dict[str, Any]) -> str:
    if not side["count"]:
        return "-"
    return f"{side['seconds']:.3f}" + (" compiled" if side["compiled"] else "")
