"""``xcache service``: run the daemon as a systemd service, for a user or for the machine."""

from __future__ import annotations

import ast
import contextlib
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from xcache.cli import Group, account, daemon
from xcache.cli.output import emit, json_option, note, print_facts, print_line
from xcache.cli.units import ACCOUNT_HOME, NAMES, SERVICE, SOCKET, Scope, scope_of
from xcache.errors import ConfigError, StoreError, UnavailableError
from xcache.wire import protocol
from xcache.wire.bounded import text_of

_COMMAND_SECONDS = 120
# sd_booted(3) checks for this folder; a container may have systemctl without systemd.
_BOOTED = Path("/run/systemd/system")
_WITHOUT = (
    "to manage the daemon; none is needed: programs start the daemon themselves (root starts one for all users, by hand"
    " or in a container: docs/how-to/shared-machine.md)"
)
_SHOWN = ("LoadState", "ActiveState", "SubState", "UnitFileState", "MainPID", "NRestarts", "StatusText", "Result")
# The check runs the daemon as this uid, to see whether accounts without any rights can run it.
_NOBODY_UID = 65534


@click.group(cls=Group)
def service() -> None:
    """Have systemd manage the daemon: it listens, and starts the daemon when the first program connects.

    --user is for your own programs and needs no privileges; --system is one daemon for all users, and needs root. The
    default is --system for root, and --user for everybody else.
    """


def _scoped(command: Callable[..., None]) -> Callable[..., None]:
    usual = "system" if os.getuid() == 0 else "user"
    command = click.option("--user", "kind", flag_value="user", help="For your own programs.")(command)
    return click.option("--system", "kind", flag_value="system", default=usual, help="For all users; root's default.")(
        command
    )


@service.command()
@_scoped
@json_option
def install(kind: str, as_json: bool) -> None:
    """Write the units, enable them, and check that the daemon answers.

    Run it again after an upgrade, after moving the environment, or to check that all is well. The daemon runs from the
    installation that this command belongs to. With --system, it makes an account if there is none, and names it in
    /etc/xcache/config.toml.

    \b
    JSON: {"scope": str, "done": [str], "units": [str], "socket": str, "directory": str, "pid": int, "version": str}
    """
    scope = _ready_scope(kind, to_serve=True)
    done = Progress(quiet=as_json)
    manager_variables = _variables(scope.systemctl)
    for name in ("XCACHE_CONFIG", "XCACHE_DIR", "XCACHE_SOCKET"):
        if os.environ.get(name, manager_variables.get(name)) != manager_variables.get(name):
            note(f"{name} is set here, but the service knows nothing of it; put its settings into a file")
    _check_python(scope)
    if scope.is_for_all_users:
        account.prepare(scope.settings.daemon_user, ACCOUNT_HOME, done)
    account.prepare_store(scope.settings, done)
    changed = [unit for unit in NAMES if _write(scope, unit, done)]
    if changed:
        _systemctl(scope, "daemon-reload")
    if changed or not _listens(scope):
        _make_way(scope, done)
        _systemctl(scope, "stop", SERVICE, SOCKET)
        _systemctl(scope, "reset-failed", *NAMES, may_fail=True)
    if _show(scope, SOCKET)["UnitFileState"] != "enabled":
        _systemctl(scope, "enable", SOCKET)
        done(f"enabled {SOCKET}")
    if not _listens(scope):
        _systemctl(scope, "start", SOCKET)
        done(f"started {SOCKET}: systemd listens on {scope.settings.socket}")
    welcome = _replace_older(scope, done)
    if not scope.is_for_all_users and not _lingers():
        note("the service runs only while you are logged in; to keep it at other times: loginctl enable-linger")
    if not done.said:
        done("everything is as it should be")
    done(f"checked: process {welcome.pid}, xcache {welcome.version}, serves {welcome.directory}")
    if as_json:
        emit(
            {
                "scope": scope.name,
                "done": done.said,
                "units": [str(scope.path(unit)) for unit in NAMES],
                "socket": str(scope.settings.socket),
                "directory": str(scope.settings.dir),
                "pid": welcome.pid,
                "version": welcome.version,
            }
        )


@service.command()
@_scoped
@click.option("--purge", is_flag=True, help="Delete the store as well, and the account if it was made by install.")
@json_option
def uninstall(kind: str, purge: bool, as_json: bool) -> None:
    """Stop the daemon and remove what install made. The store stays unless --purge is given.

    \b
    JSON: {"scope": str, "done": [str]}
    """
    scope = _ready_scope(kind)
    done = Progress(quiet=as_json)
    ours = [unit for unit in NAMES if scope.is_ours(unit)]
    for unit in NAMES:
        if scope.path(unit).exists() and unit not in ours:
            note(f"{scope.path(unit)} was not written by xcache and stays")
    if SOCKET in ours:
        _systemctl(scope, "disable", "--now", SOCKET)
        done(f"disabled and stopped {SOCKET}")
    if SERVICE in ours:
        _systemctl(scope, "stop", SERVICE)
        done(f"stopped {SERVICE}")
    for unit in ours:
        scope.path(unit).unlink()
        done(f"removed {scope.path(unit)}")
    if ours:
        _systemctl(scope, "daemon-reload")
        _systemctl(scope, "reset-failed", *NAMES, may_fail=True)
    if purge and scope.settings.dir.is_dir():
        shutil.rmtree(scope.settings.dir)
        done(f"removed the store {scope.settings.dir}")
    _remove_empty(scope)
    if scope.is_for_all_users:
        account.take_back(scope.settings.daemon_user, keep=scope.settings.dir, done=done)
    if not done.said:
        done("nothing was installed")
    if scope.settings.dir.exists():
        done(f"kept the store {scope.settings.dir}; --purge removes it")
    if as_json:
        emit({"scope": scope.name, "done": done.said})


@service.command()
@_scoped
@json_option
def status(kind: str, as_json: bool) -> None:
    """Show whether the units are installed, enabled and active, and the daemon's own status line.

    \b
    JSON: {"scope": str, "installed": bool, "enabled": bool, "listening": bool, "running": bool, "pid": int or null,
           "restarts": int, "says": str, "socket": str, "directory": str, "units": [str]}

    Exit status 1 if the units are not installed or systemd does not listen.
    """
    scope = _ready_scope(kind)
    socket, running = _show(scope, SOCKET), _show(scope, SERVICE)
    pid = int(running["MainPID"] or 0)
    found: dict[str, Any] = {
        "scope": scope.name,
        "installed": all(scope.is_ours(unit) for unit in NAMES),
        "enabled": socket["UnitFileState"] == "enabled",
        "listening": _listens(scope),
        "running": running["ActiveState"] in ("active", "reloading"),
        "pid": pid or None,
        "restarts": int(running["NRestarts"] or 0),
        "says": running["StatusText"],
        "socket": str(scope.settings.socket),
        "directory": str(scope.settings.dir),
        "units": [str(scope.path(unit)) for unit in NAMES if scope.path(unit).exists()],
    }
    if as_json:
        emit(found)
    else:
        state = "installed" if found["installed"] else "not installed"
        gone = "" if found["listening"] or socket["ActiveState"] != "active" else "; its file is gone: install it again"
        print_facts(
            [
                ("service", f"{state}, {'' if found['enabled'] else 'not '}enabled ({scope.name})"),
                ("socket", f"{found['socket']}, {socket['ActiveState']} ({socket['SubState']}){gone}"),
                ("daemon", f"{running['ActiveState']} ({running['SubState']})" + (f", process {pid}" if pid else "")),
                ("restarts", str(found["restarts"])),
                ("says", found["says"] or "-"),
                ("store", found["directory"]),
            ]
        )
    if not (found["installed"] and found["listening"]):
        click.get_current_context().exit(1)


class Progress:
    """Prints each step that is done, and remembers it."""

    def __init__(self, *, quiet: bool) -> None:
        self.said: list[str] = []
        self._quiet = quiet

    def __call__(self, what: str) -> None:
        """Report one step."""
        self.said.append(what)
        if not self._quiet:
            print_line(what)


def _ready_scope(kind: str, *, to_serve: bool = False) -> Scope:
    """Return the scope; fail, before anything is changed, if no service manager can serve it."""
    if not shutil.which("systemctl"):
        raise UnavailableError(f"there is no systemctl here, and so no systemd {_WITHOUT}")
    if not _BOOTED.is_dir():
        raise UnavailableError(f"this machine has no systemd running {_WITHOUT}")
    if kind == "system" and os.getuid() != 0:
        raise ConfigError("--system is for root; --user is for everybody")
    return scope_of(kind, _variables, to_serve=to_serve)


def _variables(systemctl: tuple[str, ...]) -> dict[str, str]:
    """Return the variables that the service manager gives the processes it starts."""
    found = {}
    for line in _ask([*systemctl, "show-environment"]).splitlines():
        name, _, value = line.partition("=")
        # systemctl quotes unusual values as a shell does.
        found[name] = ast.literal_eval(value[1:]) if value.startswith("$'") else value
    return found


def _lingers() -> bool:
    """Return whether this user's service manager runs without a session; True if that is unknown."""
    with contextlib.suppress(KeyError, OSError):
        return Path("/var/lib/systemd/linger", pwd.getpwuid(os.getuid()).pw_name).exists()
    return True


def _write(scope: Scope, unit: str, done: Progress) -> bool:
    """Write a unit; return whether that changed it."""
    path, text = scope.path(unit), scope.filled(unit, sys.executable)
    if path.exists() and not scope.is_ours(unit):
        raise StoreError(f"{path} was not written by xcache; remove or rename it first")
    if path.exists() and text_of(path) == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, "utf-8")
    # Everybody may read units, whatever the umask.
    beside.chmod(0o644)
    beside.replace(path)
    done(f"wrote {path}")
    return True


def _check_python(scope: Scope) -> None:
    """Raise UnavailableError unless the daemon runs from here without the caller's environment and privileges."""
    user = _NOBODY_UID if scope.is_for_all_users else None
    # Python finds the packages of pip --user under HOME.
    home = "/" if scope.is_for_all_users else scope.homes.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    command = [sys.executable, "-P", "-m", "xcached", "--version"]
    try:
        result = subprocess.run(
            command,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            env={"PATH": os.defpath, "HOME": home},
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
        problem = result.stderr.strip().rpartition("\n")[2] if result.returncode else ""
    except OSError as error:
        problem = str(error)
    if problem:
        whom = "other accounts" if scope.is_for_all_users else "the service manager"
        raise UnavailableError(f"{whom} cannot run the daemon from here ({' '.join(command)}): {problem}")


def _make_way(scope: Scope, done: Progress) -> None:
    """Stop a daemon that a program started."""
    with contextlib.suppress(ConfigError):
        left = daemon.stop(scope.settings)
        if left is not None:
            done(f"process {left.pid}, which served {scope.settings.dir}, has ended")


def _replace_older(scope: Scope, done: Progress) -> Any:
    """Return the daemon's welcome, after replacing a daemon of another version."""
    from xcache._version import __version__

    if _show(scope, SERVICE)["ActiveState"] not in ("active", "inactive", "reloading"):
        # The service has failed to start, and the cause may have been mended since.
        _systemctl(scope, "stop", SERVICE)
        _systemctl(scope, "reset-failed", *NAMES, may_fail=True)
    welcome = _knock(scope)
    if welcome.version != __version__:
        _systemctl(scope, "stop", SERVICE)
        done(f"stopped process {welcome.pid}, which was xcache {welcome.version}")
        welcome = _knock(scope)
    if welcome.directory != protocol.path_text(scope.settings.dir):
        raise UnavailableError(f"the daemon serves {welcome.directory}, and programs look for {scope.settings.dir}")
    return welcome


def _knock(scope: Scope) -> Any:
    try:
        return daemon.await_activated(scope.settings)
    except UnavailableError as error:
        journal = "journalctl -u xcached" if scope.is_for_all_users else "journalctl --user -u xcached"
        raise UnavailableError(f"the daemon does not answer: {error}; for more: {journal}") from None


def _remove_empty(scope: Scope) -> None:
    """Remove folders that are empty now."""
    folders: list[Path] = [scope.settings.socket.parent, scope.folder / "sockets.target.wants"]
    if scope.is_for_all_users:
        folders.append(ACCOUNT_HOME)
    else:
        folders += [scope.folder, scope.folder.parent]
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _listens(scope: Scope) -> bool:
    """Return whether systemd listens and the socket still exists, which may have been removed."""
    return scope.settings.socket.is_socket() and _show(scope, SOCKET)["ActiveState"] == "active"


def _show(scope: Scope, unit: str) -> dict[str, str]:
    said = _systemctl(scope, "show", unit, f"--property={','.join(_SHOWN)}")
    found = dict(line.partition("=")[::2] for line in said.splitlines())
    return dict.fromkeys(_SHOWN, "") | found


def _systemctl(scope: Scope, *arguments: str, may_fail: bool = False) -> str:
    return _ask([*scope.systemctl, "--no-pager", "--no-ask-password", *arguments], may_fail=may_fail)


def _ask(command: list[str], *, may_fail: bool = False) -> str:
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        _fail(command, f"no answer within {_COMMAND_SECONDS} s")
    if result.returncode and not may_fail:
        _fail(command, result.stderr.strip() or f"exit status {result.returncode}")
    return result.stdout


def _fail(command: list[str], what: str) -> NoReturn:
    raise UnavailableError(f"{' '.join(command)}: {what}")
