"""The messages between a worker and the process that started it: a length, and a msgpack map."""

from __future__ import annotations

import struct
from typing import IO, Any

import msgpack

_LENGTH = struct.Struct(">Q")


def write_frame(file: IO[bytes], message: dict[str, Any]) -> None:
    """Write a message."""
    packed = msgpack.packb(message)
    file.write(_LENGTH.pack(len(packed)))
    file.write(packed)
    file.flush()


def read_frame(file: IO[bytes]) -> dict[str, Any] | None:
    """Return the next message; None if the other end is gone, or speaks of something else."""
    beginning = file.read(_LENGTH.size)
    if len(beginning) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(beginning)
    packed = file.read(length)
    return unpacked(packed) if len(packed) == length else None


def unpacked(content: bytes) -> dict[str, Any] | None:
    """Return the map that was packed, or None."""
    try:
        found = msgpack.unpackb(content)
    except (ValueError, msgpack.exceptions.UnpackException):
        return None
    return found if isinstance(found, dict) else None
