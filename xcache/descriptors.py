"""Guard xcache's descriptors and files against a program that changes its descriptors, limits and signals.

A program that daemonizes closes every descriptor. The same number may then belong to a file or socket of the program's,
which xcache must neither use nor close.
"""

from __future__ import annotations

import errno
import os
import resource
from io import FileIO

Identity = tuple[int, int]

# A program's connections may take this fraction (1/n) of its descriptors; this many at least and at most.
_DIVISOR, _LEAST, _MOST = 8, 8, 128


def identity(descriptor: int) -> Identity:
    """Return which file, socket or pipe a descriptor refers to."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def is_still(descriptor: int, known: Identity) -> bool:
    """Return whether a descriptor is open and still refers to the same file."""
    try:
        return identity(descriptor) == known
    except OSError:
        return False


class OwnFile(FileIO):
    """A file of xcache's. It closes when nothing refers to it any more, unless the program has closed it before."""

    identity: Identity | None = None

    def __del__(self) -> None:
        # Otherwise Python warns of a file that nobody closed.
        self.close()

    def is_ours(self) -> bool:
        """Return whether it is open and, as far as its ``identity`` was noted, still the same file."""
        return not self.closed and (self.identity is None or is_still(self.fileno(), self.identity))

    def close(self) -> None:
        """Close it, but no file of the program's that has its number now."""
        if self.is_ours():
            super().close()


def may_take() -> int:
    """Return how many descriptors xcache may hold: a small part of those that the program may open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if limit == resource.RLIM_INFINITY else max(_LEAST, min(_MOST, limit // _DIVISOR))


def check_file_size(size: int) -> None:
    """Raise OSError for a file past the program's limit; writing it would raise SIGXFSZ, which can end the program."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if resource.RLIM_INFINITY != limit < size:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
