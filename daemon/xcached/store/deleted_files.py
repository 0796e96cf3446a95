"""Deleted files that a client may still have open: their bytes stay on the disk until the last reader closes them.

A client could fill the disk that way without any quota charging it. Readers need only seconds for a file they were
handed; after a minute the daemon truncates it, even if it is still open.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import time
from pathlib import Path

# Seconds a reader has to read a deleted file, and the total size beyond which the oldest are truncated sooner.
_READ_SECONDS, _MOST_BYTES = 60.0, 256 * 1024**2
# There may be tens of thousands, and the writer thread has other work.
_EMPTIED_AT_ONCE = 64


class DeletedFiles:
    """A folder of files to be deleted. Belongs to the writer thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        # When each file was deleted, and its size; oldest first.
        self._files: dict[Path, tuple[float, int]] = {}
        self.bytes = 0
        for path in folder.iterdir() if folder.is_dir() else ():
            self._note(path)

    def delete(self, path: Path) -> bool:
        """Delete a file, now or after its readers have had time; return whether it is deleted now."""
        deleted = self._new_name()
        # Rename it first, so that nobody can open it any more.
        path.rename(deleted)
        return self._let_go(deleted)

    def replace(self, path: Path, other: Path) -> None:
        """Rename ``other`` to ``path``, where a file may exist and be open."""
        deleted = self._new_name()
        # The old file may not exist, and some file systems have no hard links.
        with contextlib.suppress(OSError):
            os.link(path, deleted)
        try:
            other.rename(path)
        finally:
            if deleted.exists():
                self._let_go(deleted)

    def release(self) -> None:
        """Truncate and delete some of the files whose time is over."""
        for path in list(itertools.islice(self._files, _EMPTIED_AT_ONCE)):
            since, _ = self._files[path]
            if time.monotonic() < since + _READ_SECONDS:
                return
            self._empty(path)

    def empty_all(self) -> bool:
        """Truncate and delete every file because the disk is short of space; return whether there was any."""
        found = bool(self._files)
        for path in list(self._files):
            self._empty(path)
        return found

    def _new_name(self) -> Path:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        return self._folder / f"{os.getpid()}-{time.time_ns()}-{next(self._numbers)}"

    def _note(self, path: Path) -> None:
        size = path.stat().st_size
        self._files[path] = time.monotonic(), size
        self.bytes += size

    def _let_go(self, path: Path) -> bool:
        if not _may_be_open(path):
            path.unlink()
            return True
        self._note(path)
        # A file larger than the limit by itself keeps its time until the next one comes.
        while self.bytes > _MOST_BYTES and len(self._files) > 1:
            self._empty(next(iter(self._files)))
        return False

    def _empty(self, path: Path) -> None:
        _, size = self._files.pop(path)
        self.bytes -= size
        with contextlib.suppress(OSError):
            # The quarantine may hold a hard link to the same file.
            if path.stat().st_nlink == 1:
                os.truncate(path, 0)
            path.unlink()


def _may_be_open(path: Path) -> bool:
    """Return whether any process may have a file open or mapped: the kernel grants a write lease only if none has."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (OSError, AttributeError):
        # It is open, or this file system or operating system has no leases.
        return True
    finally:
        os.close(descriptor)
    return False
