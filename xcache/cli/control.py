"""Start, stop and restart: the daemon's life."""

from __future__ import annotations

from typing import Any

import click

from xcache import config, protocol
from xcache.cli import talking
from xcache.cli.output import emit, json_option
from xcache.config import Config


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

    It finishes what it is writing. The next program that needs a daemon starts one; where systemd listens for it, the
    next program that asks does.

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

    It follows the files of settings by itself. Variables, and where its store and its socket are, are those it was
    started with; this is how it gets new ones.

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


def _identity(settings: Config, welcome: protocol.Welcome) -> dict[str, Any]:
    return {
        "pid": welcome.pid,
        "version": welcome.version,
        "socket": str(settings.socket),
        "directory": str(settings.dir),
    }
