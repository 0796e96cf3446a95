"""Encode messages into frames and decode them, checking every field. No I/O happens here."""

from __future__ import annotations

import functools
import struct
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgpack

from xcache.errors import ProtocolError
from xcache.wire import bounded
from xcache.wire.protocol import (
    MAX_CONTAINERS,
    MAX_DICTIONARY,
    MAX_FIELDS,
    MAX_FRAME,
    MAX_LIST,
    MAX_ROWS,
    MAX_TEXT,
    OfPrograms,
)

if TYPE_CHECKING:
    from xcache.wire.protocol import Message

# Hello and Welcome grow at their end: they have at least the fields of the first version, and may have more than ours.
_SHORTEST = {"Hello": 4, "Welcome": 4}
_LENGTH = struct.Struct(">I")
_SHAPE = bounded.Shape(MAX_LIST, MAX_DICTIONARY, MAX_CONTAINERS)
Check = Callable[[Any], bool]


def _by_name(messages: Any) -> dict[str, type[Any]]:
    return {message.__name__: message for message in typing.get_args(messages)}


_OF_PROGRAMS = _by_name(OfPrograms)


@functools.cache
def _of_commands() -> dict[str, type[Any]]:
    """Return the messages of the command line, which programs neither send nor get."""
    from xcache.wire import commands

    return _by_name(commands.Message)


def _class_of(name: str) -> type[Any]:
    found = _OF_PROGRAMS.get(name) or _of_commands().get(name)
    if found is None:
        raise ProtocolError(f"unknown message {name[:40]!r}")
    return found


@functools.cache
def _checks(name: str) -> tuple[tuple[str, Check], ...]:
    """Return the fields of a message and a check for each, made from its annotation."""
    return tuple((field, _check_of(hint)) for field, hint in typing.get_type_hints(_class_of(name)).items())


_SIMPLE = frozenset((str, int, float, bool, bytes, type(None)))


def _check_of(hint: Any, most_items: int = MAX_LIST, most_names: int = MAX_DICTIONARY) -> Check:
    if isinstance(hint, types.UnionType):
        options = typing.get_args(hint)
        if _SIMPLE.issuperset(options):
            # A message has thousands of them.
            kinds = frozenset((*options, int)) if float in options else frozenset(options)
            return lambda value: type(value) in kinds and (type(value) is not str or len(value) <= MAX_TEXT)
        checks = [_check_of(option) for option in options]
        return lambda value: any(fits(value) for fits in checks)
    inside = [_check_of(inner, MAX_FIELDS, MAX_FIELDS) for inner in typing.get_args(hint)]
    if typing.get_origin(hint) is list:
        if typing.get_origin(typing.get_args(hint)[0]) in (list, dict):
            most_items = min(most_items, MAX_ROWS)
        return lambda value: type(value) is list and len(value) <= most_items and all(map(inside[0], value))
    if typing.get_origin(hint) is dict:
        return lambda value: (
            type(value) is dict
            and len(value) <= most_names
            and all(map(inside[0], value))
            and all(map(inside[1], value.values()))
        )
    if hint is str:
        return lambda value: type(value) is str and len(value) <= MAX_TEXT
    if hint is float:
        # msgpack writes 1.0 as a float and 1 as an int; a float field accepts both.
        return lambda value: type(value) in (float, int)
    return lambda value: type(value) is hint


def encode(request: int, message: Message) -> bytes:
    """Encode one frame, length first; raise ProtocolError for a message that the other end would not accept."""
    name = type(message).__name__
    check(message)
    try:
        body = typing.cast("bytes", msgpack.packb([request, name, *message], use_bin_type=True))
    except (ValueError, OverflowError) as error:
        raise ProtocolError(f"a {name} that cannot be written: {error}") from None
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"a {name} of {len(body)} bytes is above the limit of {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes | memoryview) -> tuple[int, Message]:
    """Return the request id and message in a frame's body; raise ProtocolError unless every field is valid."""
    try:
        parts = bounded.unpacked(body, _SHAPE)
    except bounded.UnreadableError as error:
        raise ProtocolError(f"not a message: {error}") from None
    if type(parts) is not list or len(parts) < 2 or type(parts[0]) is not int or not isinstance(parts[1], str):
        raise ProtocolError("not a message: no request id and name")
    request, name, values = parts[0], parts[1], parts[2:]
    message, fields = _class_of(name), _checks(name)
    if len(values) != len(fields) and len(values) < _SHORTEST.get(name, len(values) + 1):
        raise ProtocolError(f"{name} has {len(fields)} fields, not {len(values)}")
    _check(name, values)
    return request, message(*values[: len(fields)])


def check(message: Message) -> None:
    """Raise ProtocolError if a field is of the wrong type or too long."""
    _check(type(message).__name__, message)


def _check(name: str, values: Sequence[Any]) -> None:
    for (field, fits), value in zip(_checks(name), values, strict=False):
        if not fits(value):
            raise ProtocolError(f"{name}.{field} is of the wrong type or too long")


class FrameReader:
    """Cuts a stream of bytes into frames; holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def unfinished(self) -> bool:
        """Whether a frame has begun and not ended."""
        return bool(self._buffer)

    @property
    def ready(self) -> bool:
        """Whether ``take`` would return a message or raise an error."""
        if len(self._buffer) < _LENGTH.size:
            return False
        end = self._end
        return len(self._buffer) >= end or end - _LENGTH.size > MAX_FRAME

    @property
    def next_name(self) -> str:
        """The name of the message that is ready; empty if the frame has none."""
        # Enough for the array's header, the request id and the longest name.
        found = bounded.first_values(bytes(self._buffer[_LENGTH.size : _LENGTH.size + 64]), 2)
        return str(found[1]) if len(found) == 2 else ""

    @property
    def missing(self) -> int:
        """Bytes that the unfinished frame still lacks; 0 while its length is not known."""
        return max(0, self._end - len(self._buffer)) if len(self._buffer) >= _LENGTH.size else 0

    @property
    def _end(self) -> int:
        return _LENGTH.size + int(_LENGTH.unpack_from(self._buffer)[0])

    def add(self, data: bytes | memoryview) -> None:
        """Add received bytes."""
        self._buffer += data

    def take(self) -> tuple[int, int, Message] | None:
        """Return the size, request id and message of the next frame, or None while it is incomplete."""
        if len(self._buffer) < _LENGTH.size:
            return None
        end = self._end
        if end - _LENGTH.size > MAX_FRAME:
            raise ProtocolError(f"a frame of {end - _LENGTH.size} bytes is above the limit of {MAX_FRAME}")
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return (end, *decode(body))

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[int, Message]]:
        """Add received bytes, and yield the messages that are now complete."""
        self.add(data)
        while (taken := self.take()) is not None:
            _, request, message = taken
            yield request, message
