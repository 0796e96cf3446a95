"""The header of an envelope, which names the key of the executable inside: magic (8) | key (32) | raw size (8)."""

from __future__ import annotations

import struct

_HEADER = struct.Struct(">8s32sQ")
_MAGIC = b"xcache\x00\x01"
SIZE = _HEADER.size


def pack(key: str, raw_size: int) -> bytes:
    """Return the header of an executable of ``raw_size`` bytes."""
    return _HEADER.pack(_MAGIC, bytes.fromhex(key), raw_size)


def unpack(beginning: bytes) -> tuple[str, int] | None:
    """Return the key and the raw size; None if this is no envelope's beginning."""
    if len(beginning) < SIZE:
        return None
    magic, key, raw_size = _HEADER.unpack_from(beginning)
    return (key.hex(), raw_size) if magic == _MAGIC else None
