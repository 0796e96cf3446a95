"""The digest by which keys, contents and components are named."""

import contextlib
import hashlib
import os
import threading
from io import BufferedReader

# hashlib releases the GIL for more than 2047 bytes. While another thread is busy, getting the GIL back takes longer
# than hashing a small content, so small contents are hashed in pieces that keep the GIL.
_PIECE_BYTES, _SMALL_BYTES = 2047, 256 * 1024
# The parts of a large file, and the bytes that are read at once.
_PART_BYTES, _READ_BYTES = 16 * 1024**2, 1024**2
_DIGITS = frozenset("0123456789abcdef")


def digest(content: bytes | memoryview) -> str:
    """Return the SHA-256 in lower-case hexadecimal, the one digest used everywhere."""
    if len(content) > _SMALL_BYTES:
        return hashlib.sha256(content).hexdigest()
    found, view = hashlib.sha256(), memoryview(content)
    for at in range(0, len(content), _PIECE_BYTES):
        found.update(view[at : at + _PIECE_BYTES])
    return found.hexdigest()


def file_digest(file: BufferedReader, threads: int = 1) -> str:
    """Return the digest of a file's content: of a large file, the digest of the digests of its parts.

    So several threads can make it. A compiler for GPUs has gigabytes, and the first program on a machine waits.
    """
    descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
    if size <= _PART_BYTES:
        return hashlib.file_digest(file, "sha256").hexdigest()
    parts = [b""] * -(-size // _PART_BYTES)
    failures: list[BaseException] = []

    def read(first: int) -> None:
        try:
            for number in range(first, len(parts), threads):
                parts[number] = _part_digest(descriptor, number)
        except BaseException as error:  # noqa: BLE001 - a part that is missing would make another digest
            failures.append(error)

    helpers = [
        threading.Thread(target=read, args=(number,), name="xcache-hash", daemon=True) for number in range(1, threads)
    ]
    mine = [0]
    with contextlib.ExitStack() as stack:
        for number, helper in enumerate(helpers, 1):
            try:
                helper.start()
            except RuntimeError:
                # The process may have no more threads.
                mine.append(number)
            else:
                stack.callback(helper.join)
        for number in mine:
            read(number)
    if failures:
        raise failures[0]
    return digest(b"".join(parts))


def _part_digest(descriptor: int, number: int) -> bytes:
    found, at, end = hashlib.sha256(), number * _PART_BYTES, (number + 1) * _PART_BYTES
    while at < end and (piece := os.pread(descriptor, min(_READ_BYTES, end - at), at)):
        found.update(piece)
        at += len(piece)
    return found.digest()


def is_digest(text: str) -> bool:
    """Return whether a text is a digest as xcache writes them."""
    return len(text) == 64 and _DIGITS.issuperset(text)
