"""Read serialized protocol buffers, and write parts: fields by number, without a description of the message."""

from __future__ import annotations

from collections.abc import Iterator


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of one message as (number, value), in order."""
    at = 0
    while at < len(message):
        tag, at = varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = varint(message, at)
            yield number, value
            continue
        if kind == 2:
            length, at = varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + length > len(message):
            raise IndexError("cut short")
        yield number, message[at : at + length]
        at += length


def field_at(message: bytes, path: tuple[int, ...]) -> int | bytes | None:
    """Return the last field at a path of field numbers, or None."""
    number, *rest = path
    found: int | bytes | None = None
    for here, value in fields(message):
        if here == number:
            found = value
    if rest:
        return field_at(found, tuple(rest)) if isinstance(found, bytes) else None
    return found


def varint(message: bytes, at: int) -> tuple[int, int]:
    """Read one number; return it and the offset after it."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("varint")


def varint_bytes(number: int) -> bytes:
    """Return a number as it stands in a message."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])
