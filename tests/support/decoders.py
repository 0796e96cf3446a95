"""Targets that read bytes without a socket: each returns whether it accepted any, and raises only on a defect."""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import types
import typing
import zlib
from collections.abc import Callable
from typing import Any

from support.seeds import KEY, RAWS, field
from xcache.errors import DamagedError, ProtocolError, UncacheableError
from xcache.keys import flags, options
from xcache.wire import envelope, framing, protocol
from xcache.wire.hashing import digest
from xcached.tiers import action_results

_RAWS = frozenset(map(digest, RAWS))
# A flag that counts and one that does not, as text and as debug options; no sample contains them.
_COUNTS, _LEFT_OUT = "--xla_only_in_this_check=1", "--xla_dump_to=/only/in/this/check"
_FIELD_COUNTS, _FIELD_LEFT_OUT = (field(3, field(3, field(number, b"only here"))) for number in (2**28 + 7, 109))

Fits = Callable[[Any], bool]


def message(body: bytes) -> bool:
    """Check that a frame's body decodes to a message that can be encoded again, or raises ProtocolError."""
    try:
        request, decoded = framing.decode(body)
    except ProtocolError:
        return False
    assert type(request) is int
    for fits, value in zip(_fits(type(decoded)), decoded, strict=True):
        assert fits(value), decoded
    said = framing.encode(request, decoded)
    again = framing.decode(said[4:])
    # Compare encodings as well, because a NaN is not equal to itself.
    assert again == (request, decoded) or framing.encode(*again) == said
    return True


def stream(data: bytes) -> bool:
    """Read a stream: however it is cut, its frames are those its lengths describe, up to the first invalid one."""
    expected, broken = frames(data)
    for step in (max(1, len(data)), 1 + zlib.crc32(data) % 61):
        reader, got, failed = framing.FrameReader(), [], False
        try:
            for at in range(0, len(data), step):
                got.extend(reader.feed(data[at : at + step]))
        except ProtocolError:
            failed = True
        assert failed == broken
        # Frames that come in one piece with an invalid one may be lost with it.
        assert repr(got) == repr(expected) or (failed and repr(got) == repr(expected[: len(got)]))
        assert failed or reader.unfinished == (_length(expected, data) < len(data))
    return not broken


def sealed_content(sealed: bytes) -> bool:
    """Open a sealed content whose digest fits: one that was sealed before, or DamagedError."""
    try:
        raw = envelope.open_sealed(KEY, digest(sealed), sealed)
    except DamagedError:
        return False
    assert digest(raw) in _RAWS, raw[:100]
    return True


def compile_options(serialized: bytes) -> bool:
    """Check that options are refused, or canonicalized so that only fields that count change the result."""
    try:
        made = options.canonical(serialized, places=None)
    except UncacheableError:
        return False
    assert options.canonical(serialized + _FIELD_LEFT_OUT, places=None) == made
    assert options.canonical(serialized + _FIELD_COUNTS, places=None) != made
    # Numbering the devices anew reads more of the options.
    with contextlib.suppress(UncacheableError):
        options.canonical(serialized, places=((0, 0, None), (1, 0, None)))
    return True


def action_result(data: bytes) -> bool:
    """Check that a message of a cache for Bazel is refused, or gives what can be written and read again."""
    try:
        found = action_results.read(data)
    except ValueError:
        return False
    if isinstance(found, bytes):
        assert action_results.read(action_results.with_content(found)) == found
    else:
        assert action_results.read(action_results.with_reference(found)) == found
    return True


def flag_texts(environment: bytes) -> bool:
    """Check the same of flags and arguments, separated by byte 0x1e."""
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
    """Return the messages of a stream, and whether an invalid one follows."""
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
    """Return how many bytes this many frames take."""
    at = 0
    for _ in expected:
        at += 4 + struct.unpack_from(">I", data, at)[0]
    return at


@functools.cache
def _fits(kind: type[Any]) -> tuple[Fits, ...]:
    return tuple(map(_fit, typing.get_type_hints(kind).values()))


def _fit(hint: Any, most: int | None = None) -> Fits:
    """Check a value against an annotation, without the protocol's own check, which is under test."""
    inside = [_fit(inner, protocol.MAX_FIELDS) for inner in typing.get_args(hint)]
    if isinstance(hint, types.UnionType):
        return lambda value: any(fits(value) for fits in inside)
    if typing.get_origin(hint) is list:
        of_rows = typing.get_origin(typing.get_args(hint)[0]) in (list, dict)
        longest = most or (protocol.MAX_ROWS if of_rows else protocol.MAX_LIST)
        return lambda value: isinstance(value, list) and len(value) <= longest and all(map(inside[0], value))
    if typing.get_origin(hint) is dict:
        return lambda value: (
            isinstance(value, dict)
            and len(value) <= (most or protocol.MAX_DICTIONARY)
            and all(inside[0](key) and inside[1](item) for key, item in value.items())
        )
    if hint is str:
        return lambda value: isinstance(value, str) and len(value) <= protocol.MAX_TEXT
    return lambda value: type(value) is hint or (hint is float and type(value) is int)
