"""Every message between a program and the daemon, one line each, and the framing. No I/O happens here.

A frame is a 4-byte big-endian length and a msgpack array ``[request id, message name, fields...]`` in the order the
fields stand below. A message whose payload is larger than ``INLINE_LIMIT`` travels with ``None`` in its place and the
payload as a file descriptor beside the frame. A peer that breaks a limit is disconnected.

``Hello`` and ``Welcome`` never change shape, so that any two versions can find out that they differ.
"""

import functools
import os
import struct
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from xcache.errors import ProtocolError

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
_LENGTH = struct.Struct(">I")

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

_MESSAGES: dict[str, type[Any]] = {message.__name__: message for message in typing.get_args(Message)}
Check = Callable[[Any], bool]


@functools.cache
def _checks(name: str) -> tuple[tuple[str, Check], ...]:
    """The fields of a message, and what each may hold, from its annotation."""
    return tuple((field, _check_of(hint)) for field, hint in typing.get_type_hints(_MESSAGES[name]).items())


def _check_of(hint: Any) -> Check:
    if isinstance(hint, types.UnionType):
        options = [_check_of(option) for option in typing.get_args(hint)]
        return lambda value: any(fits(value) for fits in options)
    inside = [_check_of(inner) for inner in typing.get_args(hint)]
    if typing.get_origin(hint) is list:
        return lambda value: type(value) is list and len(value) <= MAX_LIST and all(map(inside[0], value))
    if typing.get_origin(hint) is dict:
        return lambda value: (
            type(value) is dict
            and len(value) <= MAX_DICTIONARY
            and all(map(inside[0], value))
            and all(map(inside[1], value.values()))
        )
    if hint is str:
        return lambda value: type(value) is str and len(value) <= MAX_TEXT
    if hint is float:
        # msgpack writes 1.0 as a float and 1 as an int; where a float is wanted both are numbers.
        return lambda value: type(value) in (float, int)
    return lambda value: type(value) is hint


class Packed(NamedTuple):
    """A message that is sent again and again: the bytes before its request id and those behind it."""

    message: Any
    head: bytes
    fields: bytes


def pack(message: Message) -> Packed:
    """What ``encode`` can do ahead; ProtocolError for what the other end would not accept."""
    body = _body(0, message)
    # A list of up to 15 begins with one byte, and one of up to 65,535 with three.
    head = 1 if len(message) + 2 < 16 else 3
    return Packed(message, body[:head], body[head + 1 :])


def encode(request: int, message: Message | Packed) -> bytes:
    """One frame, length first; ProtocolError for what the other end would not accept."""
    if isinstance(message, Packed):
        body = b"".join((message.head, msgpack.packb(request), message.fields))
    else:
        body = _body(request, message)
    return _LENGTH.pack(len(body)) + body


def _body(request: int, message: Message) -> bytes:
    name = type(message).__name__
    _check(name, message)
    try:
        body = typing.cast("bytes", msgpack.packb([request, name, *message], use_bin_type=True))
    except (ValueError, OverflowError) as error:
        raise ProtocolError(f"a {name} that cannot be written: {error}") from None
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"a {name} of {len(body)} bytes is above the limit of {MAX_FRAME}")
    return body


def decode(body: bytes | memoryview) -> tuple[int, Message]:
    """The request id and message in a frame's body, or ProtocolError: never anything half understood."""
    try:
        parts = msgpack.unpackb(
            body, raw=False, strict_map_key=True, max_array_len=MAX_LIST, max_map_len=MAX_DICTIONARY, max_ext_len=0
        )
    except (ValueError, TypeError, RecursionError, UnicodeDecodeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a message: {type(error).__name__}: {str(error)[:200]}") from None
    if type(parts) is not list or len(parts) < 2 or type(parts[0]) is not int or not isinstance(parts[1], str):
        raise ProtocolError("not a message: no request id and name")
    request, name, values = parts[0], parts[1], parts[2:]
    if name not in _MESSAGES:
        raise ProtocolError(f"unknown message {name[:40]!r}")
    fields = _checks(name)
    # Hello and Welcome may grow at their end in a later version.
    if len(values) != len(fields) and not (name in ("Hello", "Welcome") and len(values) > len(fields)):
        raise ProtocolError(f"{name} has {len(fields)} fields, not {len(values)}")
    _check(name, values)
    return request, _MESSAGES[name](*values[: len(fields)])


def _check(name: str, values: Sequence[Any]) -> None:
    for (field, fits), value in zip(_checks(name), values, strict=False):
        if not fits(value):
            raise ProtocolError(f"{name}.{field} is of the wrong type or too long")


def path_text(path: Path) -> str:
    """A path as text, also one that is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


class FrameReader:
    """Cuts a stream of bytes into frames; holds at most one unfinished frame."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._buffer = bytearray()
        self._limit = limit

    @property
    def unfinished(self) -> bool:
        """Whether a frame has begun and not ended."""
        return bool(self._buffer)

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[int, Message]]:
        """Add what arrived and yield the messages that are now complete."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._limit:
                raise ProtocolError(f"a frame of {length} bytes is above the limit of {self._limit}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield decode(body)
