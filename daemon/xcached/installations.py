"""Where a toolchain is installed, and whether it still is: files compared with what they were."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# It is there; it cannot be seen from here (a container's, another user's); it is no longer there.
HERE, ELSEWHERE, GONE = "here", "elsewhere", "gone"
_LARGEST_FILE = 8 * 1024**3
_MOST_FILES = 500
# A disk or network that does not answer, a ticket that has run out, too few descriptors: whatever else is wrong with
# looking says nothing about what is there.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class Mark(NamedTuple):
    """What shows that a file has not changed, and the digest of its content."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    digest: str


@dataclasses.dataclass
class Installation:
    """The files of one toolchain in one place."""

    toolchain: str
    uid: int
    files: tuple[Mark, ...]
    state: str
    seen_at: float
    # What is wrong with it, for people.
    reason: str = ""
    # When it was found to be gone, by a clock that does not jump.
    gone_at: float = 0.0
    # Files that turned out to have another content, and how they looked then: not to be read again and again.
    known_wrong: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @property
    def place(self) -> str:
        """The folder it is in: that above the first of its files' own."""
        return str(Path(self.files[0].path).parent.parent)

    @property
    def paths(self) -> list[str]:
        """Where its files are."""
        return [mark.path for mark in self.files]

    def look(self, *, reads: bool = True) -> str:
        """Whether it is here now, as it was, or gone; what looks different is read again. Remembers how that looked.

        It is elsewhere as long as that cannot be told; nor can it where what looks different is not to be read.
        """
        marks = []
        state, reason = HERE, ""
        for mark in self.files:
            try:
                found = self._look_at(mark, reads=reads)
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

    def _look_at(self, mark: Mark, *, reads: bool) -> Mark | None:
        path = Path(mark.path)
        status = path.stat()
        if (status.st_size, status.st_mtime_ns, status.st_ino) == (mark.size, mark.mtime_ns, mark.inode):
            return mark
        looks = status.st_mtime_ns, status.st_ino
        if status.st_size != mark.size or not stat.S_ISREG(status.st_mode) or self.known_wrong.get(mark.path) == looks:
            return None
        if not reads:
            raise OSError(errno.EAGAIN, "looks different")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != mark.digest:
            self.known_wrong[mark.path] = looks
            return None
        return mark._replace(mtime_ns=status.st_mtime_ns, inode=status.st_ino)


def marks_of(files: Sequence[dict[str, Any]]) -> tuple[Mark, ...] | None:
    """The files that a toolchain is said to consist of; None for what cannot be."""
    marks = [_mark_of(file) for file in files]
    sound = tuple(mark for mark in marks if mark is not None)
    return sound if sound and len(sound) == len(marks) <= _MOST_FILES else None


def _mark_of(file: dict[str, Any]) -> Mark | None:
    if file.keys() != set(Mark._fields):
        return None
    mark = Mark(**file)
    numbers = (mark.size, mark.mtime_ns, mark.inode)
    if any(type(number) is not int for number in numbers) or type(mark.path) is not str or type(mark.digest) is not str:
        return None
    fits = mark.path.startswith("/") and "\0" not in mark.path and len(mark.path) < 4096 and len(mark.digest) == 64
    return mark if fits and 0 < mark.size <= _LARGEST_FILE else None
