"""The systemd units: templates that ship with xcache, filled in for this installation."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import xcache
from xcache.config import config
from xcache.config.config import Config
from xcache.errors import ConfigError
from xcache.wire.bounded import text_of

NAMES = ("xcached.socket", "xcached.service")
SOCKET, SERVICE = NAMES
ACCOUNT = "xcache"
# Home of the machine's account; its own settings would be there.
ACCOUNT_HOME = Path("/var/lib/xcache")
_PREFIX = "XCACHE_"
# Every template holds this text, which marks a unit as written by xcache.
_MARK = "xcache service install"


class Scope(NamedTuple):
    """A service for one user or for the machine: its folder, its systemctl and its settings."""

    name: str
    folder: Path
    systemctl: tuple[str, ...]
    settings: Config
    socket: str
    homes: Mapping[str, str]
    """Variables whose values in the service manager differ from those of the user's programs."""

    @property
    def is_for_all_users(self) -> bool:
        """Whether it is the service for all users."""
        return self.name == "system"

    def path(self, unit: str) -> Path:
        """Return the path of a unit."""
        return self.folder / unit

    def is_ours(self, unit: str) -> bool:
        """Return whether xcache wrote the unit that exists there."""
        try:
            return _MARK in text_of(self.path(unit), errors="replace")
        except OSError:
            return False

    def filled(self, unit: str, python: str) -> str:
        """Return a unit's text, with ``python`` as the interpreter."""
        if any(character in "\"'\\" or not character.isprintable() for character in python):
            raise ConfigError(f"systemd cannot run a program of this name: {python!r}; install xcache elsewhere")
        # A line break would end the value, and a backslash at the end would continue it.
        for path in (self.settings.dir, self.settings.socket, *self.homes.values()):
            if not str(path).isprintable() or str(path) != str(path).strip() or str(path).endswith("\\"):
                raise ConfigError(f"a systemd unit cannot hold this path: {str(path)!r}")
        text = text_of(_templates() / self.name / unit)
        values = {
            "SOCKET": self.socket,
            "PYTHON": without_specifiers(python),
            "DIRECTORY": escaped(str(self.settings.dir)),
            "ACCOUNT": self.settings.daemon_user,
            "HOMES": " ".join(f'"{name}={escaped(path)}"' for name, path in self.homes.items()),
        }
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        return text


def scope_of(kind: str, variables: Callable[[tuple[str, ...]], Mapping[str, str]], *, to_serve: bool = True) -> Scope:
    """Return the scope of the user's or the machine's service, with the settings that the service itself will find.

    ``variables`` returns the environment of the service manager behind a systemctl command. With ``to_serve``, raise
    ConfigError for a user's service on a machine that has one for all users.
    """
    if kind == "system":
        systemctl: tuple[str, ...] = ("systemctl",)
        environ = {"HOME": str(ACCOUNT_HOME)} | _ours(variables(systemctl))
        settings = config.load(environ, daemon_user=config.load(environ).daemon_user or ACCOUNT)
        socket = without_specifiers(str(settings.socket))
        return Scope(kind, Path("/etc/systemd/system"), systemctl, settings, socket, {})
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if not runtime.startswith("/"):
        raise ConfigError(
            "XDG_RUNTIME_DIR is not set, so this user has no service manager here; log in as this user first"
        )
    systemctl = ("systemctl", "--user")
    manager_variables = variables(systemctl)
    # The service gets the manager's settings, not those of this command's environment.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIX)} | _ours(
        manager_variables
    )
    settings = config.load(environ)
    if settings.daemon_user and not to_serve:
        # The user's service was installed before the machine had one for all.
        settings = config.load(environ, daemon_user="", dir=settings.own_dir)
    if settings.daemon_user:
        raise ConfigError(
            f"this machine has one daemon for all users (daemon_user={settings.daemon_user!r},"
            f" {settings.sources['daemon_user']}); a user's own daemon would serve nobody"
        )
    # %t is the runtime folder of each session, so the unit holds for every session.
    usual = settings.socket == Path(runtime) / "xcache" / "xcached.sock"
    socket = "%t/xcache/xcached.sock" if usual else without_specifiers(str(settings.socket))
    # Values set in a shell reach neither the manager nor the services it starts.
    theirs = _homes(manager_variables)
    homes = {name: path for name, path in _homes(environ).items() if path != theirs[name]}
    return Scope(kind, Path(theirs["XDG_CONFIG_HOME"], "systemd", "user"), systemctl, settings, socket, homes)


def _ours(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are settings of xcache."""
    return {name: value for name, value in environ.items() if name.startswith(_PREFIX)}


def _homes(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the home, cache and configuration folders that these variables name."""
    home = environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    found = {"HOME": home}
    for name, usual in (("XDG_CACHE_HOME", ".cache"), ("XDG_CONFIG_HOME", ".config")):
        named = environ.get(name, "")
        found[name] = named if named.startswith("/") else f"{home}/{usual}"
    return found


def without_specifiers(text: str) -> str:
    """Escape a text so that systemd finds no specifier in it."""
    return text.replace("%", "%%")


def escaped(text: str) -> str:
    """Escape a text for quotes in a unit."""
    return without_specifiers(text).replace("\\", "\\\\").replace('"', '\\"')


def _templates() -> Path:
    package = Path(xcache.__file__).parent
    installed = package / "systemd"
    # A checkout has them in the daemon's folder.
    return installed if installed.is_dir() else package.parent / "daemon" / "systemd"
