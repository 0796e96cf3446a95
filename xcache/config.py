"""Every setting, once: its name, default, meaning and check.

Environment over ``$XCACHE_CONFIG`` over the user's file over ``/etc`` over the default. Mode alone (``XCACHE``) is
taken from the environment only, so that a process without it need not look at any file.
"""

import decimal
import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from xcache import values
from xcache.errors import ConfigError

SYSTEM_FILE = Path("/etc/xcache/config.toml")
# Where the one daemon for all users is found, unless the settings say otherwise.
MACHINE_DIRECTORY = Path("/var/cache/xcache")
MACHINE_SOCKET = Path("/run/xcache/xcached.sock")
_MODES = {"1": "on", "on": "on", "0": "off", "off": "off", "": "off", "readonly": "readonly", "refresh": "refresh"}
# A Unix socket's path has 108 bytes, the last of them zero.
MAX_SOCKET_PATH = 107
# What a daemon is: with another of these it would be another daemon.
FIXED = ("dir", "socket", "daemon_user", "trace")
# What a value may be in a file or from code.
_TYPES = {
    "path": (str, type(Path())),
    "size": (str, int),
    "time": (str, int, float),
    "number": (str, int),
    "room": (str, int),
    "account": (str, int),
    "flag": (str, int, bool),
    "text": (str,),
}


class Setting(NamedTuple):
    """One setting: its kind (see ``_TYPES``), how it is checked and what it means."""

    name: str
    kind: str
    default: Any
    meaning: str
    allowed: str
    parse: Callable[[str], Any]

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"XCACHE_{self.name.upper()}"


_KIB, _MIB, _GIB = 1024, 1024**2, 1024**3
_SIZE = "a size such as 10G or 512MiB; 0 for no limit"
SETTINGS = (
    Setting("dir", "path", None, "where the store is kept", "a directory", values.parse_path),
    Setting(
        "socket",
        "path",
        None,
        "the daemon's socket",
        f"a path of at most {MAX_SOCKET_PATH} bytes",
        values.parse_path,
    ),
    Setting("max_size", "size", 20 * _GIB, "bytes the store may hold", _SIZE, values.parse_size),
    Setting(
        "max_entries",
        "number",
        0,
        "entries the store may hold",
        "a number such as 100000; 0 for no limit",
        values.parse_count,
    ),
    Setting(
        "max_age",
        "time",
        0.0,
        "entries that nobody has used for this time go",
        "a time such as 90d; 0 for no limit",
        values.parse_duration,
    ),
    Setting(
        "min_free",
        "room",
        "5%",
        "what stays free on the store's disk: where less is free, entries go and nothing is stored",
        "a share such as 5% (20G of a large disk are enough), or a size such as 50G; 0 for nothing",
        values.parse_room,
    ),
    Setting("log", "text", "warning", "level of messages", "debug, info, warning or error", values.parse_level),
    Setting("autostart", "flag", True, "start a daemon when there is none", "1 or 0", values.parse_flag),
    Setting(
        "timeout",
        "time",
        5.0,
        "longest wait for the daemon (not for another's compile)",
        "a time above 0 such as 2s or 500ms",
        values.parse_timeout,
    ),
    Setting(
        "prefetch",
        "size",
        _GIB,
        "bytes of executables that are loaded before the program asks for them",
        "a size such as 1G; 0 to load nothing ahead",
        values.parse_size,
    ),
    Setting(
        "idle_exit",
        "time",
        1800.0,
        "the daemon leaves after this time without a request",
        "a time such as 30m; 0 for never",
        values.parse_duration,
    ),
    Setting(
        "stale_grace",
        "time",
        7 * 86400.0,
        "how long entries are kept whose jaxlib, plugin or tools are no longer installed",
        "a time such as 7d; 0 for not at all",
        values.parse_duration,
    ),
    Setting(
        "max_wait",
        "time",
        600.0,
        "longest wait for a compile that another program has begun",
        "a time such as 10m; 0 to compile at once",
        values.parse_duration,
    ),
    Setting(
        "max_connections",
        "number",
        1024,
        "connections that the daemon takes",
        "a number from 1 to 100000",
        values.parse_count_between(1, 100_000),
    ),
    Setting(
        "max_requests",
        "number",
        64,
        "requests of one connection that the daemon has in hand at once",
        "a number from 1 to 10000",
        values.parse_count_between(1, 10_000),
    ),
    Setting(
        "max_frame",
        "size",
        _MIB,
        "bytes of one message to the daemon, without what comes as a file",
        "a size from 256K to 16M",
        values.parse_size_between(256 * _KIB, 16 * _MIB),
    ),
    Setting(
        "max_payload",
        "size",
        4 * _GIB,
        "bytes of one executable, or one program, as stored",
        "a size from 1M to 8G",
        values.parse_size_between(_MIB, 8 * _GIB),
    ),
    Setting(
        "max_descriptors",
        "number",
        2,
        "descriptors that may come with one message to the daemon",
        "a number from 2 to 64",
        values.parse_count_between(2, 64),
    ),
    Setting(
        "silence",
        "time",
        30.0,
        "the daemon drops who says nothing on connecting, or takes no answer, for this time",
        "a time above 0 such as 30s",
        values.parse_timeout,
    ),
    Setting(
        "daemon_user",
        "account",
        "",
        "account of the one daemon that serves all users of the machine",
        "the name or number of an account; empty: every user has a daemon",
        values.parse_account,
    ),
    Setting(
        "trusted_writers",
        "text",
        (),
        "whose entries others get from that daemon",
        "accounts (their entries are for everybody) and @groups (for one another's members)",
        values.parse_names,
    ),
    Setting(
        "trace",
        "path",
        None,
        "where the daemon notes every request, for scripts/simulate",
        "a file; empty: it does not",
        values.parse_optional_path,
    ),
    Setting("user_quota", "size", 0, "bytes that each user's entries may take there", _SIZE, values.parse_size),
)


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
        if type(value) not in _TYPES[setting.kind]:
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
        if type(value) not in _TYPES[known[name].kind]:
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
