"""Start, stop, restart and status: the daemon's life."""

from __future__ import annotations

import contextlib
from typing import Any

import click

from xcache import config, protocol
from xcache.cli import reading, talking
from xcache.cli.output import counted, duration, emit, json_option, note, print_facts, size
from xcache.config import Config
from xcache.connection import Connection
from xcache.errors import UnavailableError


@click.command()
@json_option
def start(as_json: bool) -> None:
    """Start the daemon, unless it runs already.

    Programs start it by themselves; this is for having it ready, or for seeing why it does not start.

    \b
    JSON: {"started": bool, "pid": int, "version": str, "socket": str, "directory": str}
    """
    settings = config.load()
    connection, started = talking.reach(settings)
    connection.close()
    if as_json:
        emit({"started": started, **_identity(settings, connection.welcome)})
    elif started:
        click.echo(f"started: process {connection.welcome.pid} serves {settings.dir}")
    else:
        click.echo(f"already running: process {connection.welcome.pid} serves {settings.dir}")


@click.command()
@json_option
def stop(as_json: bool) -> None:
    """Stop the daemon, and wait until it has left.

    It finishes what it is writing. The next program that needs a daemon starts one.

    \b
    JSON: {"stopped": bool, "pid": int or null}
    """
    left = talking.leave(config.load())
    if as_json:
        emit({"stopped": left is not None, "pid": left.pid if left else None})
    else:
        click.echo(f"stopped: process {left.pid} has left" if left else "no daemon was running")


@click.command()
@json_option
def restart(as_json: bool) -> None:
    """Stop the daemon, if one runs, and start a fresh one.

    A daemon keeps the settings that it was started with; this is how it gets new ones.

    \b
    JSON: {"stopped_pid": int or null, "pid": int, "version": str, "socket": str, "directory": str}
    """
    settings = config.load()
    left = talking.leave(settings)
    connection, _ = talking.reach(settings)
    connection.close()
    if as_json:
        emit({"stopped_pid": left.pid if left else None, **_identity(settings, connection.welcome)})
    else:
        before = f"process {left.pid} has left, " if left else ""
        click.echo(f"restarted: {before}process {connection.welcome.pid} serves {settings.dir}")


@click.command()
@json_option
def status(as_json: bool) -> None:
    """Is the daemon running, and how full is the store?

    Connections are those of others. The limit is the daemon's while one runs, else that of the settings.

    \b
    JSON: {"running": bool, "problem": str or null, "pid": int or null, "version": str or null,
           "uptime_seconds": float or null, "connections": int or null, "socket": str, "directory": str,
           "entries": int, "bytes": int, "max_size": int (0: no limit)}

    Exit status 1 when a daemon is there and does not answer.
    """
    settings = config.load()
    facts: dict[str, Any] = {}
    problem = None
    try:
        connection = talking.find(settings)
        if connection is not None:
            facts = _ask(connection, settings.timeout)
    except UnavailableError as error:
        problem = str(error)
    with reading.reading(settings.dir) as store:
        totals = store.totals() if store else {}
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
        "entries": totals.get("entries", 0),
        "bytes": totals.get("bytes", 0),
        "max_size": facts.get("max_size", settings.max_size),
    }
    if as_json:
        emit(found)
    else:
        _print_status(found)
    if problem:
        note(problem)
        click.get_current_context().exit(1)


def _ask(connection: Connection, timeout: float) -> dict[str, Any]:
    with contextlib.closing(connection):
        return connection.demand(protocol.AskStatus(), protocol.Status, timeout).facts


def _identity(settings: Config, welcome: protocol.Welcome) -> dict[str, Any]:
    return {
        "pid": welcome.pid,
        "version": welcome.version,
        "socket": str(settings.socket),
        "directory": str(settings.dir),
    }


def _print_status(found: dict[str, Any]) -> None:
    if found["running"]:
        daemon = f"running, xcache {found['version']}, process {found['pid']}"
    else:
        daemon = "does not answer" if found["problem"] else "not running"
    rows = [("daemon", daemon)]
    if found["running"]:
        rows += [("up for", duration(found["uptime_seconds"])), ("connections", str(found["connections"]))]
    limit = found["max_size"]
    full = f" of {size(limit)} ({found['bytes'] / limit:.0%})" if limit else ", no limit"
    rows += [
        ("socket", found["socket"]),
        ("store", found["directory"]),
        ("holds", f"{counted(found['entries'], 'entry')}, {size(found['bytes'])}{full}"),
    ]
    print_facts(rows)
