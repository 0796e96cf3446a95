"""The digest by which keys, contents and components are named."""

import hashlib

# hashlib releases the GIL for more than 2047 bytes. While another thread is busy, getting the GIL back takes longer
# than hashing a small content, so small contents are hashed in pieces that keep the GIL.
_PIECE_BYTES, _SMALL_BYTES = 2047, 256 * 1024
_DIGITS = frozenset("0123456789abcdef")


def digest(content: bytes | memoryview) -> str:
    """Return the SHA-256 in lower-case hexadecimal, the one digest used everywhere."""
    if len(content) > _SMALL_BYTES:
        return hashlib.sha256(content).hexdigest()
    found, view = hashlib.sha256(), memoryview(content)
    for at in range(0, len(content), _PIECE_BYTES):
        found.update(view[at : at + _PIECE_BYTES])
    return found.hexdigest()


def is_digest(text: str) -> bool:
    """Return whether a text is a digest as xcache writes them."""
    return len(text) == 64 and _DIGITS.issuperset(text)
