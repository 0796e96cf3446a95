"""The stored form of an executable: a header that names its key (header.py), and a zstd frame with a checksum.

The digest of the whole envelope is kept beside it, so altered, truncated and swapped bytes are found before XLA sees
any of them.
"""

from __future__ import annotations

import threading

import zstandard

from xcache.errors import DamagedError
from xcache.wire import header
from xcache.wire.hashing import digest

CODEC = "zstd"
# Chosen from measurements of scripts/measure --codecs: load time counts more than size. The window is wide because TPU
# executables repeat themselves over megabytes.
_LEVEL = 2
_PARAMETERS = zstandard.ZstdCompressionParameters(
    compression_level=_LEVEL, window_log=24, write_checksum=True, write_content_size=True
)
MAX_RAW_SIZE = 8 * 1024**3


class _PerThread(threading.local):
    """A decompressor for each thread: it is not thread-safe, and slow to make."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()


_per_thread = _PerThread()


def compress(raw: bytes) -> bytes:
    """Return a zstd frame with its size and a checksum."""
    return zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(raw)


def compress_program(program: bytes, located: bytes) -> bytes:
    """Return a frame of a program, and after it one of the same program with source locations.

    The second frame is made with the first content as its dictionary, since most of it is there.
    """
    return compress(program) + zstandard.ZstdCompressor(level=_LEVEL, dict_data=_dictionary(program)).compress(located)


def programs_in(content: bytes) -> tuple[bytes, bytes]:
    """Return a program, and the same with source locations (empty if it has none); raise ZstdError if it is damaged."""
    first = zstandard.ZstdDecompressor().decompressobj()
    program = first.decompress(content)
    rest = first.unused_data
    return program, zstandard.ZstdDecompressor(dict_data=_dictionary(program)).decompress(rest) if rest else b""


def _dictionary(content: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def seal(key: str, raw: bytes) -> bytes:
    """Return ``raw`` in an envelope for ``key``."""
    return header.pack(key, len(raw)) + compress(raw)


def open_sealed(key: str, expected_digest: str, sealed: bytes) -> bytes:
    """Return the raw bytes; raise DamagedError if a single bit has changed."""
    if digest(sealed) != expected_digest:
        raise DamagedError("its digest differs", expected_digest)
    try:
        return _unwrap(key, sealed)
    except DamagedError as error:
        error.digest, error.whole = expected_digest, True
        raise


def _unwrap(key: str, sealed: bytes) -> bytes:
    found = header.unpack(sealed)
    if found is None:
        raise DamagedError("it is not in this format")
    owner, size = found
    if owner != key:
        raise DamagedError("it belongs to another key")
    frame = memoryview(sealed)[header.SIZE :]
    try:
        parameters = zstandard.get_frame_parameters(frame)
        # zstandard does not read on, not even to the checksum, if a frame declares that it is empty.
        if not 0 < size <= MAX_RAW_SIZE or parameters.content_size != size:
            raise DamagedError("its size differs")
        if not parameters.has_checksum:
            raise DamagedError("it has no checksum")
        return _per_thread.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamagedError(f"it cannot be decompressed ({error})") from None
