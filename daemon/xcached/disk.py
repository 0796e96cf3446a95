"""The file system a store is on: how much must stay free there, how much of that is lacking; and a reserve."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

_BELIEVED_SECONDS = 1.0
# A share of a disk of many terabytes is more than anybody needs.
_MOST_OF_A_SHARE = 20 * 1024**3
# As much as the journal may hold, twice: what has to be brought to the database, and what is written after that.
_RESERVE = 8 * 1024 * 1024
# Taken only where there is so many times as much.
_PLENTY = 4


class Reserve:
    """A file that is given up when the disk is full: that entries go has to be written down before they are gone."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "reserve"

    def keep(self) -> int:
        """Have it, if that takes nothing from anybody; how many bytes were written for it now."""
        try:
            if self._path.exists() or shutil.disk_usage(self._path.parent).free < _PLENTY * _RESERVE:
                return 0
            with open(self._path, "xb", opener=_private) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, _RESERVE)
                else:
                    # macOS.
                    file.write(bytes(_RESERVE))
        except OSError:
            self.give_up()
            return 0
        return _RESERVE

    def give_up(self) -> bool:
        """Whether there was one."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True


class Disk:
    """Asks the file system once a second, and counts what was written since."""

    def __init__(self, directory: Path, min_free: str) -> None:
        self._directory = directory
        self._min_free = min_free
        self._asked = 0.0
        self._free = self._to_leave = self._written = 0

    @property
    def seen(self) -> tuple[int, int]:
        """What was free when that was last asked, and what is to stay free: nothing, where that was never asked."""
        return self._free, self._to_leave

    def lacking(self, needed: int = 0) -> int:
        """Bytes that are not free although they should be when ``needed`` more are written; 0 or less for none."""
        if self._min_free == "0":
            return 0
        # What would have consequences is not decided by what was so a second ago.
        if time.monotonic() - self._asked >= _BELIEVED_SECONDS or self._lacking(needed) > 0:
            self._ask()
        return self._lacking(needed)

    def writes(self, size: int) -> None:
        """So much is being written."""
        self._written += size

    def _lacking(self, needed: int) -> int:
        return self._to_leave + self._written + needed - self._free

    def _ask(self) -> None:
        found = os.statvfs(self._directory)
        self._free = found.f_bavail * found.f_frsize
        self._to_leave = _to_leave(self._min_free, found.f_blocks * found.f_frsize)
        self._written = 0
        self._asked = time.monotonic()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _to_leave(min_free: str, disk: int) -> int:
    """Bytes that are to stay free on a disk of this size."""
    if min_free.endswith("%"):
        return min(int(disk * float(min_free[:-1]) / 100), _MOST_OF_A_SHARE)
    return int(min_free)
