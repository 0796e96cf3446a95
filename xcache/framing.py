"""Messages as bytes and back: frames, and what their fields may hold. No I/O happens here."""

import functools
import struct
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgpack

from xcache.errors import ProtocolError
from xcache.protocol import MAX_DICTIONARY, MAX_FRAME, MAX_LIST, MAX_TEXT, Message

_MESSAGES: dict[str, type[Any]] = {message.__name__: message for message in typing.get_args(Message)}
_LENGTH = struct.Struct(">I")
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
