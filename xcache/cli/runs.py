"""``xcache runs`` and ``xcache run``: the processes that used the cache, and where the time of one start-up went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from xcache import start_up
from xcache.cli.completion import complete_run
from xcache.cli.ledger_file import open_ledger
from xcache.cli.output import (
    Column,
    ago,
    counted,
    duration,
    emit,
    json_option,
    middle_cut,
    moment,
    note,
    print_line,
    print_table,
    print_wrapped,
    short_site,
    shortened,
)  # fmt: skip
from xcache.config import config
from xcache.wire import ledger

_SHORT_RUN = 8
_TABLE_LIMIT = 20
_MOST_SHOWN = 15
# Also where a table goes into a file: the types of a training step's arguments have a thousand characters.
_LONGEST, _LONGEST_TYPES = 80, 50
_RUNS = (
    Column("run", lambda row: row["run"][:_SHORT_RUN]),
    Column("program", lambda row: shortened(row["command"], _LONGEST), cut=True),
    Column("began", lambda row: ago(row["began_at"]), "right"),
    Column("ready in", lambda row: duration(row["ready_seconds"]), "right"),
    Column("compiled", lambda row: str(row["outcomes"].get(ledger.MISS, 0)), "right"),
    Column("found", lambda row: str(_hits(row["outcomes"])), "right"),
    Column("uncacheable", lambda row: str(row["outcomes"].get(ledger.UNCACHEABLE, 0)), "right"),
    Column("state", lambda row: row["state"]),
)


@click.command()
@click.option("--program", metavar="TEXT", help="Runs of programs whose name contains this text.")
@click.option("--here", is_flag=True, help="Runs that began in this folder.")
@click.option("--limit", type=click.IntRange(min=0), default=_TABLE_LIMIT, show_default=True, help="0 for all.")
@json_option
def runs(program: str | None, here: bool, limit: int, as_json: bool) -> None:
    """List the processes that used the cache, the latest first.

    \b
    JSON: {"runs": [{"run": str, "program": str, "arguments": [str], "command": str, "directory": str, "host": str,
           "pid": int, "uid": int, "state": "ended", "running", "killed" or "no end known", "began_at": float,
           "reported_at": float, "ended_at": float or null, "seconds_to_hook": float (until jax was imported),
           "ready_seconds": float (from the start of the process until its last program could run),
           "stages": {STAGE: float}, "outcomes": {OUTCOME: int}, "facts": {NAME: str}}]}
    """
    settings = config.load()
    with open_ledger(settings) as (reader, _):
        found = reader.runs(limit, program or "", str(Path.cwd()) if here else None)
        rows = [start_up.of_run(each.run, each.state, reader.rows(each)) for each in found]
    if as_json:
        emit({"runs": rows})
    elif rows:
        print_table(_RUNS, rows)
    else:
        note("no run is recorded")


@click.command()
@click.argument("wanted", metavar="[RUN]", default="last", shell_complete=complete_run)
@click.option(
    "--all", "show_all", is_flag=True, help="Show all programs, not only those that took longest, and cut no text."
)
@json_option
def run(wanted: str, show_all: bool, as_json: bool) -> None:
    """Show where the time of a run went, and what it compiled.

    RUN is the number of a run, which may be shortened to four digits, or `last`, the default: the last run that began
    in this folder, or else the last of all.

    \b
    JSON: {"run": str and the other fields of `xcache runs`: "program", "arguments", "command", "directory", "host",
           "pid", "uid", "state", "began_at", "reported_at", "ended_at", "seconds_to_hook", "ready_seconds", "stages",
           "outcomes", "facts"; "programs": [{"position": int, "module_name": str, "site": str, "shapes": str,
           "key": str, "outcome": str, "cause": str, "stored": str, "nearest": str, "seconds": float,
           "spans": [{"stage": str, "start": float (since the process began), "seconds": float, "thread": str}]}],
           "saved_seconds": float (compile times of what was found, as far as they are known, less the loading)}
    """
    from xcache.cli.report import gathering, ledger_facts

    settings = config.load()
    with open_ledger(settings) as (reader, store):
        found = reader.run(wanted)
        rows = reader.rows(found)
        got = ledger_facts.got(found, rows)
        known = gathering.known_seconds(store, got)
    shown = start_up.of_run(found.run, found.state, rows)
    shown["saved_seconds"] = round(sum(ledger_facts.saved_by(each, known) for each in got), 6)
    programs = [start_up.of_row(row) for row in rows]
    if as_json:
        emit(shown | {"programs": programs})
    else:
        _print(shown, programs, show_all=show_all)
        print_unknown(rows)


def print_unknown(rows: Sequence[ledger.Row]) -> None:
    """Say how many programs of a run have no row, if there are any: what is summed up leaves them out."""
    if unknown := start_up.unknown_in(rows):
        some = counted(unknown, "program")
        note(f"the ledger has no row of {some} more: its oldest go at the limit max_ledger, and late ones may be lost")


def _columns(longest: int, longest_types: int) -> tuple[Column, ...]:
    """Return the columns of a run's programs, with texts of at most so many characters."""
    return (
        Column("seconds", lambda row: f"{row['seconds']:.3f}", "right"),
        Column("function", lambda row: shortened(row["module_name"], longest), cut=True),
        Column("arguments", lambda row: middle_cut(row["shapes"], longest_types), cut=True),
        Column("came from", lambda row: shortened(_origin(row), longest), cut=True),
        Column("most of it", _most_of),
        Column("called at", lambda row: shortened(short_site(row["site"]), longest), cut=True),
    )


def _origin(row: dict[str, Any]) -> str:
    return f"{row['outcome']}: {row['cause']}" if row["cause"] else row["outcome"]


def _print(shown: dict[str, Any], programs: list[dict[str, Any]], *, show_all: bool) -> None:
    most = len(programs) if show_all else _MOST_SHOWN
    command = shown["command"] if show_all else shortened(shown["command"], _LONGEST)
    print_wrapped(f"{command}  (run {shown['run'][:_SHORT_RUN]}, process {shown['pid']}, {shown['state']})")
    print_wrapped(f"began {moment(shown['began_at'])} in {shown['directory'] or 'an unknown folder'}")
    print_wrapped(_total(shown))
    print_wrapped(_counts(shown["outcomes"]))
    if shown["saved_seconds"] > 0:
        print_wrapped(f"the cache saved {duration(shown['saved_seconds'])} of compiling in this run, less the loading")
    programs = [row for row in programs if row["outcome"] != ledger.UNUSED]
    dearest = sorted(programs, key=lambda row: -row["seconds"])[:most]
    if dearest:
        print_line()
        longest = (ledger.MAX_TEXT, ledger.MAX_TEXT) if show_all else (_LONGEST, _LONGEST_TYPES)
        print_table(_columns(*longest), dearest)
    if len(programs) > len(dearest):
        print_line()
        note(f"{len(programs) - len(dearest)} more; --all shows them")


def _total(shown: dict[str, Any]) -> str:
    """Return the line that says where the time went."""
    ready, stages = shown["ready_seconds"], shown["stages"]
    parts = [("start and imports", shown["seconds_to_hook"]), *stages.items()]
    parts.append(("other", ready - sum(seconds for _, seconds in parts)))
    listed = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts if seconds >= 0.05)
    return f"{ready:.1f} s until its last program was ready: {listed}"


def _counts(outcomes: dict[str, int]) -> str:
    programs = counted(start_up.asked_for(outcomes), "program")
    plurals = {ledger.HIT: "hits", ledger.MISS: "misses"}
    listed = ", ".join(
        f"{count} {plurals.get(outcome, outcome) if count > 1 else outcome}"
        for outcome, count in sorted(outcomes.items())
        if outcome != ledger.UNUSED
    )
    # The program did not ask for these.
    in_vain = f"; {count} more loaded ahead in vain" if (count := outcomes.get(ledger.UNUSED)) else ""
    return (f"{programs}: {listed}" if listed else programs) + in_vain


def _hits(outcomes: dict[str, int]) -> int:
    return outcomes.get(ledger.HIT, 0) + outcomes.get(ledger.AHEAD, 0)


def _most_of(row: dict[str, Any]) -> str:
    own = [span for span in row["spans"] if not span["thread"].startswith(ledger.OWN_THREADS)]
    if not own:
        return ""
    longest = max(own, key=lambda span: span["seconds"])
    return f"{longest['stage']} {longest['seconds']:.3f}"
