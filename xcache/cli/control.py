"""``xcache start``, ``stop`` and ``restart``."""

from __future__ import annotations

from typing import Any

import click

from xcache.cli import daemon
from xcache.cli.output import emit, json_option, note, print_line
from xcache.config import config
from xcache.config.config import Config
from xcache.config.table import as_typed
from xcache.wire import protocol


@click.command()
@json_option
def start(as_json: bool) -> None:
    """Start the daemon, unless it runs already.

    Programs start it by themselves; this has it ready beforehand, or shows why it does not start.

    \b
    JSON: {"started": bool, "pid": int, "version": str, "socket": str, "directory": str}
    """
    settings = config.load()
    connection, started = daemon.connect_or_start(settings)
    connection.close()
    if as_json:
        emit({"started": started, **_identity(settings, connection.welcome)})
    elif started:
        print_line(f"started: process {connection.welcome.pid} serves {settings.dir}")
    else:
        print_line(f"already running: process {connection.welcome.pid} serves {settings.dir}")


@click.command()
@json_option
def stop(as_json: bool) -> None:
    """Stop the daemon, and wait until it has ended.

    It first finishes its writes. The next program that needs a daemon starts one, or makes systemd start it.

    \b
    JSON: {"stopped": bool, "pid": int or null}
    """
    # A wrong setting may be the very reason to stop the daemon.
    settings, problems = config.load_usable()
    for problem in problems:
        note(problem)
    left = daemon.stop(settings)
    if as_json:
        emit({"stopped": left is not None, "pid": left.pid if left else None})
    else:
        print_line(f"stopped: process {left.pid} has ended" if left else daemon.none_ran_message(settings, problems))
    if problems and left is None:
        click.get_current_context().exit(1)


@click.command()
@json_option
def restart(as_json: bool) -> None:
    """Stop the daemon, if one runs, and start a fresh one.

    A running daemon follows changes of its settings files, but keeps the environment, store and socket it was started
    with; a restart gives it new ones. A setting that is to stay, such as max_size, belongs into a file:
    ~/.config/xcache/config.toml, or the one that XCACHE_CONFIG names. A machine's daemon that was started by hand is
    left alone, because only its own account could start it again.

    \b
    JSON: {"stopped_pid": int or null, "pid": int, "version": str, "socket": str, "directory": str,
           "changed": {SETTING: [str, str]} (what the daemon before had, and what this one has)}
    """
    settings = config.load()
    left = daemon.stop(settings, comes_back=True)
    connection, _ = daemon.connect_or_start(settings)
    connection.close()
    before, now = (left and left.settings) or {}, connection.welcome.settings or {}
    changed = {name: [before[name], value] for name, value in now.items() if before.get(name, value) != value}
    if as_json:
        emit({"stopped_pid": left.pid if left else None, **_identity(settings, connection.welcome), "changed": changed})
    else:
        said = f"restarted: process {left.pid} has ended, " if left else "started: "
        print_line(f"{said}process {connection.welcome.pid} serves {settings.dir}")
    for name, (old, new) in changed.items():
        was, is_now = as_typed(name, old), as_typed(name, new)
        note(f"{name} was {was!r}, and is {is_now!r} now ({settings.sources[name]}); {settings.kept_in} keeps a value")


def _identity(settings: Config, welcome: protocol.Welcome) -> dict[str, Any]:
    return {
        "pid": welcome.pid,
        "version": welcome.version,
        "socket": str(settings.socket),
        "directory": str(settings.dir),
    }
