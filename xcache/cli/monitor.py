"""``xcache monitor``: what connected programs do, as it happens."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from xcache.cli import store_file
from xcache.cli.following import Told, follow
from xcache.cli.output import counted, print_line, print_text, printable, size
from xcache.config import config
from xcache.errors import ClosedStoreError
from xcache.wire import commands

_PIPE_WIDTH = 120
_MOST_REMEMBERED = 10_000
_FACTS = (
    *("pid", "version", "uptime_seconds", "entries", "bytes", "max_size", "max_entries"),
    *("seconds", "hits", "misses", "left_out", "connected", "compiling", "waiting"),
    *("other_connected", "other_compiling", "other_waiting"),
)


@click.command()
@click.option("--once", is_flag=True, help="Show this moment, and leave.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print a line of JSON, of the shape shown above, for each notice."
)
def monitor(once: bool, as_json: bool) -> None:
    """Show what the programs do that use the cache, and their hits and misses, as it happens.

    On a terminal it is a picture that is drawn again and again; q and Ctrl-C leave. In a pipe, and on a terminal that
    can only append (TERM=dumb), it prints a line for each event. The daemon tells twice a second what it sees. Users
    of a machine's daemon see their own programs, and how many others there are; root and the daemon's account see all.
    If the daemon leaves, the command says so and waits for the next one.

    \b
    JSON, in one line: {"at": float, "running": bool, "problem": str or null (why not), "pid": int, "version": str,
           "uptime_seconds": float, "entries": int, "bytes": int, "max_size": int, "max_entries": int,
           "seconds": float (since the last line), "hits": int, "misses": int (since then),
           "left_out": int (of missed, for lack of room), "connected": int, "compiling": int, "waiting": int,
           "other_connected": int (of other users), "other_compiling": int, "other_waiting": int,
           "programs": [{"pid": int, "uid": int, "program": str, "seconds": float, "connections": int,
           "hits": int, "misses": int}],
           "doing": [{"pid": int, "uid": int, "program": str, "kind": "compiling", "waiting" or "loading",
           "key": str, "module_name": str, "seconds": float, "waiting": int (for a compile),
           "of_pid": int (for whose compile), "ahead": bool (of a load)}],
           "missed": [{"pid": int, "uid": int, "program": str, "run": str, "position": int, "module_name": str,
           "site": str, "shapes": str, "key": str, "outcome": "miss" or "uncacheable", "cause": str, "stored": str,
           "nearest": str, "spans": str}] (a row comes again when it has changed)}

    Without a daemon the counts are null.
    """
    settings = config.load()
    with contextlib.suppress(ClosedStoreError):
        # Where a file is in the place of the store, no daemon will ever run.
        store_file.is_there(settings)
    if as_json:
        tell = _print_json
    elif once:
        tell = _print_once
    elif _is_live():
        from xcache.cli.monitor_screen import show

        click.get_current_context().exit(show(settings))
    else:
        tell = _Lines().tell
    # Ctrl-C is the way to leave.
    with contextlib.suppress(KeyboardInterrupt):
        follow(settings, tell, once=once)


def _is_live() -> bool:
    """Return whether stdout is a terminal on which a picture can be drawn again and again."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return is_terminal and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


def _print_json(told: Told) -> None:
    document: dict[str, Any] = {"at": time.time(), "running": not isinstance(told, str), "problem": None}
    if isinstance(told, str):
        document |= {"problem": told} | dict.fromkeys(_FACTS) | {"programs": [], "doing": [], "missed": []}
    else:
        document |= told.facts | {"programs": told.programs, "doing": told.doing, "missed": told.missed}
    print_text(json.dumps(document))


def _print_once(told: Told) -> None:
    from xcache.cli.monitor_view import View

    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    view = View(ascii_only=not encoding.lower().startswith("utf"), one_moment=True)
    view.take(told)
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    for line in view.lines(shutil.get_terminal_size().columns if is_terminal else _PIPE_WIDTH, 10_000):
        print_line(line.plain.rstrip())


class _Lines:
    """Prints a line for each event, by comparing each notice with the one before."""

    def __init__(self) -> None:
        self._problem = ""
        self._last: commands.Seen | None = None
        # By run and position, because a row comes again when it has changed; the oldest are forgotten.
        self._missed: dict[tuple[Any, Any], None] = {}

    def tell(self, told: Told) -> None:
        """Print what is new."""
        if isinstance(told, str):
            if told != self._problem:
                self._print(told)
            self._problem, self._last = told, None
            return
        for line in self._events(told):
            self._print(line)
        self._problem, self._last = "", told

    def _print(self, line: str) -> None:
        print_line(f"{time.strftime('%H:%M:%S')}  {line}")

    def _events(self, told: commands.Seen) -> Iterator[str]:
        facts: dict[str, Any] = told.facts
        if self._last is None:
            yield f"the daemon (process {facts['pid']}) {_held(facts)}"
        before, now = _by_process(self._last), _by_process(told)
        for pid in now.keys() - before.keys():
            yield f"{_name(now[pid])}: connected"
        old = {_activity(row) for row in self._last.doing} if self._last is not None else set()
        for row in told.doing:
            if _activity(row) not in old:
                yield f"{_name(row)}: {_doing(row)}"
        for row in told.missed:
            if (number := (row["run"], row["position"])) not in self._missed:
                self._missed[number] = None
                if len(self._missed) > _MOST_REMEMBERED:
                    del self._missed[next(iter(self._missed))]
                yield f"{_name(row)}: {row['outcome']} of {printable(str(row['module_name']))} ({row['cause']})"
        if facts["left_out"]:
            yield f"{facts['left_out']} more compiled programs are left out: too many at once"
        for pid, row in now.items():
            hits, misses = (row[each] - before.get(pid, row)[each] for each in ("hits", "misses"))
            if hits > 0 or misses > 0:
                yield f"{_name(row)}: hits +{hits}, misses +{misses}"
        for pid in before.keys() - now.keys():
            yield f"{_name(before[pid])}: left"


def _by_process(seen: commands.Seen | None) -> dict[Any, dict[str, Any]]:
    return {row["pid"]: row for row in seen.programs} if seen is not None else {}


def _held(facts: dict[str, Any]) -> str:
    if facts["entries"] is None:
        return "cannot read its store"
    most = f" of {size(facts['max_size'])}" if facts["max_size"] else ""
    return f"holds {counted(facts['entries'], 'entry')}, {size(facts['bytes'])}{most}"


def _activity(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["pid"], row["kind"], row["key"]


def _name(row: dict[str, Any]) -> str:
    return printable(f"{row['program']} ({row['pid']})")


def _doing(row: dict[str, Any]) -> str:
    name = printable(str(row["module_name"])) or str(row["key"])[:12]
    if row["kind"] == "waiting":
        return f"waiting for {name} of process {row['of_pid']}"
    return f"loading ahead {name}" if row.get("ahead") else f"{row['kind']} {name}"
