"""The units of systemd as they are to be: templates that ship with xcache, filled in for this installation."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import xcache
from xcache import config
from xcache.config import Config
from xcache.errors import ConfigError

NAMES = ("xcached.socket", "xcached.service")
SOCKET, SERVICE = NAMES
ACCOUNT = "xcache"
# Home of the machine's account, and where its own settings would be.
ACCOUNT_HOME = Path("/var/lib/xcache")
_OURS = "XCACHE_"
# By this line a file is known to be ours; every template has it.
_MARK = "xcache service install"


class Scope(NamedTuple):
    """For whom there is a service, and what it is made of."""

    name: str
    folder: Path
    systemctl: tuple[str, ...]
    settings: Config
    socket: str
    homes: Mapping[str, str]
    """Variables that the service manager has otherwise than the user's programs."""

    @property
    def is_machines(self) -> bool:
        """Whether it is the one for all users."""
        return self.name == "system"

    def path(self, unit: str) -> Path:
        """Where a unit is written."""
        return self.folder / unit

    def is_ours(self, unit: str) -> bool:
        """Whether what stands there was written here."""
        try:
            return _MARK in self.path(unit).read_text("utf-8", "replace")
        except OSError:
            return False

    def filled(self, unit: str, python: str) -> str:
        """A unit's text for an interpreter that has xcache."""
        if any(character in "\"'\\" or not character.isprintable() for character in python):
            raise ConfigError(f"systemd runs no program of such a name: {python!r}; install xcache elsewhere")
        # A line of a unit ends with its line, and goes on after a backslash.
        for path in (self.settings.dir, self.settings.socket, *self.homes.values()):
            if not str(path).isprintable() or str(path) != str(path).strip() or str(path).endswith("\\"):
                raise ConfigError(f"systemd cannot be told of such a name: {str(path)!r}")
        text = (_templates() / self.name / unit).read_text("utf-8")
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
    """The user's or the machine's, by the settings that a service finds: those of files.

    ``variables`` are those of the service manager that such a command talks to. A user's own is ``to_serve`` only where
    the machine has none.
    """
    if kind == "system":
        systemctl: tuple[str, ...] = ("systemctl",)
        environ = {"HOME": str(ACCOUNT_HOME)} | _ours(variables(systemctl))
        settings = config.load(environ, daemon_user=config.load(environ).daemon_user or ACCOUNT)
        socket = without_specifiers(str(settings.socket))
        return Scope(kind, Path("/etc/systemd/system"), systemctl, settings, socket, {})
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if not runtime.startswith("/"):
        raise ConfigError("XDG_RUNTIME_DIR is not set: there is no service manager of this user here; log in properly")
    systemctl = ("systemctl", "--user")
    managers = variables(systemctl)
    # What the service manager does not know of must not be what the units are made for.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)} | _ours(managers)
    settings = config.load(environ)
    if settings.daemon_user and not to_serve:
        # It was installed before the machine had one.
        settings = config.load(environ, daemon_user="", dir=settings.own_dir)
    if settings.daemon_user:
        raise ConfigError(
            f"this machine has one daemon for all users (daemon_user={settings.daemon_user!r},"
            f" {settings.sources['daemon_user']}); a user's own would serve nobody"
        )
    # By its name, so that the unit holds for every session.
    usual = settings.socket == Path(runtime) / "xcache" / "xcached.sock"
    socket = "%t/xcache/xcached.sock" if usual else without_specifiers(str(settings.socket))
    # What a shell says of these does not reach the manager, nor what it starts.
    theirs = _homes(managers)
    homes = {name: path for name, path in _homes(environ).items() if path != theirs[name]}
    return Scope(kind, Path(theirs["XDG_CONFIG_HOME"], "systemd", "user"), systemctl, settings, socket, homes)


def _ours(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings among variables."""
    return {name: value for name, value in environ.items() if name.startswith(_OURS)}


def _homes(environ: Mapping[str, str]) -> dict[str, str]:
    """Where somebody with these variables looks for a user's files."""
    home = environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    found = {"HOME": home}
    for name, usual in (("XDG_CACHE_HOME", ".cache"), ("XDG_CONFIG_HOME", ".config")):
        named = environ.get(name, "")
        found[name] = named if named.startswith("/") else f"{home}/{usual}"
    return found


def without_specifiers(text: str) -> str:
    """Text in which systemd shall see no specifier."""
    return text.replace("%", "%%")


def escaped(text: str) -> str:
    """What stands between quotes in a unit."""
    return without_specifiers(text).replace("\\", "\\\\").replace('"', '\\"')


def _templates() -> Path:
    package = Path(xcache.__file__).parent
    installed = package / "systemd"
    # In a checkout they are where one looks for them.
    return installed if installed.is_dir() else package.parent / "daemon" / "systemd"
