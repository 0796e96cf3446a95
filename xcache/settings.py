"""Every setting, once: its name, default, meaning and check. ``config`` finds out what they are set to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from xcache import values

# A Unix socket's path has 108 bytes, the last of them zero.
MAX_SOCKET_PATH = 107
# What a daemon is: with another of these it would be another daemon.
FIXED = ("dir", "socket", "daemon_user", "trace")
# What a value may be in a file or from code.
TYPES = {
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
    """One setting: its kind (see ``TYPES``), how it is checked and what it means."""

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
