"""What reads bytes without a socket: each says whether any bytes were taken, and raises only on a defect."""

from __future__ import annotations

import functools
import os
import struct
import types
import typing
import zlib
from collections.abc import Callable
from typing import Any

from seeds import KEY, RAWS, field

from xcache import framing, payload, protocol
from xcache.errors import DamagedError, ProtocolError, UncacheableError
from xcache.keys import digest, flags, options

_RAWS = frozenset(map(digest, RAWS))
# A flag that counts and one that does not, both of which no case has; as text and in the debug options.
_COUNTS, _LEFT_OUT = "--xla_only_in_this_check=1", "--xla_dump_to=/only/in/this/check"
_FIELD_COUNTS, _FIELD_LEFT_OUT = (field(3, field(3, field(number, b"only here"))) for number in (2**28 + 7, 109))

Fits = Callable[[Any], bool]


def message(body: bytes) -> bool:
    """The body of a frame: a message within its types and bounds that can be said again, or ProtocolError."""
    try:
        request, decoded = framing.decode(body)
    except ProtocolError:
        return False
    assert type(request) is int
    for fits, value in zip(_fits(type(decoded)), decoded, strict=True):
        assert fits(value), decoded
    said = framing.encode(request, decoded)
    again = framing.decode(said[4:])
    # Not the messages alone: a NaN is not equal to itself.
    assert again == (request, decoded) or framing.encode(*again) == said
    return True


def stream(data: bytes) -> bool:
    """A stream: however it is cut, its frames are those that their lengths say, up to the first that is none."""
    expected, broken = frames(data)
    for step in (max(1, len(data)), 1 + zlib.crc32(data) % 61):
        reader, got, failed = framing.FrameReader(), [], False
        try:
            for at in range(0, len(data), step):
                got.extend(reader.feed(data[at : at + step]))
        except ProtocolError:
            failed = True
        assert failed == broken
        # What came in one piece with what is no message may be lost with it.
        assert repr(got) == repr(expected) or (failed and repr(got) == repr(expected[: len(got)]))
        assert failed or reader.unfinished == (_length(expected, data) < len(data))
    return not broken


def envelope(sealed: bytes) -> bool:
    """A sealed content whose digest fits: one that was sealed before, or DamagedError."""
    try:
        raw = payload.open_sealed(KEY, digest(sealed), sealed)
    except DamagedError:
        return False
    assert digest(raw) in _RAWS, raw[:100]
    return True


def compile_options(serialized: bytes) -> bool:
    """Compile options: UncacheableError, or a text in which what counts shows and what does not count does not."""
    try:
        made = options.canonical(serialized, ignore_device_numbers=False)
    except UncacheableError:
        return False
    assert options.canonical(serialized + _FIELD_LEFT_OUT, ignore_device_numbers=False) == made
    assert options.canonical(serialized + _FIELD_COUNTS, ignore_device_numbers=False) != made
    options.canonical(serialized, ignore_device_numbers=True)
    return True


def flag_texts(environment: bytes) -> bool:
    """Flags and arguments, byte 0x1e between them: as above."""
    texts = [os.fsdecode(part) for part in environment.split(b"\x1e")]
    xla, libtpu, *arguments = [*texts, "", ""]
    try:
        made = _collected(xla, libtpu, arguments)
    except UncacheableError:
        return False
    if not xla.strip() or xla.lstrip().startswith("-"):
        assert _collected(f"{_LEFT_OUT} {xla}", libtpu, arguments) == made
        assert _collected(f"{_COUNTS} {xla}", libtpu, arguments) != made
    return True


def _collected(xla: str, libtpu: str, arguments: list[str]) -> bytes:
    return flags.collect({"XLA_FLAGS": xla, "LIBTPU_INIT_ARGS": libtpu}, arguments)


def frames(data: bytes) -> tuple[list[tuple[int, protocol.Message]], bool]:
    """The messages of a stream, and whether something came after them that is none."""
    found = []
    at = 0
    while at + 4 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        if length > protocol.MAX_FRAME:
            return found, True
        if at + 4 + length > len(data):
            break
        try:
            found.append(framing.decode(data[at + 4 : at + 4 + length]))
        except ProtocolError:
            return found, True
        at += 4 + length
    return found, False


def _length(expected: list[Any], data: bytes) -> int:
    """How many bytes of the stream so many frames are."""
    at = 0
    for _ in expected:
        at += 4 + struct.unpack_from(">I", data, at)[0]
    return at


@functools.cache
def _fits(kind: type[Any]) -> tuple[Fits, ...]:
    return tuple(map(_fit, typing.get_type_hints(kind).values()))


def _fit(hint: Any) -> Fits:
    """What an annotation allows, read anew: the protocol's own check is what is to be tested."""
    inside = [_fit(inner) for inner in typing.get_args(hint)]
    if isinstance(hint, types.UnionType):
        return lambda value: any(fits(value) for fits in inside)
    if typing.get_origin(hint) is list:
        return lambda value: isinstance(value, list) and len(value) <= protocol.MAX_LIST and all(map(inside[0], value))
    if typing.get_origin(hint) is dict:
        return lambda value: (
            isinstance(value, dict)
            and len(value) <= protocol.MAX_DICTIONARY
            and all(inside[0](key) and inside[1](item) for key, item in value.items())
        )
    if hint is str:
        return lambda value: isinstance(value, str) and len(value) <= protocol.MAX_TEXT
    return lambda value: type(value) is hint or (hint is float and type(value) is int)
