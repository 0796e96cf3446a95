"""Find out whether a toolchain is still installed: its files are compared with what they were."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xcache.wire.hashing import file_digest
from xcache.wire.protocol import InstalledFile
from xcached.toolchains.sight import Sight

# Installed; not visible from here (in a container, or to another user); no longer installed.
HERE, ELSEWHERE, GONE = "here", "elsewhere", "gone"
_LARGEST_FILE_BYTES = 8 * 1024**3
_MOST_FILES = 500
# Bytes of a mark's numbers and digest, roughly, besides its path.
_MARK_BYTES = 200
# Bytes of its rows besides the marks and texts, roughly; the place may be as long as a path.
_ROW_BYTES = 5000
# Errors that prove a file to be gone. Others (an unreachable disk, an expired ticket, too few descriptors) say nothing
# about the file.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclasses.dataclass
class Installation:
    """One toolchain's files in one place."""

    toolchain: str
    uid: int
    files: tuple[InstalledFile, ...]
    state: str
    seen_at: float
    # A text for people: the reason why it is gone.
    reason: str = ""
    # When it was found gone, by the steady clock.
    gone_at: float = 0.0
    # Bytes of its toolchain's texts, counted in full, since no other place may share them.
    text_bytes: int = 0
    # Files that were read and had another content, with their mtime and inode then, so that they are not read again.
    known_wrong: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @property
    def place(self) -> str:
        """The folder of the toolchain: the grandparent of its first file."""
        return str(Path(self.files[0].path).parent.parent)

    @property
    def paths(self) -> list[str]:
        """The paths of its files."""
        return [mark.path for mark in self.files]

    def look(self, *, reads: bool = True) -> str:
        """Return whether it is HERE unchanged, GONE, or ELSEWHERE; update the marks of unchanged files.

        A file with new stat values is read to compare contents; without ``reads``, or on an error, it is ELSEWHERE.
        """
        marks = []
        state, reason = HERE, ""
        sight = None if self.uid in (0, os.getuid()) else Sight(self.uid)
        for mark in self.files:
            try:
                found = self._look_at(mark, sight, reads=reads)
            except OSError as error:
                if error.errno in _GONE:
                    self.reason = f"{mark.path} is gone"
                    return GONE
                found, state, reason = mark, ELSEWHERE, f"{mark.path}: {error.strerror}"
            if found is None:
                self.reason = f"{mark.path} is another one"
                return GONE
            marks.append(found)
        self.files, self.reason = tuple(marks), reason
        return state

    def _look_at(self, mark: InstalledFile, sight: Sight | None, *, reads: bool) -> InstalledFile | None:
        path = Path(mark.path)
        if sight is not None and not sight.sees(mark.path):
            raise PermissionError(errno.EACCES, "is not for its user to see")
        status = path.stat()
        if sight is not None and not sight.reads(status):
            raise PermissionError(errno.EACCES, "is not for its user to read")
        if (status.st_size, status.st_mtime_ns, status.st_ino) == (mark.size, mark.mtime_ns, mark.inode):
            return mark
        looks = status.st_mtime_ns, status.st_ino
        if status.st_size != mark.size or not stat.S_ISREG(status.st_mode) or self.known_wrong.get(mark.path) == looks:
            return None
        if not reads:
            raise OSError(errno.EAGAIN, "looks different")
        if _digest_of(path, status) != mark.digest:
            self.known_wrong[mark.path] = looks
            return None
        return mark._replace(mtime_ns=status.st_mtime_ns, inode=status.st_ino)

    def copy(self) -> Installation:
        """Return a copy that another thread may check."""
        return dataclasses.replace(self, known_wrong=dict(self.known_wrong))

    @property
    def weight(self) -> int:
        """The bytes it takes to remember it, roughly."""
        # As JSON, in which quotation marks and backslashes count twice.
        marks = sum(len(json.dumps(mark.path, ensure_ascii=False).encode()) + _MARK_BYTES for mark in self.files)
        return marks + _ROW_BYTES + self.text_bytes


def _digest_of(path: Path, expected: os.stat_result) -> str:
    """Return the digest of a regular file with this inode; anything that has replaced it is not even opened."""
    # O_PATH opens nothing: opening a FIFO would wait for a writer.
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or (found.st_dev, found.st_ino) != (expected.st_dev, expected.st_ino):
            raise OSError(errno.EAGAIN, "is being replaced")
        with open(f"/proc/self/fd/{handle}", "rb", opener=_without_waiting) as file:
            return file_digest(file)
    finally:
        os.close(handle)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def marks_of(files: Sequence[dict[str, Any]]) -> tuple[InstalledFile, ...] | None:
    """Return the marks of an announcement's files; None if any is implausible."""
    if len(files) > _MOST_FILES:
        return None
    marks = [_mark_of(file) for file in files]
    sound = tuple(mark for mark in marks if mark is not None)
    return sound if sound and len(sound) == len(marks) else None


def _mark_of(file: dict[str, Any]) -> InstalledFile | None:
    if file.keys() != set(InstalledFile._fields):
        return None
    mark = InstalledFile(**file)
    numbers = (mark.size, mark.mtime_ns, mark.inode)
    if any(type(number) is not int for number in numbers) or type(mark.path) is not str or type(mark.digest) is not str:
        return None
    # No real toolchain has unprintable paths, and as JSON each such character would take six bytes or more.
    fits = mark.path.startswith("/") and mark.path.isprintable() and len(mark.path) < 4096
    return mark if fits and _DIGEST.fullmatch(mark.digest) and 0 < mark.size <= _LARGEST_FILE_BYTES else None
