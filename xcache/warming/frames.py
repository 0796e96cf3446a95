"""The messages between a worker and the process that started it: a length, and a msgpack map."""

from __future__ import annotations

import struct
from typing import IO, Any

import msgpack

from xcache.wire import bounded
from xcache.wire.envelope import MAX_RAW_SIZE

_LENGTH = struct.Struct(">Q")
# A message is a map of texts and bytes; what was planned has lists in it.
_SHAPE = bounded.Shape(elements=100_000, fields=1000, containers=100_000)


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
    if length > MAX_RAW_SIZE:
        return None
    packed = bounded.read_some(file, length)
    return unpacked(packed) if len(packed) == length else None


def unpacked(content: bytes) -> dict[str, Any] | None:
    """Return the map that was packed, or None."""
    try:
        found = bounded.unpacked(content, _SHAPE)
    except bounded.UnreadableError:
        return None
    return found if isinstance(found, dict) else None
