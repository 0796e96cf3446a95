"""The messages under /ac/ of a cache for Bazel: ActionResult of the Remote Execution API, as far as objects need it.

A small object is inside, as what a command printed (``stdout_raw``). A larger one is named, as a file that a command
made (``output_files``), and its content is under /cas/. Caches that check such a message look whether it is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# build.bazel.remote.execution.v2: fields of ActionResult, of OutputFile, and of Digest.
_OUTPUT_FILES, _STDOUT_RAW = 2, 5
_PATH, _DIGEST = 1, 2
_HASH, _SIZE = 1, 2

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_SHA256 = re.compile(rb"[0-9a-f]{64}")
_FILE_NAME = b"object"
# A message that names a file has about 90 bytes. Servers may add who wrote it and when.
MOST_BYTES_OF_REFERENCE = 2048
# The bytes of a message beside its content.
MOST_BYTES_BESIDE = 2048


class Reference(NamedTuple):
    """The SHA-256 and the size of a content under /cas/."""

    sha256: str
    size: int


def with_content(content: bytes) -> bytes:
    """Return the message with a content inside, which is not empty."""
    return _field(_STDOUT_RAW, content)


def with_reference(reference: Reference) -> bytes:
    """Return the message that names a content."""
    digest = _field(_HASH, reference.sha256.encode()) + _varint(_SIZE << 3 | _VARINT) + _varint(reference.size)
    return _field(_OUTPUT_FILES, _field(_PATH, _FILE_NAME) + _field(_DIGEST, digest))


def read(message: bytes) -> bytes | Reference:
    """Return what a message has inside or names; raise ValueError if it is not such a message."""
    content: bytes | None = None
    references = []
    for number, value in _fields(message):
        if number == _STDOUT_RAW:
            content = _as_bytes(value)
        elif number == _OUTPUT_FILES:
            references.append(_reference(_as_bytes(value)))
    if content and not references:
        return content
    if content is None and len(references) == 1:
        return references[0]
    raise ValueError("neither one content nor one file")


def _reference(output_file: bytes) -> Reference:
    digest = dict(_fields(_as_bytes(dict(_fields(output_file)).get(_DIGEST))))
    sha256, size = _as_bytes(digest.get(_HASH)), digest.get(_SIZE, 0)
    if not _SHA256.fullmatch(sha256) or not isinstance(size, int) or size >= 2**63:
        raise ValueError("not a digest")
    return Reference(sha256.decode(), size)


def _as_bytes(value: int | bytes | None) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field is missing, or not of the type")
    return value


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < 2**29:
            raise ValueError("no field has this number")
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            length, at = _read_varint(message, at)
        elif kind in (_FIXED_64, _FIXED_32):
            length = 8 if kind == _FIXED_64 else 4
        else:
            raise ValueError("no field has this type")
        if length > len(message) - at:
            raise ValueError("a field ends beyond the message")
        yield number, message[at : at + length]
        at += length


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise ValueError("a number ends beyond the message")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >= 2**64:
                break
            return value, at
    raise ValueError("a number has more than 64 bits")
