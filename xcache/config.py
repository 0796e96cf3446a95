"""What the settings are set to, and where.

Environment over ``$XCACHE_CONFIG`` over the user's file over ``/etc`` over the default. Mode alone (``XCACHE``) is
taken from the environment only, so that a process without it need not look at any file.
"""

import decimal
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from xcache.errors import ConfigError
from xcache.settings import FIXED, MAX_SOCKET_PATH, SETTINGS, TYPES, Setting

SYSTEM_FILE = Path("/etc/xcache/config.toml")
# Where the one daemon for all users is found, unless the settings say otherwise.
MACHINE_DIRECTORY = Path("/var/cache/xcache")
MACHINE_SOCKET = Path("/run/xcache/xcached.sock")
_MODES = {"1": "on", "on": "on", "0": "off", "off": "off", "": "off", "readonly": "readonly", "refresh": "refresh"}


class Config(NamedTuple):
    """The settings a process runs with, and where each came from."""

    dir: Path
    socket: Path
    max_size: int
    max_entries: int
    max_age: float
    min_free: str
    log: str
    autostart: bool
    timeout: float
    prefetch: int
    idle_exit: float
    stale_grace: float
    max_wait: float
    max_connections: int
    max_requests: int
    max_frame: int
    max_payload: int
    max_descriptors: int
    silence: float
    daemon_user: str
    trusted_writers: tuple[str, ...]
    trace: Path | None
    user_quota: int
    # Where this user keeps what is no business of the daemon's.
    own_dir: Path
    sources: Mapping[str, str]
    # The file that XCACHE_CONFIG names.
    named: Path | None

    def as_environment(self) -> dict[str, str]:
        """The variables that give a daemon these settings; it reads the same files, and follows them as they change."""
        given = {"environment", "code", None}
        return {"XCACHE_CONFIG": str(self.named or "")} | {
            setting.variable: _as_text(getattr(self, setting.name))
            for setting in SETTINGS
            # Which daemon it is stays as it was when it was started.
            if setting.name in FIXED or self.sources.get(setting.name) in given
        }


def mode(environ: Mapping[str, str] | None = None) -> str:
    """What ``XCACHE`` asks for: on, off, readonly or refresh."""
    text = (os.environ if environ is None else environ).get("XCACHE", "")
    try:
        return _MODES[text.strip().lower()]
    except KeyError:
        raise ConfigError(
            f"XCACHE={text!r} (environment) is not understood; use 1, on, 0, off, readonly or refresh"
        ) from None


def load(environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
    """Read and check every setting once; ``overrides`` (from code) win over everything."""
    environ = os.environ if environ is None else environ
    known = {setting.name: setting for setting in SETTINGS}
    for name in overrides:
        if name not in known:
            raise ConfigError(f"{name!r} is not a setting; there are {', '.join(known)}")
    content_of = [(path, _read_file(path, known)) for path in _files(environ)]
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, setting in known.items():
        value, source = setting.default, "default"
        if name in overrides:
            value, source = _check(setting, overrides[name], "code"), "code"
        elif setting.variable in environ:
            value, source = _check(setting, environ[setting.variable], "environment"), "environment"
        else:
            for path, content in content_of:
                if name in content:
                    value, source = _check(setting, content[name], str(path)), str(path)
                    break
        found[name], sources[name] = value, source
    own = _xdg(environ, "XDG_CACHE_HOME", ".cache") / "xcache"
    machine = found["daemon_user"]
    if found["dir"] is None:
        found["dir"] = MACHINE_DIRECTORY if machine else own
    if found["socket"] is None:
        found["socket"] = MACHINE_SOCKET if machine else _default_socket(environ, found["dir"])
    if len(os.fsencode(found["socket"])) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"socket={str(found['socket'])!r} ({sources['socket']}) is too long for a Unix socket; "
            f"use {known['socket'].allowed} (XCACHE_SOCKET)"
        )
    named = environ.get("XCACHE_CONFIG")
    return Config(
        **found,
        sources=sources,
        own_dir=own if machine else found["dir"],
        named=Path(named).absolute() if named else None,
    )


def files(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Where settings are read from, whether there is a file or not; the first that knows a setting wins."""
    environ = os.environ if environ is None else environ
    named = environ.get("XCACHE_CONFIG")
    usual = [_xdg(environ, "XDG_CONFIG_HOME", ".config") / "xcache" / "config.toml", SYSTEM_FILE]
    return [Path(named), *usual] if named else usual


def _check(setting: Setting, value: Any, source: str) -> Any:
    text = _as_text(value)
    try:
        if type(value) not in TYPES[setting.kind]:
            raise ValueError(text)
        return setting.parse(text)
    except (ValueError, OverflowError, RuntimeError):
        name = setting.variable if source == "environment" else setting.name
        raise ConfigError(f"{name}={text!r} ({source}) cannot be used; it must be {setting.allowed}") from None


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return " ".join(value)
    # A float as digits, to the last one and without an exponent.
    return f"{decimal.Decimal(repr(value)):f}" if isinstance(value, float) else str(value)


def _files(environ: Mapping[str, str]) -> list[Path]:
    named = environ.get("XCACHE_CONFIG")
    if named and not Path(named).is_file():
        raise ConfigError(f"XCACHE_CONFIG={named!r} (environment) is not a file")
    # os.path says no where Path raises: a program that gave up its rights may not even look.
    return [path for path in files(environ) if os.path.isfile(path)]  # noqa: PTH113


def _read_file(path: Path, known: Mapping[str, Setting]) -> dict[str, Any]:
    # tomllib costs several milliseconds to import, and most people have no file.
    import tomllib

    try:
        content = tomllib.loads(path.read_text("utf-8"))
    # ValueError: besides what is no TOML, digits without end; RecursionError: brackets without end.
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    for name, value in content.items():
        if name not in known:
            raise ConfigError(f"{path}: {name!r} is not a setting; there are {', '.join(known)}")
        if type(value) not in TYPES[known[name].kind]:
            raise ConfigError(f"{name}={value!r} ({path}) cannot be used; it must be {known[name].allowed}")
    return content


def _xdg(environ: Mapping[str, str], variable: str, fallback: str) -> Path:
    # The XDG specification: a relative path is to be ignored.
    named = environ.get(variable, "")
    return Path(named) if named.startswith("/") else _home(environ) / fallback


def _home(environ: Mapping[str, str]) -> Path:
    """The user's home; containers run as numbers that have none."""
    named = environ.get("HOME", "")
    return Path(named) if named.startswith("/") else _account_home() or _temporary()


def _temporary() -> Path:
    try:
        folder = tempfile.gettempdir()
    except OSError:
        # There is none that can be written, as for a service; here it is only a name.
        folder = "/tmp"  # noqa: S108
    return Path(folder) / f"xcache-{os.getuid() if hasattr(os, 'getuid') else 0}"


def _default_socket(environ: Mapping[str, str], directory: Path) -> Path:
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) / "xcache" if runtime.startswith("/") else _temporary()
    # A store of its own has a daemon of its own. The user's one default is found in the password database: a changed
    # HOME or XDG_CACHE_HOME names another store.
    home = _account_home()
    if home is not None and directory == home / ".cache" / "xcache":
        return base / "xcached.sock"
    return base / f"xcached-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]}.sock"


def _account_home() -> Path | None:
    """The home that the password database knows."""
    try:
        import pwd

        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except (ImportError, KeyError):
        return None
