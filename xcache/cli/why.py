"""``xcache why``: the cause of each miss, with what differs from the entry that comes closest."""

from __future__ import annotations

from typing import Any

import click

from xcache import start_up
from xcache.cli import option_lines, store_file
from xcache.cli.completion import complete_key, complete_run
from xcache.cli.ledger_file import open_ledger
from xcache.cli.output import counted, emit, json_option, note, print_line
from xcache.cli.programs import located_bytecode
from xcache.cli.runs import short_site
from xcache.config import config
from xcache.errors import XcacheError
from xcache.start_up import Run
from xcache.wire import ledger, protocol
from xcache.wire.ledger import Row

_SHORT_KEY = 12
# Lines of one component that are shown.
_MOST_LINES = 10
# Advice for each cause.
_ADVICE = {
    "evicted": "Raise XCACHE_MAX_SIZE (xcache config shows the limits), or pin what must stay (xcache pin).",
    "stale": "This is usual after an upgrade; the new entries serve the next runs.",
    "set aside": "`xcache ls --quarantined` says why. If it happens again, please report it.",
    "not trusted": "The setting trusted_writers of the machine's daemon says whose entries are served to you.",
    "no daemon": "`xcache status` says whether the daemon runs, and its log why not.",
    "other flags": "Give all runs the same XLA_FLAGS.",
    "other platform": "Entries are made for one kind of device, topology and number of CPU threads.",
    "refresh": "Use XCACHE=1 to look programs up.",
}


@click.command()
@click.argument("wanted", metavar="[KEY|NAME]", default="", shell_complete=complete_key)
@click.option(
    "--run",
    "run_wanted",
    metavar="RUN",
    default="last",
    show_default=True,
    shell_complete=complete_run,
    help="The run to explain.",
)
@json_option
def why(wanted: str, run_wanted: str, as_json: bool) -> None:
    """Say why programs of a run were compiled: for each miss its cause, what differs, and what to do about it.

    Without KEY or NAME, all misses of the run. NAME is a part of a function's name.

    \b
    JSON: {"run": str, "misses": [{"module_name": str, "site": str, "shapes": str, "key": str,
           "outcome": "miss", "uncacheable" or "compiling", "cause": str,
           "meaning": str, "stored": str, "seconds": float, "nearest": str,
           "components": {NAME: {"here": [str], "there": [str]}}, "differences": [{"text": str, "advice": str}],
           "advice": str}]}
    """
    settings = config.load()
    with open_ledger(settings) as (reader, store):
        found = reader.run(run_wanted)
        run = found.run
        rows = [row for row in reader.rows(found) if _is_wanted(row, wanted)]
        explained = [_explained(store, row) for row in rows]
    if as_json:
        emit({"run": run.run, "misses": explained})
    else:
        _print(run, explained, wanted)


def _is_wanted(row: Row, wanted: str) -> bool:
    is_compiled = row.outcome in (ledger.MISS, ledger.UNCACHEABLE, ledger.COMPILING)
    return is_compiled and (not wanted or wanted in row.module_name or row.key.startswith(wanted))


def _explained(store: store_file.StoreReader | None, row: Row) -> dict[str, Any]:
    kinds = [part.partition(":")[0].strip() for part in row.cause.split(";")]
    if row.outcome == ledger.UNCACHEABLE:
        meaning = f"it cannot be cached: {row.cause}"
    else:
        meaning = "; ".join(filter(None, (ledger.CAUSES.get(kind, "") for kind in kinds))) or row.cause
    found: dict[str, Any] = row._asdict() | {"meaning": meaning, "components": {}, "differences": []}
    del found["spans"], found["position"]
    found["seconds"] = start_up.of_row(row)["seconds"]
    found["advice"] = " ".join(_ADVICE[kind] for kind in kinds if kind in _ADVICE)
    if row.nearest and row.outcome == ledger.MISS and store is None:
        found["advice"] = " ".join(filter(None, (found["advice"], "Only root can compare the entries of this store.")))
    elif row.nearest and row.outcome == ledger.MISS and store is not None:
        found["components"], found["differences"], missing = _compared(store, row)
        found["advice"] = " ".join(filter(None, (found["advice"], missing)))
    return found


def _compared(store: store_file.StoreReader, row: Row) -> tuple[dict[str, Any], list[dict[str, str]], str]:
    """Compare a row's entry with the nearest one: components, programs, and what cannot be compared."""
    try:
        here, there = store.entry(row.key), store.entry(row.nearest)
    except XcacheError:
        return {}, [], "One of the two entries is no longer in the store, so they cannot be compared."
    components = {}
    for name in protocol.DESCRIBED_COMPONENTS:
        digests = [entry[f"{name}_component"] for entry in (here, there)]
        if digests[0] != digests[1]:
            components[name] = _changed_lines(name, *(store.description(digest) or "" for digest in digests))
    if here["program"] == there["program"]:
        return components, [], ""
    try:
        from xcache.cli import program_diff

        programs = [program_diff.read(located_bytecode(store, store.program(entry["program"], entry["writer_uid"])))
                    for entry in (here, there)]  # fmt: skip
    except (ImportError, XcacheError, ValueError, StopIteration) as error:
        return components, [], f"The programs cannot be compared here: {error}"
    return components, [each._asdict() for each in program_diff.differences(*programs)], ""


def _changed_lines(name: str, here: str, there: str) -> dict[str, list[str]]:
    """Return the lines that only one of two descriptions has."""
    mine, theirs = here.split("\n"), there.split("\n")
    both = {
        "here": [line for line in mine if line not in set(theirs)],
        "there": [line for line in theirs if line not in set(mine)],
    }
    if name == "options":
        both = {side: [option_lines.named(line) for line in lines] for side, lines in both.items()}
    return both


def _print(run: Run, explained: list[dict[str, Any]], wanted: str) -> None:
    print_line(f"run {run.run[:8]} of {run.program}: {counted(len(explained), 'program')} compiled")
    if not explained and wanted:
        note(f"nothing that was compiled in this run is named or keyed {wanted!r}")
    for row in explained:
        click.echo()
        place = f", called at {short_site(row['site'])}" if row["site"] else ""
        click.secho(f"{row['module_name']}({row['shapes']})", bold=True, nl=False)
        print_line(f"{place}")
        print_line(f"  {row['meaning']}" + (f" (entry {row['nearest'][:_SHORT_KEY]})" if row["nearest"] else ""))
        for name, sides in row["components"].items():
            for side, sign in (("here", "+"), ("there", "-")):
                for line in sides[side][:_MOST_LINES]:
                    print_line(f"    {sign} {name}: {line}")
        for difference in row["differences"]:
            print_line(f"    {difference['text']}")
            if difference["advice"]:
                print_line(f"      {difference['advice']}")
        if row["advice"]:
            print_line(f"  {row['advice']}")
        if row["stored"].startswith("no"):
            print_line(f"  it was not stored: {row['stored'].removeprefix('no: ')}")
