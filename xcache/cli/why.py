"""``xcache why``: the cause of each miss, with what differs from the entry that comes closest."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from xcache import start_up
from xcache.cli import Failure, advice
from xcache.cli.completion import complete_key, complete_run
from xcache.cli.ledger_file import LedgerReader, StoredRun, open_ledger
from xcache.cli.nearest import Comparison, Neighbours
from xcache.cli.operation_diff import Difference
from xcache.cli.output import (
    ago,
    counted,
    emit,
    json_option,
    middle_cut,
    print_line,
    print_wrapped,
    short_site,
    shortened,
)
from xcache.cli.runs import print_unknown
from xcache.cli.store_file import StoreReader
from xcache.config import config
from xcache.wire import ledger
from xcache.wire.ledger import Row

_SHORT_KEY, _SHORT_RUN = 12, 8
# A shorter name is never the beginning of a key.
_LEAST_DIGITS = 4
# Without --run, a name is looked for in this many runs.
_MOST_SEARCHED = 200
# Programs of one cause, and differences of one program, that are shown without --all.
_MOST_SHOWN = 10
# Numbers, and lists of them.
_NUMBER = r"-?\d[\d.]*(?:e[-+]?\d+)?"
_NUMBERS = re.compile(rf"{_NUMBER}(?:, {_NUMBER})*", re.IGNORECASE)
_LONGEST_SHAPES, _LONGEST_SITE = 100, 100
# Causes that are explained by a comparison with another entry.
_COMPARED = ("new", "other program", "stale", *(kind for kind in ledger.CAUSES if kind.startswith("other ")))
# So many compiles are worth a look at what the report computes from them.
_MANY = 5
_REPORT = "`xcache report` shows where the time went, and which functions were compiled for many shapes."
_COMPILED = (ledger.MISS, ledger.UNCACHEABLE, ledger.COMPILING)


@click.command()
@click.argument("wanted", metavar="[KEY|NAME]", default="", shell_complete=complete_key)
@click.option(
    "--run",
    "run_wanted",
    metavar="RUN",
    shell_complete=complete_run,
    help="The run to explain, as in `xcache run`.",
)
@click.option("--all", "show_all", is_flag=True, help="Show all programs and differences, however many.")
@json_option
def why(wanted: str, run_wanted: str | None, show_all: bool, as_json: bool) -> None:
    """Say why programs of a run were compiled: for each miss its cause, what differs, and what to do about it.

    Without --run, it is the last run, as in `xcache run`. A program is compared with what an earlier run called at the
    same place. With KEY or NAME (a part of a function's name), it is the last run that compiled such a program, and
    programs of this run and of other places are compared, too.

    \b
    JSON: {"run": str, "program": str, "misses": [{"position": int (as in `xcache run`),
           "module_name": str, "site": str, "shapes": str, "key": str,
           "outcome": "miss", "uncacheable" or "compiling", "cause": str,
           "meaning": str, "stored": str, "seconds": float, "nearest": str (the key it was compared with),
           "of_this_run": bool (whether the run itself stored that),
           "components": {NAME: {"here": [str], "there": [str]}}, "differences": [{"text": str, "advice": str,
           "arguments": [[int, str]] (the numbers and names of those that differ, where they have names)}],
           "advice": str, "earlier": str (a run that compiled it and stored nothing)}]}
    """
    settings = config.load()
    with open_ledger(settings) as (reader, store):
        found, rows = _chosen(reader, wanted, run_wanted)
        all_rows = reader.rows(found)
        misses = explained(reader, store, found, rows, is_wide=bool(wanted))
    if as_json:
        emit({"run": found.run.run, "program": found.run.program, "misses": misses})
    else:
        _print(found, all_rows, misses, wanted, show_all=show_all)


def _chosen(reader: LedgerReader, wanted: str, run_wanted: str | None) -> tuple[StoredRun, list[Row]]:
    """Return the run to explain, and the programs that it compiled."""
    if run_wanted:
        runs = [reader.run(run_wanted)]
    else:
        runs = [reader.run("last")]
        if wanted:
            runs += reader.runs(_MOST_SEARCHED)
    was_there = ""
    for run in runs:
        rows = [row for row in reader.rows(run) if _is_wanted(row, wanted)]
        compiled = [row for row in rows if row.outcome in _COMPILED]
        if compiled or not wanted:
            return run, compiled
        if rows and not was_there:
            was_there = f"; run {run.run.run[:_SHORT_RUN]} found {rows[0].module_name} in the cache"
    where = f"run {runs[0].run.run[:_SHORT_RUN]}" if run_wanted else f"the last {_MOST_SEARCHED} runs"
    raise Failure(f"no program that {where} compiled is named or keyed {wanted!r}{was_there}")


def _is_wanted(row: Row, wanted: str) -> bool:
    return wanted in row.module_name or (len(wanted) >= _LEAST_DIGITS and row.key.startswith(wanted))


def explained(
    reader: LedgerReader, store: StoreReader | None, run: StoredRun, rows: Sequence[Row], *, is_wide: bool = False
) -> list[dict[str, Any]]:
    """Return the misses as --json documents them, the longest first.

    ``is_wide``: programs are also compared with those of the run itself, and of other places in the code.
    """
    missed = [row for row in rows if row.outcome != ledger.UNCACHEABLE]
    same: defaultdict[str, list[tuple[str, Row]]] = defaultdict(list)
    # A row of what was loaded ahead in vain has the key of another row, and says nothing of its program.
    known = {row.key: row for row in reader.rows(run) if row.outcome != ledger.UNUSED}
    own = {key for key, row in known.items() if row.stored == "yes"}
    wanted = {key for row in missed for key in (row.key, row.nearest) if key}
    for before, row in reader.earlier(run, column="key", values=wanted):
        if row.outcome != ledger.UNUSED:
            known.setdefault(row.key, row)
            same[row.key].append((before, row))
    earlier: list[Row] = []
    for column in ("site", "module_name"):
        values = {getattr(row, column) for row in missed} - {""}
        earlier += [row for _, row in reader.earlier(run, column=column, values=values) if row.outcome != ledger.UNUSED]
    for row in earlier:
        # What StableHLO does not say, such as weak types, is known of these, too.
        known.setdefault(row.key, row)
    least_new = math.inf if is_wide else run.run.began_at
    neighbours = None if store is None else Neighbours(store, known, earlier, before=least_new, is_wide=is_wide)
    compared: dict[int, Comparison | None] = {}
    for row in rows:
        is_compared = row.outcome == ledger.MISS and any(kind in _COMPARED for kind in ledger.kinds_of(row.cause))
        compared[row.position] = neighbours.compared(row) if neighbours and is_compared else None
    of_settings = _Settings(reader, run, {each.key for each in compared.values() if each})
    found = []
    for row in rows:
        comparison = compared[row.position]
        if comparison and not comparison.is_same_program:
            comparison = comparison._replace(differences=[*comparison.differences, *of_settings.since(comparison.key)])
        of_this_run = comparison is not None and comparison.key in own
        found.append(
            _one(row, comparison) | {"of_this_run": of_this_run, "earlier": _in_vain(same[row.key]) if row.key else ""}
        )
    return sorted(found, key=lambda each: -each["seconds"])


class _Settings:
    """In which settings of jax a run differs from those that stored entries."""

    def __init__(self, reader: LedgerReader, run: StoredRun, keys: Collection[str]) -> None:
        self._here = run.run.settings
        earlier = reader.earlier(run, column="key", values=keys)
        self._stored_by = {row.key: before for before, row in earlier if row.stored == "yes"}
        wanted = {*self._stored_by.values()}
        runs = reader.runs(0) if wanted else []
        self._of_runs = {each.run.run: each.run.settings for each in runs if each.run.run in wanted}

    def since(self, key: str) -> Iterator[Difference]:
        """Yield the settings that have changed since an earlier run stored an entry."""
        there = self._of_runs.get(self._stored_by.get(key, ""), {})
        for name, value in self._here.items():
            if there.get(name, value) != value:
                yield Difference(f"{name} is {value} here, and was {there[name]} in the run that stored the other")


def _one(row: Row, comparison: Comparison | None) -> dict[str, Any]:
    shown: dict[str, Any] = row._asdict() | {"seconds": start_up.of_row(row)["seconds"]}
    del shown["spans"]
    comparison = comparison or Comparison("", {}, [])
    if row.outcome == ledger.UNCACHEABLE:
        meaning, hints = f"it cannot be cached: {row.cause}", [advice.for_uncacheable(row.cause)]
    else:
        # Advice about a difference is better than advice about all programs of the cause.
        is_told = any(each.advice for each in comparison.differences)
        unfit = _COMPARED if is_told else ()
        if row.stored.startswith("no: "):
            unfit += advice.STORED_NOW
        meaning = advice.meaning_of(row.cause, is_told=is_told)
        hints = advice.for_cause(row.cause, unfit)
    hints += [comparison.problem] if comparison.problem else []
    return shown | {
        "meaning": meaning,
        "nearest": comparison.key,
        "components": comparison.components,
        "differences": [each._asdict() for each in comparison.differences],
        "advice": " ".join(hints),
    }


def _in_vain(before: Sequence[tuple[str, Row]]) -> str:
    """Say that the last run that asked for a program compiled it and did not store it, if that is so."""
    if not before or before[-1][1].outcome not in (ledger.MISS, ledger.COMPILING) or before[-1][1].stored == "yes":
        return ""
    run, row = before[-1]
    why_not = row.stored.removeprefix("no: ") or "the process ended before that"
    return f"run {run[:_SHORT_RUN]} compiled it, too, and did not store it: {why_not}"


def _print(
    found: StoredRun, rows: Sequence[Row], explained: Sequence[dict[str, Any]], wanted: str, *, show_all: bool
) -> None:
    run, is_running = found.run, found.state == "running"
    command = shortened(run.command, _LONGEST_SITE)
    print_wrapped(f"run {run.run[:_SHORT_RUN]} of {command} (began {ago(run.began_at)} ago, {found.state})")
    outcomes = start_up.outcomes_of(rows)
    compiled = sum(outcomes.get(outcome, 0) for outcome in _COMPILED)
    programs = counted(start_up.asked_for(outcomes), "program")
    print_line(f"{compiled} of {programs} compiled" + " so far" * is_running)
    if wanted:
        print_line(f"{len(explained)} of them named or keyed {wanted!r}")
    print_unknown(rows)
    most = len(explained) if show_all else _MOST_SHOWN
    told = [row for row in explained if row["differences"] or row["components"]]
    rest = sorted((row for row in explained if row not in told), key=lambda row: row["meaning"])
    first = [
        row
        for row in rest
        if row["cause"] in advice.NEW and not row["nearest"] and (is_running or row["stored"] == "yes")
    ]
    if first:
        print_line()
        _print_first(first, show_all=show_all)
    groups = [[row] for row in told] if show_all else alike(told)
    said: set[str] = set()
    for row, *similar in groups[:most]:
        print_line()
        _print_one(row, said, is_running=is_running, most=len(row["differences"]) if show_all else _MOST_SHOWN)
        if similar:
            seconds = sum(other["seconds"] for other in similar)
            is_one_function = all(other["module_name"] == row["module_name"] for other in similar)
            more = counted(len(similar), "more program") + (" of this function" if is_one_function else "")
            verb, what = ("differ", "each") if len(similar) > 1 else ("differs", "it")
            print_wrapped(f"{more} {verb} in the same way, {seconds:.2f} s more; --all shows {what}", "  ")
    if left_out := sum(map(len, groups[most:])):
        print_line()
        print_wrapped(
            f"{left_out} more that {'differ' if left_out > 1 else 'differs'} from a stored entry; --all shows them"
        )
    others = [row for row in rest if row not in first]
    for _, group in itertools.groupby(others, key=lambda row: (row["meaning"], row["advice"])):
        print_line()
        _print_group([*group], is_running=is_running, most=most)
    if len(explained) >= _MANY:
        print_line()
        print_wrapped(_REPORT)


def _print_first(rows: Sequence[dict[str, Any]], *, show_all: bool) -> None:
    """Print the programs that the store could not have; those of one function and place are one line."""
    seconds = sum(row["seconds"] for row in rows)
    new = f"{counted(len(rows), 'program')} {'are' if len(rows) > 1 else 'is'} new to the store ({seconds:.2f} s)"
    print_wrapped(f"nothing is wrong: {new}, and what is compiled now serves the next runs", bold=True)
    groups: defaultdict[object, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["position"] if show_all else (row["module_name"], row["site"])].append(row)
    longest = sorted(groups.values(), key=lambda group: -sum(row["seconds"] for row in group))
    most = len(longest) if show_all else _MOST_SHOWN
    for group in longest[:most]:
        print_wrapped(_title(group[0]) if len(group) == 1 else _title_of_several(group), "  ", "      ")
    if left_out := sum(map(len, longest[most:])):
        print_wrapped(f"and {left_out} more; --all shows them", "  ")


def alike(rows: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return explained misses in groups of those that differ in the same way from what is stored."""
    groups: defaultdict[object, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[_likeness(row)].append(row)
    return [*groups.values()]


def _likeness(row: Mapping[str, Any]) -> object:
    """Return what programs have in common if they differ in the same way from what is stored.

    Options, flags and devices are nothing of a function's own.
    """
    same = ["outcome", "meaning", "stored", "advice", "earlier"]
    told = [f"{each['text']} {each['advice']}" for each in row["differences"]]
    differences = tuple(_NUMBERS.sub("#", text) for text in told)
    same += ["module_name", "site"] if differences and not row["components"] else []
    differing = row["position"] if row["components"] else None
    return differences or differing, *(row[name] for name in same)


def _print_one(row: dict[str, Any], said: set[str], *, is_running: bool, most: int) -> None:
    """Print a program with what differs from the nearest entry; advice that was ``said`` is not said again."""
    print_wrapped(_title(row), bold=True)
    nearest = row["nearest"][:_SHORT_KEY]
    compared = f"compared with the stored {nearest}:"
    if row["of_this_run"]:
        compared = f"compared with {nearest}, which this run compiled before:"
    print_wrapped(compared if row["cause"] in advice.NEW else f"{row['meaning']}; {compared}", "  ")
    for difference in row["differences"][:most]:
        print_wrapped(f"- {difference['text']}", "  ", "    ")
        if difference["advice"] not in said:
            print_wrapped(difference["advice"], "    ")
        said.add(difference["advice"])
    if len(row["differences"]) > most:
        print_wrapped(f"- and {len(row['differences']) - most} more; --all shows them", "  ")
    if row["advice"] not in said:
        print_wrapped(row["advice"], "  ")
    said.add(row["advice"])
    _print_not_stored(row, is_running=is_running)


def _print_group(group: Sequence[dict[str, Any]], *, is_running: bool, most: int) -> None:
    """Print programs with one cause, and nothing else to say about each."""
    first, count = group[0], len(group)
    print_wrapped(f"{counted(count, 'program')}: {first['meaning']}", bold=True)
    for row in group[:most]:
        print_wrapped(_title(row), "  ", "      ")
        _print_not_stored(row, is_running=is_running)
    if count > most:
        print_wrapped(f"and {count - most} more; --all shows them", "  ")
    print_wrapped(first["advice"], "  ")


def _print_not_stored(row: dict[str, Any], *, is_running: bool) -> None:
    print_wrapped(row["earlier"], "    ")
    if row["outcome"] == ledger.MISS and row["stored"] != "yes":
        reason = row["stored"].removeprefix("no: ") or "the process ended before that"
        print_wrapped("it is not stored yet" if is_running and not row["stored"] else f"not stored: {reason}", "    ")


def _title_of_several(rows: Sequence[dict[str, Any]]) -> str:
    seconds = sum(row["seconds"] for row in rows)
    return f"{rows[0]['module_name']}, {len(rows)} programs, {seconds:.2f} s" + _called_at(rows[0])


def _called_at(row: dict[str, Any]) -> str:
    return f", called at {shortened(short_site(row['site']), _LONGEST_SITE)}" if row["site"] else ""


def _title(row: dict[str, Any]) -> str:
    called = f"{row['module_name']}({middle_cut(row['shapes'], _LONGEST_SHAPES)}), {row['seconds']:.2f} s"
    return called + _called_at(row)
