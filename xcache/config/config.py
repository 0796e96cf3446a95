"""Find the value of every setting, and where it was set.

The environment wins over the file that ``$XCACHE_CONFIG`` names, then come the user's file, the one in ``/etc`` and the
default. Only the environment sets the mode (``XCACHE``), so a process without that variable reads no file.
"""

import contextlib
import decimal
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from xcache.config import remotes
from xcache.config.parsing import UnfitError
from xcache.config.table import FIXED, MAX_SOCKET_PATH, SETTINGS, TYPES, Setting
from xcache.errors import ConfigError
from xcache.wire import bounded
from xcache.wire.ownership import uid_of_account

SYSTEM_FILE = Path("/etc/xcache/config.toml")
# The store and socket of the one daemon for all users, unless the settings name others.
MACHINE_DIRECTORY = Path("/var/cache/xcache")
MACHINE_SOCKET = Path("/run/xcache/xcached.sock")
_MODES = {"1": "on", "on": "on", "0": "off", "off": "off", "": "off", "readonly": "readonly", "refresh": "refresh"}
# The similarity of two spellings (difflib's) of which one is probably meant to be the other.
_NEARLY_RIGHT = 0.8
# A difference in remote stores is told by their names. The log is the daemon's own affair, a key's source a secret.
_NOT_COMPARED = {"remote", "bundles", "namespace", "daemon_user", "log", "signing_key"}
_MODES_SAID = "1, on, 0, off, readonly or refresh"


class Config(NamedTuple):
    """The settings of a process, and where each was set."""

    dir: Path
    socket: Path
    max_size: int
    max_entries: int
    max_age: float
    min_free: str
    max_ledger: int
    log: str
    autostart: bool
    timeout: float
    prefetch: int
    lowering: str
    jit: str
    explain: bool
    on_miss: str
    # None: only xcache.warmed_up() begins it.
    on_miss_after: float | None
    # None: no run writes what it wanted.
    lock: Path | None
    idle_exit: float
    stale_grace: float
    max_wait: float
    max_connections: int
    max_requests: int
    max_payload: int
    metrics: str
    remote: tuple[str, ...]
    bundles: tuple[str, ...]
    remote_timeout: float
    namespace: str
    signing_key: str
    trusted_keys: Path
    silence: float
    daemon_user: str
    trusted_writers: tuple[str, ...]
    user_quota: int
    # This user's folder for files that the daemon does not need.
    own_dir: Path
    sources: Mapping[str, str]
    # The file that XCACHE_CONFIG names, if any.
    named: Path | None

    def as_environment(self) -> dict[str, str]:
        """Return the variables that give a daemon these settings, except those it reads from the same files."""
        given = {"environment", "code", None}
        return {"XCACHE_CONFIG": str(self.named or "")} | {
            setting.variable: _as_text(getattr(self, setting.name))
            for setting in SETTINGS
            # A daemon never changes the settings that tell which daemon it is, whatever the files say later.
            if setting.name in FIXED or self.sources.get(setting.name) in given
        }

    def daemon_uid(self) -> int | None:
        """Return the uid of the machine's daemon, or None if it has none; raise ConfigError for an unknown account."""
        if not self.daemon_user:
            return None
        with self.blamed("daemon_user"):
            return uid_of_account(self.daemon_user)

    def of_daemon(self) -> dict[str, str]:
        """Return, as text, the settings that count in a daemon, but those that tell which one it is, and keys."""
        return {
            setting.name: _as_text(getattr(self, setting.name))
            for setting in SETTINGS
            if setting.used_by != "program" and setting.name not in _NOT_COMPARED
        }

    def ignored_by(self, daemon: Mapping[str, str]) -> dict[str, str]:
        """Return what a daemon has in place of settings that this process's code or environment gave other values."""
        given = [name for name in daemon if self.sources.get(name) in ("environment", "code")]
        mine = self.of_daemon() if given else {}
        return {name: daemon[name] for name in given if mine.get(name, daemon[name]) != daemon[name]}

    @property
    def kept_in(self) -> Path:
        """The file in which a setting stays, whoever starts the daemon."""
        return self.named or (SYSTEM_FILE if self.daemon_user else files()[0])

    @property
    def has_tiers(self) -> bool:
        """Whether the daemon looks for entries anywhere else than in its store."""
        return bool(self.remote or self.bundles)

    def tiers(self) -> list[remotes.Remote]:
        """Return where the daemon looks for entries that its store has not, in this order: on this machine first."""
        return [*map(remotes.bundle, self.bundles), *map(remotes.remote, self.remote)]

    @property
    def has_signing_key(self) -> bool:
        """Whether there should be a key to sign with: one was named, or the usual file is there."""
        is_usual = self.sources["signing_key"] == "default"
        return bool(self.signing_key) and (not is_usual or os.path.lexists(self.signing_key))

    @property
    def key_variable(self) -> str:
        """The variable that holds the signing key; empty if none does."""
        kind, _, name = self.signing_key.partition(":")
        return name if kind == "env" else ""

    @contextlib.contextmanager
    def blamed(self, name: str) -> Iterator[None]:
        """Make a ConfigError name this setting and where it was set."""
        try:
            yield
        except ConfigError as error:
            told = _told(name, _as_text(getattr(self, name)), self.sources[name])
            raise ConfigError(f"{told} cannot be used: {error}") from None


def mode(environ: Mapping[str, str] | None = None) -> str:
    """Return the mode that ``XCACHE`` asks for: on, off, readonly or refresh."""
    text = (os.environ if environ is None else environ).get("XCACHE", "")
    if text.strip().lower() not in _MODES:
        raise ConfigError(f"XCACHE={text!r} (environment) is not understood; use {_MODES_SAID}")
    return _MODES[text.strip().lower()]


def mode_from_code(value: object) -> str:
    """Return the mode that a program gives, as it might stand in ``XCACHE``; raise ConfigError for anything else."""
    text = _as_text(value).strip().lower()
    if not isinstance(value, str | int) or text not in _MODES:
        raise ConfigError(
            f"mode={value!r} (code) is not understood; use {_MODES_SAID}; settings are given by name, such as dir=..."
        )
    return _MODES[text]


def load(environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
    """Read and check every setting once; ``overrides`` (from code) win over everything."""
    return _with_usable_socket(_load(os.environ if environ is None else environ, overrides, None))


def load_usable(environ: Mapping[str, str] | None = None) -> tuple[Config, list[str]]:
    """Return the settings, with defaults for those that are wrong, and the problems: enough to find the daemon."""
    environ = os.environ if environ is None else environ
    problems: list[ConfigError] = []
    settings = _with_usable_socket(_load(environ, {}, problems))
    unread = len(problems)
    with _noted(problems):
        settings.daemon_uid()
    if len(problems) > unread:
        settings = _with_usable_socket(_load(environ, {"daemon_user": ""}, []))
        settings = settings._replace(sources={**settings.sources, "daemon_user": "default"})
    return settings, list(map(str, problems))


def _load(environ: Mapping[str, str], overrides: Mapping[str, Any], problems: list[ConfigError] | None) -> Config:
    known = {setting.name: setting for setting in SETTINGS}
    for name in overrides:
        if name not in known:
            raise _unknown("", name, known)
    content_of = [(path, _read_file(path, known, problems)) for path in _files(environ, problems)]
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, setting in known.items():
        value, source = setting.default, "default"
        if name in overrides:
            value, source = _check(setting, overrides[name], "code"), "code"
        else:
            given = [(environ[setting.variable], "environment")] if setting.variable in environ else []
            given += [(content[name], str(path)) for path, content in content_of if name in content]
            for text, where in given:
                with _noted(problems):
                    value, source = _check(setting, text, where), where
                    break
        found[name], sources[name] = value, source
    own = _xdg(environ, "XDG_CACHE_HOME", ".cache") / "xcache"
    machine = found["daemon_user"]
    if found["dir"] is None:
        found["dir"] = MACHINE_DIRECTORY if machine else own
    if found["socket"] is None:
        found["socket"] = MACHINE_SOCKET if machine else _default_socket(environ, found["dir"])
    keys = SYSTEM_FILE.parent if machine else _xdg(environ, "XDG_CONFIG_HOME", ".config") / "xcache"
    found["signing_key"] = str(keys / "signing-key") if found["signing_key"] is None else found["signing_key"]
    found["trusted_keys"] = found["trusted_keys"] or keys / "trusted-keys"
    named = environ.get("XCACHE_CONFIG")
    return Config(
        **found,
        sources=sources,
        own_dir=own if machine else found["dir"],
        named=Path(named).absolute() if named else None,
    )


def _with_usable_socket(settings: Config) -> Config:
    if len(os.fsencode(settings.socket)) > MAX_SOCKET_PATH:
        allowed = next(setting.allowed for setting in SETTINGS if setting.name == "socket")
        raise ConfigError(
            f"socket={str(settings.socket)!r} ({settings.sources['socket']}) is too long for a Unix socket; "
            f"use {allowed} (XCACHE_SOCKET)"
        )
    return settings


def guards(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether compiles are to fail: ``on_miss`` says so, or what seems to say so cannot be understood."""
    environ = os.environ if environ is None else environ
    problems: list[ConfigError] = []
    settings = _load(environ, {}, problems)
    is_unclear = any(each.setting.startswith("on_miss") for each in problems) or misspelt_guard(environ) is not None
    return settings.on_miss == "fail" or is_unclear


def without_usable_settings() -> str:
    """Return what programs do as long as a setting cannot be used."""
    return "stop at their first compile" if guards() else "run without the cache"


def misspelt_guard(environ: Mapping[str, str]) -> str | None:
    """Return a sentence on a variable that is probably meant to forbid compiles and does not, or None."""
    found = [each for each in misspelt(environ).items() if each[1] == "XCACHE_ON_MISS"]
    return next((f"{variable} is not a setting; did you mean {meant}?" for variable, meant in found), None)


def files(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Return the files that settings are read from, existing or not; the first one that has a setting wins."""
    environ = os.environ if environ is None else environ
    named = environ.get("XCACHE_CONFIG")
    usual = [_xdg(environ, "XDG_CONFIG_HOME", ".config") / "xcache" / "config.toml", SYSTEM_FILE]
    return [Path(named), *usual] if named else usual


@contextlib.contextmanager
def _noted(problems: list[ConfigError] | None) -> Iterator[None]:
    """Append a ConfigError to ``problems`` and go on; raise it if there is no such list."""
    try:
        yield
    except ConfigError as error:
        if problems is None:
            raise
        problems.append(error)


def _check(setting: Setting, value: Any, source: str) -> Any:
    text = _as_text(value)
    try:
        if type(value) not in TYPES[setting.kind]:
            raise ValueError(text)
        return setting.parse(text)
    except (ValueError, OverflowError, RuntimeError) as error:
        told, why = _told(setting.name, text, source), f": {error}" if isinstance(error, UnfitError) else ""
        raise _unusable(setting, f"{told} cannot be used{why}") from None


def _unusable(setting: Setting, told: str) -> ConfigError:
    error = ConfigError(f"{told}; it must be {setting.allowed}")
    error.setting = setting.name
    return error


def _told(name: str, text: str, source: str) -> str:
    """Describe a setting as it was written: its name, value and source."""
    shown = f"XCACHE_{name.upper()}" if source == "environment" else name
    return f"{shown}={remotes.masked(text)!r} ({source})"


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple | list):
        return " ".join(map(str, value))
    # A float gets all its digits and no exponent.
    return f"{decimal.Decimal(repr(value)):f}" if isinstance(value, float) else str(value)


def _files(environ: Mapping[str, str], problems: list[ConfigError] | None) -> list[Path]:
    named = environ.get("XCACHE_CONFIG")
    with _noted(problems):
        if named and not Path(named).is_file():
            raise ConfigError(f"XCACHE_CONFIG={named!r} (environment) is not a file")
    # os.path returns False where Path raises: a program that dropped its privileges may not even look.
    return [path for path in files(environ) if os.path.isfile(path)]  # noqa: PTH113


def _read_file(path: Path, known: Mapping[str, Setting], problems: list[ConfigError] | None) -> dict[str, Any]:
    content: dict[str, Any] = {}
    with _noted(problems):
        try:
            content = bounded.parsed_toml(bounded.text_of(path), bounded.SMALL_FILE)
        # ValueError: not TOML, too large or too deep, or a number with too many digits.
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from None
    right = {}
    for name, value in content.items():
        with _noted(problems):
            if name not in known:
                raise _unknown(f"{path}: ", name, known)
            if type(value) not in TYPES[known[name].kind]:
                raise _unusable(known[name], f"{name}={value!r} ({path}) cannot be used")
            right[name] = _from_folder_of(path, value) if known[name].kind == "path" else value
    return right


def _from_folder_of(file: Path, value: Any) -> str:
    """Return a path in a file of settings: a relative one starts from the file's folder, wherever it is read."""
    path = str(value)
    return path if not path.strip() or path.startswith("~") else str(file.absolute().parent / path)


def misspelt(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are probably meant to set something and do not, each with the one that is meant.

    Other programs may have variables that begin like ours, so only a spelling that is nearly right counts.
    """
    known = {setting.variable for setting in SETTINGS} | {"XCACHE_CONFIG"}
    others = [name for name in environ if name.startswith("XCACHE_") and name not in known]
    if not others:
        return {}
    import difflib

    names = [name.removeprefix("XCACHE_") for name in known]
    alike = {name: difflib.get_close_matches(name.removeprefix("XCACHE_"), names, 1, _NEARLY_RIGHT) for name in others}
    return {name: f"XCACHE_{found[0]}" for name, found in alike.items() if found}


def _unknown(place: str, name: str, known: Mapping[str, Setting]) -> ConfigError:
    """Return the error for a name that stands somewhere, with a suggestion for a misspelt one, or all names."""
    alike: list[str] = []
    if name == "mode":
        more = f", because only the environment says whether a program uses the cache: XCACHE={_MODES_SAID}"
    else:
        # Most programs misspell nothing, and need not import this.
        import difflib

        alike = difflib.get_close_matches(name.lower().removeprefix("xcache_"), known, n=1)
        more = f"; did you mean {alike[0]}?" if alike else f"; there are {', '.join(known)}"
    error = ConfigError(f"{place}{name!r} is not a setting{more}")
    error.setting = alike[0] if alike else ""
    return error


def _xdg(environ: Mapping[str, str], variable: str, fallback: str) -> Path:
    # The XDG specification has relative paths ignored.
    named = environ.get(variable, "")
    return Path(named) if named.startswith("/") and not _is_anothers(named) else _home(environ) / fallback


def _home(environ: Mapping[str, str]) -> Path:
    """Return the user's home, or a temporary folder: a container may run as a uid without one."""
    named = environ.get("HOME", "")
    if named.startswith("/") and not _is_anothers(named):
        return Path(named)
    return _account_home() or _temporary()


def _is_anothers(path: str) -> bool:
    """Return whether root would write into another user's folder there: sudo may keep the user's HOME."""
    try:
        return _uid() == 0 and _nearest(Path(path)).stat().st_uid != 0
    except OSError:
        return False


def _temporary() -> Path:
    try:
        folder = tempfile.gettempdir()
    except OSError:
        # No temporary folder is writable, as in a service; only a name is needed here.
        folder = "/tmp"  # noqa: S108
    return Path(folder) / f"xcache-{_uid()}"


def _default_socket(environ: Mapping[str, str], directory: Path) -> Path:
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    bases = [_temporary()]
    if runtime.startswith("/"):
        bases.insert(0, Path(runtime) / "xcache")
    base = next((base for base in bases if _is_ours_to_use(base)), None)
    if base is None:
        # Another user may have taken the predictable name in /tmp, but cannot have made anything in the store.
        beside = directory / "xcached.sock"
        if len(os.fsencode(beside)) <= MAX_SOCKET_PATH:
            return beside
        base = bases[0]
    # Each store has its own daemon and socket. The user's default store is the one under the home in the password
    # database; a changed HOME or XDG_CACHE_HOME names another store.
    home = _account_home()
    if home is not None and directory == home / ".cache" / "xcache":
        return base / "xcached.sock"
    return base / f"xcached-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]}.sock"


def _is_ours_to_use(base: Path) -> bool:
    """Return whether this user owns the folder, or can make it without writing into another user's."""
    nearest = _nearest(base)
    try:
        found = nearest.stat()
    except OSError:
        return False
    owners = {_uid()} if nearest == base else {_uid(), 0}
    return found.st_uid in owners and stat.S_ISDIR(found.st_mode) and os.access(nearest, os.W_OK | os.X_OK)


def _nearest(path: Path) -> Path:
    """Return the path itself, or the nearest folder above it that exists."""
    return next(above for above in (path, *path.parents) if os.path.lexists(above) or above == above.parent)


def _uid() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _account_home() -> Path | None:
    """Return the home in the password database, or None."""
    try:
        import pwd

        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except (ImportError, KeyError):
        return None
