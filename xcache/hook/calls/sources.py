"""Source files, which may be newer than the code that was loaded from them."""

from __future__ import annotations

from pathlib import Path

from xcache.clock import process_began

# Python reads no source file so soon after its start; the clocks of processes and files have this resolution.
_GRACE_SECONDS = 0.01


def read(path: Path) -> tuple[bytes, bool]:
    """Return the content of a source file, and whether it has changed since this process began.

    The process may have loaded what was in the file before. A rename changes ctime, and no mtime.
    """
    content = path.read_bytes()
    return content, path.stat().st_ctime > process_began() + _GRACE_SECONDS
