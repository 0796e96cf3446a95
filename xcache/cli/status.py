"""``xcache status``: how the daemon and the store are."""

from __future__ import annotations

import contextlib
from typing import Any

import click

from xcache import config, protocol
from xcache.cli import reading, talking
from xcache.cli.output import counted, duration, emit, json_option, note, print_facts, print_line, printable, size
from xcache.cli.settings import length
from xcache.config import Config
from xcache.connection import Connection
from xcache.errors import ClosedStoreError, UnavailableError


@click.command()
@json_option
def status(as_json: bool) -> None:
    """Is the daemon running, what is being compiled, and how full is the store?

    Connections are those of others. The limits are the daemon's while one runs, else those of the settings. What was
    set aside is listed by ls --quarantined.

    \b
    JSON: {"running": bool, "problem": str or null, "pid": int or null, "version": str or null,
           "uptime_seconds": float or null, "connections": int or null, "socket": str, "directory": str,
           "entries": int, "bytes": int, "max_size": int (0: no limit), "max_entries": int (0: no limit),
           "max_age": float (0: no limit), "quarantined": int or null,
           "free": int or null (bytes on the disk, where some are to stay free),
           "to_stay_free": int or null (bytes, by min_free; 0: none; null: it is the daemon who knows),
           "damaged_databases": [str],
           "configuration_problem": str or null (why the daemon goes on with the settings it had),
           "compiles": [{"key": str, "module_name": str, "pid": int, "program": str, "seconds": float,
                         "waiting": int}]}

    Exit status 1 when a daemon is there and does not answer.
    """
    settings = config.load()
    facts: dict[str, Any] = {}
    compiles: list[dict[str, Any]] = []
    problem = None
    try:
        connection = talking.find(settings)
        if connection is not None:
            facts, compiles = _ask(connection, settings.timeout)
    except UnavailableError as error:
        problem = str(error)
    held = _held(settings, facts)
    found = {
        "running": bool(facts),
        "problem": problem,
        "pid": facts.get("pid"),
        "version": facts.get("version"),
        "uptime_seconds": facts.get("uptime_seconds"),
        # One of them is this command's.
        "connections": facts["connections"] - 1 if facts else None,
        "socket": str(settings.socket),
        "directory": str(settings.dir),
        **held,
        **{limit: facts.get(limit, getattr(settings, limit)) for limit in ("max_size", "max_entries", "max_age")},
        "free": facts.get("free") if facts.get("to_stay_free") else None,
        "to_stay_free": facts.get("to_stay_free"),
        "damaged_databases": _damaged(settings),
        "configuration_problem": facts.get("configuration_problem") or None,
        "compiles": compiles,
    }
    if as_json:
        emit(found)
    else:
        _print(found)
    for path in found["damaged_databases"]:
        note(f"a damaged database was set aside and a fresh one begun; look into it or delete it: {path}")
    if found["configuration_problem"]:
        note(f"the daemon goes on with the settings it had: {found['configuration_problem']}")
    if problem:
        note(problem)
        click.get_current_context().exit(1)


def _ask(connection: Connection, timeout: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with contextlib.closing(connection):
        said = connection.demand(protocol.AskStatus(), protocol.Status, timeout)
    return said.facts, said.compiles


def _held(settings: Config, facts: dict[str, Any]) -> dict[str, Any]:
    """How much there is, from the store itself, or else from the daemon who alone may look into it."""
    try:
        with reading.reading(settings) as store:
            totals = store.totals() if store else {}
            quarantined = len(store.quarantined()) if store else 0
    except ClosedStoreError:
        if not facts:
            raise
        totals, quarantined = facts, None
    return {"entries": totals.get("entries", 0), "bytes": totals.get("bytes", 0), "quarantined": quarantined}


def _damaged(settings: Config) -> list[str]:
    with contextlib.suppress(OSError):
        found = settings.dir.glob(f"{protocol.DATABASE}.damaged-*")
        return sorted(str(path) for path in found if not path.name.endswith(("-wal", "-shm")))
    return []


def _held_of(found: dict[str, Any]) -> str:
    """How much there is, and how much there may be."""
    entries, limit = counted(found["entries"], "entry"), found["max_size"]
    if most := found["max_entries"]:
        entries += f" of {most} ({found['entries'] / most:.0%})"
    full = f" of {size(limit)} ({found['bytes'] / limit:.0%})" if limit else "" if most else ", no limit"
    return f"{entries}, {size(found['bytes'])}{full}"


def _print(found: dict[str, Any]) -> None:
    if found["running"]:
        daemon = f"running, xcache {found['version']}, process {found['pid']}"
    else:
        daemon = "does not answer" if found["problem"] else "not running"
    rows = [("daemon", daemon)]
    if found["running"]:
        rows += [("up for", duration(found["uptime_seconds"])), ("connections", str(found["connections"]))]
    rows += [("socket", found["socket"]), ("store", found["directory"]), ("holds", _held_of(found))]
    if found["max_age"]:
        rows.append(("keeps", f"what was used within {length(found['max_age'])}"))
    if found["to_stay_free"] and found["free"] < found["to_stay_free"]:
        lacking = f"{size(found['free'])} free, and {size(found['to_stay_free'])} are to stay free (min_free)"
        rows.append(("disk", f"{lacking}: entries go, and nothing is stored"))
    if found["quarantined"]:
        rows.append(("set aside", f"{counted(found['quarantined'], 'entry')} (xcache ls --quarantined)"))
    print_facts(rows)
    if found["compiles"]:
        click.echo()
        click.secho("being compiled", bold=True)
    for compiling in found["compiles"]:
        who = printable(f"{compiling['module_name']} by process {compiling['pid']} ({compiling['program']})")
        waiting = f", {compiling['waiting']} waiting" if compiling["waiting"] else ""
        print_line(f"  {compiling['key'][:12]}  {who} for {duration(compiling['seconds'])}{waiting}")
