"""The one reader of foreign bytes: whoever reads states a bound, and it is checked before memory is taken.

Foreign is what another process, user or machine may have written: messages, objects of remote stores, bundles, files.
No other module decompresses, decodes or reads to an end; ruff and tests/fuzz/test_bounds.py see to it.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgpack
import zstandard

# A list takes memory for as many elements as it claims, and a list in it, too. Less than this is not worth a look.
_FEW_BYTES = 1024
_READ_BYTES = 1024**2
# A file that people write, or one of /proc.
SMALL_FILE = 1024**2
# Parts of a frame of zstd: bytes of a block's head and of a checksum, and the type that says one byte many times.
_BLOCK_HEAD, _CHECKSUM, _REPEATED, _RESERVED = 3, 4, 1, 3
_MALFORMED = (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException)


class UnreadableError(ValueError):
    """The bytes are not of their form, or would take more memory than they may."""


class _PerThread(threading.local):
    """A decompressor for each thread: it is not thread-safe, and slow to make."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()


_per_thread = _PerThread()


class Declared(NamedTuple):
    """What the head of a zstd frame says: bytes of its content, and whether a checksum follows."""

    size: int
    has_checksum: bool


def room(packed: int, few: int, times: int, most: int) -> int:
    """Return how many bytes so many may become: a few in any case, or so many times as much as they are."""
    return min(most, max(few, times * packed))


def declared(frame: bytes | memoryview) -> Declared:
    """Return what a frame's head declares; the size is very large if it declares none."""
    try:
        found = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError as error:
        raise UnreadableError(str(error)) from None
    return Declared(found.content_size, found.has_checksum)


def decompressed(frame: bytes | memoryview, most: int, dictionary: bytes = b"") -> bytes:
    """Return the content of exactly one zstd frame, which must declare a size of at most ``most`` bytes.

    ``dictionary`` is the content that it was compressed with.
    """
    size = declared(frame).size
    # zstandard does not read on, not even to the checksum, if a frame declares that it is empty.
    if not 0 < size <= most:
        raise UnreadableError("it declares a size that is not accepted")
    try:
        if dictionary:
            known = zstandard.ZstdCompressionDict(dictionary, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
            return zstandard.ZstdDecompressor(dict_data=known).decompress(frame, allow_extra_data=False)
        return _per_thread.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise UnreadableError(str(error)) from None


def end_of_frame(content: bytes) -> int:
    """Return where the first zstd frame of a content ends, without decompressing it."""
    has_checksum = declared(content).has_checksum
    at, is_last = zstandard.frame_header_size(content), False
    while not is_last:
        head = int.from_bytes(content[at : at + _BLOCK_HEAD], "little")
        is_last, kind, size = bool(head & 1), head >> 1 & 3, head >> 3
        at += _BLOCK_HEAD + (1 if kind == _REPEATED else size)
        if kind == _RESERVED or at > len(content):
            raise UnreadableError("its frame is cut off, or has a block of no type")
    return at + _CHECKSUM * has_checksum


def inflated(content: bytes, most: int) -> bytes:
    """Return what zlib has compressed to this, of at most ``most`` bytes."""
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(content, most + 1)
    except zlib.error as error:
        raise UnreadableError(str(error)) from None
    if len(found) > most or not reader.eof or reader.unused_data:
        raise UnreadableError(f"it is cut off, or has more than {most} bytes")
    return found


class Shape(NamedTuple):
    """The most that one msgpack value may have: elements of a list, fields of a map, and lists and maps in all.

    Keys of maps are texts or bytes, unless the shape says otherwise.
    """

    elements: int
    fields: int
    containers: int
    only_text_keys: bool = True


def unpacked(packed: bytes | memoryview, shape: Shape) -> Any:
    """Return the value of msgpack that these bytes are, of this shape.

    It takes 64 times the bytes at most, and 512 for each list and map: one byte makes an empty one, so that a few
    hundred could be a million of them.
    """
    if len(packed) > _FEW_BYTES:
        _require_whole(packed)
    # A smaller value has no more than that.
    count = _counter(shape.containers) if len(packed) > shape.containers else None
    try:
        return msgpack.unpackb(
            packed,
            raw=False,
            strict_map_key=shape.only_text_keys,
            max_array_len=min(shape.elements, len(packed)),
            max_map_len=min(shape.fields, len(packed)),
            max_ext_len=0,
            list_hook=count,
            object_hook=count,
        )
    except _MALFORMED as error:
        raise _unreadable(error) from None


def rows(packed: bytes, most: int, elements: int, longest: int) -> Iterator[list[Any]]:
    """Yield the rows of a msgpack list: at most ``most``, each a flat list of so many elements, none longer.

    One row is made at a time: a list of a million takes more memory than what the reader keeps of it.
    """
    reader = msgpack.Unpacker(
        max_buffer_size=max(1, len(packed)), max_array_len=elements, max_map_len=0, max_str_len=longest, max_bin_len=0,
        max_ext_len=0, list_hook=_flat,
    )  # fmt: skip
    reader.feed(packed)
    try:
        count = reader.read_array_header()
        if count > min(most, len(packed)):
            raise UnreadableError(f"it has more than {most} rows, or claims to")
        for _ in range(count):
            row = reader.unpack()
            if type(row) is not list:
                raise UnreadableError("a row is no list")
            yield row
    except _MALFORMED as error:
        raise _unreadable(error) from None
    if reader.tell() != len(packed):
        raise UnreadableError("something follows the last row")


def first_values(packed: bytes, count: int) -> list[Any]:
    """Return the first numbers and texts in a msgpack list of which these are the first bytes; fewer if it is none."""
    found: list[Any] = []
    reader = msgpack.Unpacker(max_array_len=0, max_map_len=0, max_ext_len=0)
    reader.feed(packed)
    try:
        reader.read_array_header()
        while len(found) < count:
            found.append(reader.unpack())
    except _MALFORMED:
        pass
    return found


def parsed_json(text: str | bytes, most: int) -> Any:
    """Return the value of at most ``most`` bytes of JSON."""
    return _parsed(json.loads, text, most)


def parsed_toml(text: str, most: int) -> dict[str, Any]:
    """Return the tables of at most ``most`` characters of TOML."""
    # It takes several milliseconds to import, and most users have no file.
    import tomllib

    found: dict[str, Any] = _parsed(tomllib.loads, text, most)
    return found


def read_some(file: IO[bytes], most: int) -> bytes:
    """Return the next bytes of an open file, at most so many, up to its end."""
    parts, left = [], most
    # The file takes memory for what is asked for, before it looks how much there is.
    while left > 0 and (part := file.read(min(left, _READ_BYTES))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_all(file: IO[bytes], most: int) -> bytes:
    """Read a file from its beginning to its end; raise UnreadableError if it has more than ``most`` bytes."""
    # A pipe, and a file of the kernel's, say that they have none.
    if os.fstat(file.fileno()).st_size <= most and len(found := read_some(file, most + 1)) <= most:
        return found
    raise UnreadableError(f"it has more than {most} bytes")


def content_of(path: Path | str, most: int) -> bytes:
    """Return the content of a file; raise OSError, or UnreadableError if it has more than ``most`` bytes."""
    with open(path, "rb", buffering=0) as file:
        return read_all(file, most)


def text_of(path: Path | str, most: int = SMALL_FILE, errors: str = "strict") -> str:
    """Return the text in a file; raise as ``content_of`` does, or UnicodeDecodeError."""
    return content_of(path, most).decode("utf-8", errors)


def pieces(descriptor: int, at: int, size: int) -> Iterator[bytes]:
    """Yield the bytes of a file from a place on; they end early where the file does."""
    end = at + size
    while at < end and (piece := os.pread(descriptor, min(_READ_BYTES, end - at), at)):
        yield piece
        at += len(piece)


def _parsed(parse: Callable[[Any], Any], text: str | bytes, most: int) -> Any:
    if len(text) > most:
        raise UnreadableError(f"it has more than {most} bytes")
    try:
        return parse(text)
    # A document of a thousand brackets.
    except RecursionError:
        raise UnreadableError("it is too deep") from None


def _require_whole(packed: bytes | memoryview) -> None:
    """Walk through a value without making it: then what its lists and maps claim is there."""
    reader = msgpack.Unpacker(max_buffer_size=len(packed))
    reader.feed(packed)
    try:
        reader.skip()
    except _MALFORMED as error:
        raise _unreadable(error) from None
    if reader.tell() != len(packed):
        raise UnreadableError("something follows the value")


def _unreadable(error: Exception) -> UnreadableError:
    if isinstance(error, UnreadableError):
        return error
    return UnreadableError(f"{type(error).__name__}: {str(error)[:200]}")


def _counter(most: int) -> Callable[[Any], Any]:
    """Return a function that msgpack calls with each list and map; it raises ValueError for the one too many."""
    left = iter(range(most))

    def count(found: Any) -> Any:
        if next(left, None) is None:
            raise ValueError(f"more than {most} lists and maps")
        return found

    return count


def _flat(found: list[Any]) -> list[Any]:
    if any(isinstance(each, (list, Mapping)) for each in found):
        raise ValueError("a row is not flat")
    return found
