"""The stored form of an executable: a header that names its key (header.py), and a zstd frame with a checksum.

The digest of the whole envelope is kept beside it, so altered, truncated and swapped bytes are found before XLA sees
any of them.
"""

from __future__ import annotations

import zstandard

from xcache.errors import DamagedError
from xcache.wire import bounded, header
from xcache.wire.hashing import digest

CODEC = "zstd"
# Chosen from measurements of scripts/measure --codecs: load time counts more than size. The window is wide because TPU
# executables repeat themselves over megabytes.
_LEVEL = 2
_PARAMETERS = zstandard.ZstdCompressionParameters(
    compression_level=_LEVEL, window_log=24, write_checksum=True, write_content_size=True
)
MAX_RAW_SIZE = 8 * 1024**3
# Bytes that both forms of a program may have when they are decompressed: these, or so many times as many as are stored.
_FEW_BYTES, _TIMES = 128 * 1024**2, 64


def compress(raw: bytes) -> bytes:
    """Return a zstd frame with its size and a checksum."""
    return zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(raw)


def compress_program(program: bytes, located: bytes) -> bytes:
    """Return a frame of a program, and after it one of the same program with source locations.

    The second frame is made with the first content as its dictionary, since most of it is there.
    """
    known = zstandard.ZstdCompressionDict(program, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return compress(program) + zstandard.ZstdCompressor(level=_LEVEL, dict_data=known).compress(located)


def programs_in(content: bytes) -> tuple[bytes, bytes]:
    """Return a program, and the same with source locations (empty if it has none).

    Raise UnreadableError if they are damaged, or become much larger than programs do.
    """
    most = bounded.room(len(content), _FEW_BYTES, _TIMES, MAX_RAW_SIZE)
    end = bounded.end_of_frame(content)
    program, rest = bounded.decompressed(content[:end], most), content[end:]
    return program, bounded.decompressed(rest, most - len(program), program) if rest else b""


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
        declared = bounded.declared(frame)
        if not 0 < size <= MAX_RAW_SIZE or declared.size != size:
            raise DamagedError("its size differs")
        if not declared.has_checksum:
            raise DamagedError("it has no checksum")
        return bounded.decompressed(frame, MAX_RAW_SIZE)
    except bounded.UnreadableError as error:
        raise DamagedError(f"it cannot be decompressed ({error})") from None
