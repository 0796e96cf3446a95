"""``xcache rewarm``: compile the programs of stale entries with another jaxlib, before anybody wants them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import click

from xcache._version import __version__
from xcache.cli import Failure, WrongUsage, daemon, daemon_listing, rewarm_plan, store_file
from xcache.cli.building import Tally, dask_option, progress, workers_option
from xcache.cli.completion import complete_key
from xcache.cli.output import counted, json_option, print_line
from xcache.cli.selection import chosen, filter_options, filtered
from xcache.client.client import Client
from xcache.client.launcher import Launcher
from xcache.config import config
from xcache.config.config import Config
from xcache.errors import WorkerError, XcacheError
from xcache.warming.building import Builder, Task, workers_of
from xcache.warming.place import Place
from xcache.warming.process import Worker, this_python

# Nobody waits for this command, so the daemon may take its time.
_PATIENCE_SECONDS = 60.0


@click.command()
@click.argument("prefixes", metavar="[KEY]...", nargs=-1, shell_complete=complete_key)
@click.option("--to", "python", metavar="PYTHON", help="Compile with the jaxlib of this Python. [default: this one]")
@filter_options
@workers_option
@dask_option
@json_option
def rewarm(
    prefixes: tuple[str, ...],
    python: str | None,
    workers: int | None,
    dask: str | None,
    as_json: bool,
    **filters: Any,
) -> None:
    """Compile the stored programs of other toolchains anew, so that programs hit after an upgrade of jax.

    Takes all entries that the toolchain of PYTHON has not made, or those that are chosen: by KEY, which may be
    shortened to four digits, or by all given options. The dearest to compile comes first, each in a process of its own.
    The same command goes on where an earlier one was ended. PYTHON needs jax and this version of xcache.

    An entry is built only under a key that is certain; for all others the command says why not. A program hits if the
    other jax lowers it to the same StableHLO, which nobody knows before it runs.

    \b
    JSON: {"jax": str, "chosen": int, "current": int (made by this toolchain), "built": int, "there": int,
           "compile_seconds": float (all builds together),
           "failed": [{"reason": str, "entries": [{"key": str, "module_name": str}]}],
           "left_out": [{"reason": str, "entries": [{"key": str, "module_name": str}]}]}
    """
    settings = config.load()
    if prefixes and any(value is not None for value in filters.values()):
        raise WrongUsage("a KEY and options that choose entries exclude each other")
    wanted = filtered(filters, sort="compile")
    keys = None if not prefixes else set(chosen(settings, prefixes))
    with daemon_listing.open_store_or_listing(settings, latest=True) as store:
        rows, _ = store.entries(wanted) if store else ([], 0)
        total = store.totals()["entries"] if store else 0
    rows = [row for row in rows if keys is None or row["key"] in keys]
    if not rows and not as_json:
        if total:
            print_line(f"none of {counted(total, 'entry')} match")
        else:
            daemon.say_empty(settings)
        return
    interpreter = python or this_python()
    tally = Tally(("current", "built", "there"), jax=_jax_of(interpreter), chosen=len({row["key"] for row in rows}))
    with contextlib.ExitStack() as stack:
        stack.enter_context(tally.shown(as_json))
        mine, others = rewarm_plan.readable(rows)
        tally.leave_out(others)
        with progress("reading", len(mine)) as advance:
            planned = rewarm_plan.plan(settings, mine, interpreter, advance)
        tally.current = planned.current
        tally.leave_out(planned.left_out)
        tasks = _missing(settings, planned.tasks, tally)
        patient = settings._replace(timeout=max(settings.timeout, _PATIENCE_SECONDS))
        launcher = Launcher(settings) if settings.autostart else None
        client = stack.enter_context(contextlib.closing(Client(patient, __version__, launcher)))
        builder = Builder(client, workers_of(interpreter, dask), workers, settings.max_wait)
        with progress("compiling", len(tasks)) as advance, contextlib.closing(builder.build(tasks)) as outcomes:
            for outcome in outcomes:
                tally.add(outcome)
                advance()
    if tally.failed:
        raise SystemExit(1)


def _missing(settings: Config, tasks: Sequence[Task], tally: Tally) -> list[Task]:
    """Return the tasks whose entry this user has not stored yet, as far as the store itself can be read."""
    there: set[str] = set()
    with contextlib.suppress(XcacheError), store_file.open_store(settings) as store:
        there = set() if store is None else store.own_keys([task.key for task in tasks])
    tally.there += len(there)
    return [task for task in tasks if task.key not in there]


def _jax_of(python: str) -> str:
    """Return the version of jax in a Python; raise Failure if it cannot be used."""
    try:
        with contextlib.closing(Worker(python, Place("cpu", 1, 1, (), ()))) as worker:
            return str(worker.versions["jax"])
    except WorkerError as error:
        raise Failure(f"the jaxlib of {python} cannot be used: {error}") from None
