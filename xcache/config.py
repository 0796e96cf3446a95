"""Every setting, once: its name, default, meaning and check.

Environment over ``$XCACHE_CONFIG`` over the user's file over ``/etc`` over the default. Mode alone (``XCACHE``) is
taken from the environment only, so that a process without it need not look at any file.
"""

from __future__ import annotations

import dataclasses
import decimal
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xcache.errors import ConfigError

SYSTEM_FILE = Path("/etc/xcache/config.toml")
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("IB", 1024), ("B", 1000))
}
_DURATIONS = {"": 1.0, "MS": 0.001, "S": 1.0, "M": 60.0, "H": 3600.0, "D": 86400.0}
_MODES = {"1": "on", "on": "on", "0": "off", "off": "off", "": "off", "readonly": "readonly", "refresh": "refresh"}
_LONGEST_TIMEOUT = 1e9
# A Unix socket's path has 108 bytes, the last of them zero.
MAX_SOCKET_PATH = 107


def parse_size(text: str) -> int:
    """Bytes in ``10G``, ``512MiB``, ``1.5GB`` or ``0`` (K, M, G, T and KiB... are powers of 1024, KB... of 1000)."""
    return int(_parse_quantity(text, _UNITS))


def parse_duration(text: str) -> float:
    """Seconds in ``500ms``, ``30``, ``30s``, ``5m``, ``2h`` or ``7d``."""
    return _parse_quantity(text, _DURATIONS)


def _parse_quantity(text: str, units: Mapping[str, float]) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in units:
        raise ValueError(text)
    return float(match[1]) * units[match[2].upper()]


def _parse_flag(text: str) -> bool:
    return {"1": True, "on": True, "true": True, "0": False, "off": False, "false": False}[text.strip().lower()]


def _parse_path(text: str) -> Path:
    if not text.strip():
        raise ValueError(text)
    return Path(text).expanduser().absolute()


def _parse_level(text: str) -> str:
    level = text.strip().lower()
    if level not in ("debug", "info", "warning", "error"):
        raise ValueError(text)
    return level


def _parse_timeout(text: str) -> float:
    seconds = parse_duration(text)
    # Sockets count in nanoseconds of 64 bits.
    if not 0 < seconds <= _LONGEST_TIMEOUT:
        raise ValueError(text)
    return seconds


_PATH = (str, type(Path()))


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting: where it is read from, how it is checked and what it means."""

    name: str
    meaning: str
    allowed: str
    parse: Callable[[str], Any]
    default: Callable[[Mapping[str, str]], Any]
    # What a value may be in a file or from code.
    types: tuple[type, ...]

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"XCACHE_{self.name.upper()}"


SETTINGS = (
    Setting(
        "dir",
        "where the store is kept",
        "a directory",
        _parse_path,
        lambda env: _xdg(env, "XDG_CACHE_HOME", ".cache") / "xcache",
        _PATH,
    ),
    Setting(
        "socket",
        "the daemon's socket",
        f"a path of at most {MAX_SOCKET_PATH} bytes",
        _parse_path,
        lambda _: None,  # follows from dir: see _default_socket
        _PATH,
    ),
    Setting(
        "max_size",
        "bytes the store may hold",
        "a size such as 10G or 512MiB; 0 for no limit",
        parse_size,
        lambda _: 20 * 1024**3,
        (str, int),
    ),
    Setting("log", "level of messages", "debug, info, warning or error", _parse_level, lambda _: "warning", (str,)),
    Setting("autostart", "start a daemon when there is none", "1 or 0", _parse_flag, lambda _: True, (str, int, bool)),
    Setting(
        "timeout",
        "longest wait for the daemon (not for another's compile)",
        "a time above 0 such as 2s or 500ms",
        _parse_timeout,
        lambda _: 5.0,
        (str, int, float),
    ),
    Setting(
        "idle_exit",
        "the daemon leaves after this time without a request",
        "a time such as 30m; 0 for never",
        parse_duration,
        lambda _: 1800.0,
        (str, int, float),
    ),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings a process runs with, and where each came from."""

    dir: Path
    socket: Path
    max_size: int
    log: str
    autostart: bool
    timeout: float
    idle_exit: float
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)

    def as_environment(self) -> dict[str, str]:
        """The variables that give another process these settings, whatever files it would read."""
        # No file to be named from another working directory: all of them have been read.
        return {"XCACHE_CONFIG": ""} | {s.variable: _as_text(getattr(self, s.name)) for s in SETTINGS}


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
    files = [(path, _read_file(path, known)) for path in _files(environ)]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, setting in known.items():
        value, source = setting.default(environ), "default"
        if name in overrides:
            value, source = _check(setting, overrides[name], "code"), "code"
        elif setting.variable in environ:
            value, source = _check(setting, environ[setting.variable], "environment"), "environment"
        else:
            for path, content in files:
                if name in content:
                    value, source = _check(setting, content[name], str(path)), str(path)
                    break
        values[name], sources[name] = value, source
    if values["socket"] is None:
        values["socket"] = _default_socket(environ, values["dir"])
    if len(os.fsencode(values["socket"])) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"socket={str(values['socket'])!r} ({sources['socket']}) is too long for a Unix socket; "
            f"use {known['socket'].allowed} (XCACHE_SOCKET)"
        )
    return Config(**values, sources=sources)


def _check(setting: Setting, value: Any, source: str) -> Any:
    text = _as_text(value)
    try:
        if type(value) not in setting.types:
            raise ValueError(text)
        return setting.parse(text)
    except (ValueError, KeyError, OverflowError, RuntimeError):
        name = setting.variable if source == "environment" else setting.name
        raise ConfigError(f"{name}={text!r} ({source}) cannot be used; it must be {setting.allowed}") from None


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    # A float as digits, to the last one and without an exponent.
    return f"{decimal.Decimal(repr(value)):f}" if isinstance(value, float) else str(value)


def _files(environ: Mapping[str, str]) -> list[Path]:
    named = environ.get("XCACHE_CONFIG")
    if named and not Path(named).is_file():
        raise ConfigError(f"XCACHE_CONFIG={named!r} (environment) is not a file")
    files = [Path(named)] if named else []
    usual = (_xdg(environ, "XDG_CONFIG_HOME", ".config") / "xcache" / "config.toml", SYSTEM_FILE)
    # os.path says no where Path raises: a program that gave up its rights may not even look.
    return files + [path for path in usual if os.path.isfile(path)]  # noqa: PTH113


def _read_file(path: Path, known: Mapping[str, Setting]) -> dict[str, Any]:
    # tomllib costs several milliseconds to import, and most people have no file.
    import tomllib

    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    for name, value in content.items():
        if name not in known:
            raise ConfigError(f"{path}: {name!r} is not a setting; there are {', '.join(known)}")
        if type(value) not in known[name].types:
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
    return Path(tempfile.gettempdir()) / f"xcache-{os.getuid() if hasattr(os, 'getuid') else 0}"


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
