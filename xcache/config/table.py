"""The table of all settings: name, default, meaning and parser. ``config`` finds their values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from xcache.config import parsing, remotes

# A Unix socket's path has 108 bytes, the last of them zero.
MAX_SOCKET_PATH = 107
# These settings identify a daemon; with other values it would be another daemon, so it never reloads them.
FIXED = ("dir", "socket", "daemon_user", "metrics", "remote", "bundles", "namespace")
# The settings that say how much a store may hold.
LIMITS = ("max_size", "max_entries", "max_age", "min_free", "user_quota", "max_ledger")
# The Python types that a value may have in a file or in code, by the kind of setting.
TYPES = {
    "path": (str, type(Path())),
    "size": (str, int),
    "time": (str, int, float),
    "number": (str, int),
    "room": (str, int),
    "account": (str, int),
    "flag": (str, int, bool),
    "text": (str,),
    "address": (str,),
    "list": (str, list),
}


# Settings of the program, and those of both sides; the rest are the daemon's.
_OF_PROGRAMS = frozenset((
    "dir", "socket", "autostart", "timeout", "prefetch", "lowering", "jit", "max_wait", "explain", "on_miss",
    "on_miss_after", "lock",
))  # fmt: skip
_OF_BOTH = frozenset({"log", "daemon_user", "max_ledger"})


class Setting(NamedTuple):
    """One setting: its kind (see ``TYPES``), meaning, allowed values and parser."""

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

    @property
    def used_by(self) -> str:
        """The side that it counts on: program, daemon or both."""
        return "program" if self.name in _OF_PROGRAMS else "both" if self.name in _OF_BOTH else "daemon"


_KIB, _MIB, _GIB = 1024, 1024**2, 1024**3
# A smaller store holds nothing; max_size = 10 is meant in another unit.
_LEAST_STORE = 16 * _KIB
SETTINGS = (
    Setting(
        "dir",
        "path",
        None,
        "where the store is kept",
        "a directory (a relative path starts from the working directory; in a file, from the file's folder)",
        parsing.parse_path,
    ),
    Setting(
        "socket",
        "path",
        None,
        "the daemon's socket",
        f"a path of at most {MAX_SOCKET_PATH} bytes",
        parsing.parse_path,
    ),
    Setting(
        "max_size",
        "size",
        20 * _GIB,
        "bytes the store may hold",
        "a size of at least 16K such as 10G or 512MiB; 0 for no limit",
        lambda text: parsing.parse_size_or_no_limit(text, _LEAST_STORE),
    ),
    Setting(
        "max_entries",
        "number",
        0,
        "entries the store may hold",
        "a number such as 100000; 0 for no limit",
        parsing.parse_count,
    ),
    Setting(
        "max_age",
        "time",
        0.0,
        "entries unused for this long are removed",
        "a time such as 90d; 0 for no limit",
        parsing.parse_duration,
    ),
    Setting(
        "min_free",
        "room",
        "5%",
        "space to keep free on the store's disk, by evicting entries and refusing new ones",
        "a share up to 90% such as 5%, which never means more than 20G, or a size such as 50G; 0 for none",
        parsing.parse_room,
    ),
    Setting(
        "max_ledger",
        "size",
        64 * _MIB,
        "bytes for the ledger: what each run asked for, and how it got it",
        "a size such as 64M; 0 to record nothing",
        parsing.parse_size,
    ),
    Setting(
        "log",
        "text",
        "warning",
        "log level (of the daemon: info, unless this is set)",
        "debug, info, warning or error",
        parsing.parse_level,
    ),
    Setting("autostart", "flag", True, "start a daemon when none runs", "1 or 0", parsing.parse_flag),
    Setting(
        "timeout",
        "time",
        5.0,
        "total time a program may lose by waiting for its daemon (not for another program's compile)",
        "a time above 0 such as 2s or 500ms",
        parsing.parse_timeout,
    ),
    Setting(
        "prefetch",
        "size",
        _GIB,
        "bytes of executables that may be loaded before the program asks for them",
        "a size such as 1G; 0 to load nothing ahead",
        parsing.parse_size,
    ),
    Setting(
        "lowering",
        "text",
        "auto",
        "whether jax's lowering is skipped for a program whose structure is known",
        "auto (where that takes less time than lowering), skip, check (lower, and compare with what would have been"
        " skipped) or off",
        lambda text: parsing.parse_choice(text, ("auto", "skip", "check", "off")),
    ),
    Setting(
        "jit",
        "text",
        "on",
        "whether a call of a function that xcache.jit made is answered from its record",
        "on, check (trace, and compare with the record) or off; on and check need lowering = auto or skip",
        lambda text: parsing.parse_choice(text, ("on", "check", "off")),
    ),
    Setting(
        "explain",
        "flag",
        False,
        "whether a program logs why each of its programs was compiled",
        "1 or 0",
        parsing.parse_flag,
    ),
    Setting(
        "on_miss",
        "text",
        "allow",
        "what happens when a program compiles something after xcache.warmed_up(), or after on_miss_after",
        "allow, warn or fail (the compile raises CompileInGuardError)",
        lambda text: parsing.parse_choice(text, ("allow", "warn", "fail")),
    ),
    Setting(
        "on_miss_after",
        "time",
        None,
        "on_miss holds from this long after the cache was switched on, or from xcache.warmed_up() if that is earlier",
        "a time such as 10m; 0 to hold from the first compile on; empty to wait for xcache.warmed_up()",
        parsing.parse_duration_or_none,
    ),
    Setting(
        "lock",
        "path",
        None,
        "where a run writes, at its end, which programs it wanted; `xcache preflight` reads it",
        "a file (a relative path starts from the working directory; in a file, from the file's folder); empty for none",
        parsing.parse_path_or_none,
    ),
    Setting(
        "idle_exit",
        "time",
        1800.0,
        "the daemon exits after this long without a request",
        "a time such as 30m, and a second at least; 0 for never",
        # With less, a daemon could be gone before the program that started it connects.
        parsing.parse_duration_from(1.0),
    ),
    Setting(
        "stale_grace",
        "time",
        7 * 86400.0,
        "how long to keep entries whose jaxlib, plugin or tools are no longer installed",
        "a time such as 7d; 0 for not at all",
        parsing.parse_duration,
    ),
    Setting(
        "max_wait",
        "time",
        600.0,
        "longest wait for another program to compile the same",
        "a time such as 10m; 0 to compile at once",
        parsing.parse_duration,
    ),
    Setting(
        "max_connections",
        "number",
        1024,
        "connections the daemon accepts at once",
        "a number from 1 to 100000",
        parsing.parse_count_between(1, 100_000),
    ),
    Setting(
        "max_requests",
        "number",
        64,
        "requests of one connection the daemon handles at once",
        "a number from 1 to 10000",
        parsing.parse_count_between(1, 10_000),
    ),
    Setting(
        "max_payload",
        "size",
        4 * _GIB,
        "bytes of one stored executable or program",
        "a size from 1M to 8G",
        parsing.parse_size_between(_MIB, 8 * _GIB),
    ),
    Setting(
        "metrics",
        "address",
        "",
        "where the daemon serves metrics for Prometheus; it needs jax-xcache[metrics]",
        "host:port such as 127.0.0.1:9464, or the path of a socket; empty for nowhere",
        parsing.parse_address,
    ),
    Setting(
        "remote",
        "list",
        (),
        "stores beyond this machine that the daemon shares entries with, in the order in which it asks them; it needs"
        " jax-xcache[remote]",
        f"addresses such as s3://bucket/prefix or file:///mnt/cache ({', '.join(remotes.SCHEMES)}), with options"
        " such as ?readonly=1",
        remotes.parse_remotes,
    ),
    Setting(
        "bundles",
        "list",
        (),
        "files made by `xcache export` that the daemon serves in place, before it asks any remote store",
        "absolute paths such as /opt/app/cache.xcb; ?trust=tier behind one trusts whoever can write that file",
        remotes.parse_bundles,
    ),
    Setting(
        "remote_timeout",
        "time",
        2.0,
        "longest time that a program waits for the remote stores to find one entry",
        "a time above 0 such as 2s",
        parsing.parse_timeout,
    ),
    Setting(
        "namespace",
        "text",
        "",
        "a name that keeps a team's entries apart from others' in the same remote store",
        "letters a-z, digits, dots and dashes, up to 63; empty for none",
        remotes.parse_namespace,
    ),
    Setting(
        "signing_key",
        "text",
        None,
        "the private key with which the daemon signs what leaves the machine; it needs jax-xcache[remote]",
        "the absolute path of a file, env:VARIABLE, or command:PROGRAM ARGUMENTS, which prints it; empty for none",
        parsing.parse_key_source,
    ),
    Setting(
        "trusted_keys",
        "path",
        None,
        "the list of keys whose signatures the daemon trusts",
        "a file (a relative path starts from the working directory; in a file, from the file's folder)",
        parsing.parse_path,
    ),
    Setting(
        "silence",
        "time",
        30.0,
        "disconnect clients that stay silent on connecting, or stop reading, for this long",
        "a time above 0 such as 30s",
        parsing.parse_timeout,
    ),
    Setting(
        "daemon_user",
        "account",
        "",
        "account of the one daemon that serves all users of the machine",
        "the name or number of an account; empty if every user has a daemon",
        parsing.parse_account,
    ),
    Setting(
        "trusted_writers",
        "text",
        (),
        "users whose entries the machine's daemon serves to others",
        "accounts (served to everybody) and @groups (served to members of the same group)",
        parsing.parse_names,
    ),
    Setting(
        "user_quota",
        "size",
        0,
        "bytes each user's entries may take in the machine's store",
        "a size such as 10G or 512MiB; 0 for no limit",
        parsing.parse_size,
    ),
)


def as_typed(name: str, text: str) -> str:
    """Return the text of a daemon's setting as somebody would type it: a size with its unit."""
    is_size = any(setting.name == name and setting.kind == "size" for setting in SETTINGS)
    size = int(text) if is_size and text.isdecimal() else 0
    power = next((power for power in (4, 3, 2, 1) if size and size % 1024**power == 0), 0)
    return f"{size // 1024**power}{' KMGT'[power]}" if power else text
