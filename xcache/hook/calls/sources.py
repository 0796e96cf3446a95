"""Source files, which may be newer than the code that was loaded from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from xcache.clock import process_began
from xcache.hook.structure.encoding import CannotSkipError

# Python reads no source file so soon after its start; the clocks of processes and files have this resolution.
_GRACE_SECONDS = 0.01


def read(path: Path) -> tuple[bytes, bool]:
    """Return the content of a source file, and whether it has changed since this process began.

    The process may have loaded what was in the file before. A rename changes ctime, and no mtime.
    """
    content = path.read_bytes()
    return content, path.stat().st_ctime > process_began() + _GRACE_SECONDS


def state(path: Path) -> tuple[int, int]:
    """Return numbers that change with a file."""
    status = path.stat()
    return status.st_ctime_ns, status.st_size


def check(files: Mapping[Path, tuple[int, int]]) -> None:
    """Raise CannotSkipError if a file has changed since a version was made of it: it may have been imported since."""
    for path, known in files.items():
        try:
            is_same = state(path) == known
        except OSError:
            is_same = False
        if not is_same:
            raise CannotSkipError(f"changed source file: {path}")
