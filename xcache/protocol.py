"""Every message between a program and the daemon, one line each; ``framing`` writes and reads them.

A frame is a 4-byte big-endian length and a msgpack array ``[request id, message name, fields...]`` in the order the
fields stand below. A message whose payload is larger than ``INLINE_LIMIT`` travels with ``None`` in its place and the
payload as a file descriptor beside the frame. A peer that breaks a limit is disconnected.

``Hello`` and ``Welcome`` never change shape, so that any two versions can find out that they differ.
"""

import os
from pathlib import Path
from typing import NamedTuple

VERSION = 6
# Up to here SQLite reads a blob about as fast as a file; above it a descriptor beats copying through the socket.
INLINE_LIMIT = 32 * 1024
MAX_FRAME = 1024 * 1024
MAX_DESCRIPTORS = 2
# Beside a prediction.
MAX_PREDICTED_FILES = 8
# Of what one thread says that it loads.
MAX_LOADING = 16
MAX_TEXT = 16 * 1024
MAX_LIST = 4096
MAX_DICTIONARY = 1024
# What both ends know of the store's folder.
LOCK, DATABASE = "daemon.lock", "store.db"
# What a daemon says, on a line of its own, to whoever started it.
READY, FAILED = "ready", "failed: "
# The components of a key that come with a text; the program is kept whole.
DESCRIBED_COMPONENTS = ("options", "flags", "platform", "toolchain")

Scalar = str | int | float | bool | None


class Hello(NamedTuple):
    """The first message of a connection: who is asking."""

    protocol: int
    version: str
    pid: int
    program: str


class Welcome(NamedTuple):
    """The daemon's answer to Hello, also when the versions cannot talk to each other."""

    protocol: int
    version: str
    pid: int
    directory: str


class Get(NamedTuple):
    """Is there an executable under this key? ``wait``: how long another's compile is worth waiting for, 0 for not."""

    key: str
    wait: float
    module_name: str
    program_digest: str


class Found(NamedTuple):
    """There is: its digest, size, what it cost to compile, and the bytes (or a descriptor)."""

    digest: str
    stored_size: int
    compile_seconds: float
    payload: bytes | None


class Missing(NamedTuple):
    """There is not. With a lease (not 0) the asker compiles it for all who ask from now on."""

    lease: int


class Wait(NamedTuple):
    """Somebody is compiling it: who, for how long already, and how much longer the answer may take; more may follow."""

    pid: int
    program: str
    seconds: float
    at_most: float


class Release(NamedTuple):
    """The holder of a lease will not store anything: the next in line may try. No answer."""

    key: str
    lease: int


class Loading(NamedTuple):
    """The asker loads one of these now, digests by key: if the connection ends meanwhile, that may be why. No answer.

    What it was loading until now is loaded, or refused to be; either way the process lives.
    """

    entries: dict[str, str]


class Complain(NamedTuple):
    """What was found under this key is damaged or cannot be loaded: set it aside."""

    key: str
    digest: str
    reason: str


class Announce(NamedTuple):
    """This toolchain is installed here: each file's path, size, mtime_ns, inode and digest."""

    toolchain: str
    platform: str
    jaxlib_version: str
    description: str
    files: list[dict[str, Scalar]]


class Predict(NamedTuple):
    """What will this program want? By its name and a digest of its arguments, or by a key it has just asked for."""

    program: str
    arguments: str
    key: str | None


class Prediction(NamedTuple):
    """What such a program wanted last time, in this order, as in Remember.

    ``around`` in an item is the place in the list ``around`` where digests of the flags, platform and toolchain stand
    that it was made with. What is wanted first is here as well, with ``digest``, ``compile_seconds`` and
    ``stored_size`` in its item: what is small among the payloads, by key, and of ``files`` (keys) descriptors come
    beside it, in the same order. ``beginning`` says how many other programs are at their beginning, too, and want the
    same processors.
    """

    items: list[dict[str, Scalar]]
    options: dict[str, bytes]
    payloads: dict[str, bytes]
    files: list[str]
    around: list[str]
    beginning: int


class Remember(NamedTuple):
    """What this program wanted, in this order: key, options (a digest), devices, platform and seconds to load it."""

    program: str
    arguments: str
    items: list[dict[str, Scalar]]
    options: dict[str, bytes]


class NotCacheable(NamedTuple):
    """It is known that there can be none, and why."""

    reason: str


class MarkNotCacheable(NamedTuple):
    """Remember that what this key compiles to cannot be stored."""

    key: str
    module_name: str
    reason: str


class Put(NamedTuple):
    """Keep this executable; ``program`` is the canonical StableHLO it was compiled from."""

    key: str
    overwrite: bool
    module_name: str
    platform: str
    device_kind: str
    jaxlib_version: str
    codec: str
    raw_size: int
    compile_seconds: float
    digest: str
    stored_size: int
    program_digest: str
    program_raw_size: int
    program_stored_digest: str
    program_stored_size: int
    components: dict[str, str]
    details: dict[str, str]
    payload: bytes | None
    program: bytes | None

    @property
    def wants_descriptors(self) -> int:
        """How many descriptors come with it."""
        return (self.payload is None) + (self.program is None)


class Stored(NamedTuple):
    """The entry is safe on disk; ``kept`` is false when one was there already and stayed."""

    kept: bool


class Report(NamedTuple):
    """Add these to the statistics: what a client counted since it last said so."""

    counts: dict[str, int | float]


class Remove(NamedTuple):
    """Delete the entries under these keys; with a reason, that is remembered."""

    keys: list[str]
    reason: str = ""


class Clear(NamedTuple):
    """Delete every entry."""


class Removed(NamedTuple):
    """How many entries went, and how many bytes with them."""

    entries: int
    bytes: int


class Pin(NamedTuple):
    """Keep the entries under these keys, whatever the limits say."""

    keys: list[str]


class Unpin(NamedTuple):
    """Let them go as all others do."""

    keys: list[str]


class Pinned(NamedTuple):
    """How many of these entries there were, and how many are pinned now in all, with their bytes."""

    entries: int
    all_entries: int
    all_bytes: int


class CollectGarbage(NamedTuple):
    """Enforce every limit now, delete what nothing refers to, and return the database's free room to the disk."""


class Collected(NamedTuple):
    """What went: entries with bytes, files, how many entries for which reason, and bytes the database gave back."""

    entries: int
    bytes: int
    files: int
    reasons: dict[str, int]
    given_back: int


class Sync(NamedTuple):
    """Write to the database whatever is held back, and make room, so that a reader of it sees how things are."""


class ZeroStatistics(NamedTuple):
    """Start counting anew."""


class AskStatus(NamedTuple):
    """How is the daemon?"""


class Status(NamedTuple):
    """It is like this: plain facts by name, and what is being compiled at the moment."""

    facts: dict[str, Scalar]
    compiles: list[dict[str, Scalar]]


class Stop(NamedTuple):
    """Finish what is in flight and leave; the connection ends when it is done."""

    reason: str


class Done(NamedTuple):
    """It was done."""


class Refused(NamedTuple):
    """It was not done: a kind to count by and a reason to read."""

    kind: str
    reason: str


Message = (
    Hello | Welcome | Get | Found | Missing | Wait | Release | Loading | Complain | Announce | Predict
    | Prediction | Remember | NotCacheable | MarkNotCacheable | Put | Stored | Report | Remove | Clear | Removed
    | Pin | Unpin | Pinned | CollectGarbage | Collected | Sync | ZeroStatistics | AskStatus | Status
    | Stop | Done | Refused
)  # fmt: skip


def path_text(path: Path) -> str:
    """A path as text, also one that is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
