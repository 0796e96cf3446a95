"""The tokens of msgpack: container heads and leaves, valid and not."""

from __future__ import annotations

import struct
from typing import Any

import msgpack

from xcache.wire import protocol


def tokens(value: Any) -> list[bytes]:
    """Split a value as msgpack writes it into container heads and leaves."""
    packer = msgpack.Packer()
    if isinstance(value, list):
        return [packer.pack_array_header(len(value)), *(token for item in value for token in tokens(item))]
    if isinstance(value, dict):
        flat = [part for pair in value.items() for part in pair]
        return [packer.pack_map_header(len(value)), *(token for item in flat for token in tokens(item))]
    return [packer.pack(value)]


def kind_of(token: bytes) -> str:
    """Return a token's kind, by its first byte."""
    return next(kind for last, kind in _KINDS if token[0] <= last)


def more_by(head: bytes, count: int) -> bytes:
    """Return the head of a small array with this many more items."""
    return bytes([head[0] + count]) if len(head) == 1 and 0x90 <= head[0] + count <= 0x9F else head


_KINDS = [
    *((0x7F, "int"), (0x8F, "map"), (0x9F, "array"), (0xBF, "str"), (0xC3, "constant"), (0xC6, "bin"), (0xC9, "ext")),
    *((0xCB, "float"), (0xD3, "int"), (0xD8, "ext"), (0xDB, "str"), (0xDD, "array"), (0xDF, "map"), (0xFF, "int")),
]
_INTS = [0, 1, -1, -32, -33, 127, 128, 255, 256, 2**16, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]
_FLOATS = [0.0, -0.0, 1.5, float("nan"), float("inf"), float("-inf"), 5e-324]
_NAMES = ["Hello", "Get", "Put", "Found", "Missing", "Report", "Refused", "Nothing", "__class__"]
_TEXTS = ["", "x", "\0", "ü", "\U0010ffff", "../" * 20]
_LONG = ["k" * protocol.MAX_TEXT, "k" * (protocol.MAX_TEXT + 1), "ü" * protocol.MAX_TEXT]
_LISTS = [[], [1], ["a", "b"], [None] * 16, [[[[]]]], ["k"] * (protocol.MAX_LIST + 1), [0] * protocol.MAX_LIST]
_DICTIONARIES = [{}, {"a": "b"}, {"a": 1, "b": 2.5}, {1: 2}, {b"a": 1}, {"a": [1]}, {"a": {"b": {}}}]
_NO_TEXTS = {
    "overlong": b"\xc0\x80",
    "a surrogate": b"\xed\xa0\x80",
    "beyond the last letter": b"\xf4\x90\x80\x80",
    "a lone continuation": b"\x80",
    "cut short": b"\xe2\x82",
    "a byte order mark": b"\xff\xfe",
}
_LONGER_THAN_NEEDED = [
    *(b"\xcf" + bytes(8), b"\xd3" + bytes(8), b"\xcc\x00", b"\xd0\x05"),
    *(b"\xd9\x01x", b"\xda\x00\x01x", b"\xc4\x01x", b"\xc5\x00\x01x", b"\xc6\x00\x00\x00\x01x"),
    *(b"\xdc\x00\x02", b"\xdd\x00\x00\x00\x01", b"\xde\x00\x01", b"\xdf\x00\x00\x00\x01"),
]
_SINGLE_PRECISION = [b"\xca\x7f\xc0\x00\x00", b"\xca\x3f\x80\x00\x00"]
_LENGTHS_THAT_LIE = [
    *(b"\xd9\xff", b"\xda\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff"),
    *(b"\xc4\xff", b"\xc5\xff\xff", b"\xc6\xff\xff\xff\xff"),
    *(b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdd\x00\x00\x10\x00", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff"),
    *(b"\x9f", b"\x8f", b"\xbf"),
]
_EXTENSIONS = [
    *(b"\xd4\x05\x00", b"\xd5\xff\x00\x00", b"\xd8\x01" + bytes(16)),
    *(b"\xc7\x00\x05", b"\xc8\xff\xff\x01", b"\xc9\xff\xff\xff\xff\x01"),
    # Timestamps.
    *(b"\xd6\xff\x00\x00\x00\x01", b"\xd7\xff" + bytes(8), b"\xc7\x0c\xff" + bytes(12)),
]
_THE_SAME_KEY_TWICE = [b"\x82\xa1a\x01\xa1a\x02", b"\x82\xa1a\xa1b\xa1a\xa1c"]
_DEPTH = [
    *(b"\x91" * 40, b"\x91" * 600, b"\x91" * 5000, b"\x92\x01" * 2000),
    *(b"\x81\xa1a" * 600, b"\x81\xa1a" * 5000),
    *(b"\x91" * 500 + b"\xc0", b"\x91" * 1000 + b"\xc0", b"\x81\xa1a" * 500 + b"\xc0"),
]

ODD_TOKENS: list[bytes] = [
    *map(msgpack.packb, (None, True, False, *_INTS, -(2**31) - 1, -(2**63), *_FLOATS, *_NAMES, *_TEXTS, *_LONG)),
    *map(msgpack.packb, (b"", b"x", b"x" * 300, *_LISTS, *_DICTIONARIES)),
    *(struct.pack(">BI", 0xDB, len(content)) + content for content in _NO_TEXTS.values()),
    *(*_LONGER_THAN_NEEDED, *_SINGLE_PRECISION, *_LENGTHS_THAT_LIE, *_EXTENSIONS, *_THE_SAME_KEY_TWICE, *_DEPTH),
    # The one byte that msgpack never uses.
    b"\xc1",
]
# Replace numbers by numbers and texts by texts: a valid type gets further.
ALIKE = {kind: [token for token in ODD_TOKENS if kind_of(token) == kind] for _, kind in _KINDS}
