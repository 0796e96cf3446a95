"""What an executable looks like while it is stored: an envelope that names its key, around a zstd frame.

    magic (8) | key (32) | raw size (8) | zstd frame with checksum

The digest of the whole envelope is kept beside it, so that altered, truncated and swapped bytes are all found before
XLA sees one of them.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Callable

import zstandard

from xcache.errors import DamagedError
from xcache.keys import digest

CODEC = "zstd"
# Chosen by what scripts/measure --codecs measured: loading time counts more than size. The window is wide because the
# executables of TPUs repeat themselves over megabytes.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    compression_level=2, window_log=24, write_checksum=True, write_content_size=True
)
MAX_RAW_SIZE = 8 * 1024**3
# From here on the digest is computed on a thread beside the decompression: below, to wake a processor for it takes
# longer than it saves.
_WORTH_A_THREAD = 1024 * 1024
_HEADER = struct.Struct(">8s32sQ")
_MAGIC = b"xcache\x00\x01"


class _Here(threading.local):
    """What is not for two threads at once, and takes long to make."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()


_here = _Here()


def compress(raw: bytes) -> bytes:
    """A zstd frame that carries its size and a checksum."""
    return zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(raw)


def seal(key: str, raw: bytes) -> bytes:
    """The envelope of ``raw`` under ``key``."""
    return _HEADER.pack(_MAGIC, bytes.fromhex(key), len(raw)) + compress(raw)


def open_sealed(key: str, expected_digest: str, sealed: bytes | memoryview, *, behind: bool = False) -> bytes:
    """The raw bytes again, or DamagedError where a single bit is not as it was.

    ``behind`` a program that is busy a second thread would have to wait for the GIL more often than it saves time.
    """
    try:
        return _open(key, expected_digest, sealed, beside=not behind and len(sealed) >= _WORTH_A_THREAD)
    except DamagedError as error:
        raise DamagedError(str(error), expected_digest) from None


def _open(key: str, expected_digest: str, sealed: bytes | memoryview, *, beside: bool) -> bytes:
    digest_of = _digest_beside(sealed) if beside else functools.partial(digest, sealed)
    failure = None
    try:
        raw = _unwrap(key, sealed)
    except DamagedError as error:
        failure = error
    if digest_of() != expected_digest:
        raise DamagedError("its digest differs")
    if failure is not None:
        raise failure
    return raw


def _digest_beside(content: bytes | memoryview) -> Callable[[], str]:
    """Begin to compute a digest on a thread, if there is one to be had; what is returned waits for it."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(digest(content)), name="xcache-digest", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return functools.partial(digest, content)

    def wait() -> str:
        thread.join()
        return found[0] if found else digest(content)

    return wait


def _unwrap(key: str, sealed: bytes | memoryview) -> bytes:
    if len(sealed) < _HEADER.size:
        raise DamagedError("it is shorter than its header")
    magic, owner, size = _HEADER.unpack_from(sealed)
    if magic != _MAGIC:
        raise DamagedError("it is not in this format")
    if owner.hex() != key:
        raise DamagedError("it belongs to another key")
    frame = memoryview(sealed)[_HEADER.size :]
    try:
        parameters = zstandard.get_frame_parameters(frame)
        # Of a frame that says it holds nothing, zstandard reads no more, and not its checksum either.
        if not 0 < size <= MAX_RAW_SIZE or parameters.content_size != size:
            raise DamagedError("its size differs")
        if not parameters.has_checksum:
            raise DamagedError("it has no checksum")
        return _here.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamagedError(f"it cannot be decompressed ({error})") from None
