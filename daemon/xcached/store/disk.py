"""The store's file system: how much must stay free, how much of that is lacking, and a reserve for a full disk."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_ASK_EVERY_SECONDS = 1.0
# A percentage never means more than this, on a disk of many terabytes either.
_MOST_FREE_BY_SHARE_BYTES = 20 * 1024**3
# The reserve is this fraction (1/n) of what is free, within these bounds: one half of it is for a checkpoint, the other
# for the removal that follows. The least is what the removal of one entry may take.
_RESERVE_DIVISOR, _LEAST_RESERVE_BYTES, _MOST_RESERVE_BYTES = 4, 512 * 1024, 8 * 1024 * 1024
# Judge only after evicting this much whether the disk gains from it: the journal grows meanwhile and could hide less.
ENOUGH_TO_JUDGE_BYTES = 16 * 1024**2
# Pause after evictions that gained nothing.
_RETRY_SECONDS = 60.0


class DiskUsage(NamedTuple):
    """A disk's free and total bytes."""

    free: int
    total: int


def usage_of(directory: Path) -> DiskUsage:
    """Ask the file system about a folder's disk."""
    found = os.statvfs(directory)
    return DiskUsage(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


class Reserve:
    """A file that is deleted when the disk is full: removing entries has to write to the journal first."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "reserve"
        # Its bytes; 0 if there is none.
        self.size = 0

    def keep(self) -> int:
        """Make the reserve, or a larger one once the disk has room for that; return how many bytes it has grown."""
        if self.size == _MOST_RESERVE_BYTES:
            return 0
        try:
            there = self._path.stat().st_size if self._path.exists() else 0
            if self.size and not there:
                # Somebody else has deleted it, and is probably deleting the store.
                return 0
            self.size = there
            wanted = _reserve_of(shutil.disk_usage(self._path.parent).free + there)
            # Not for each little that comes free.
            if wanted and wanted >= 2 * there:
                self._write(wanted)
        except OSError:
            if not self.size:
                self.give_up()
            return 0
        return self.size - there

    def _write(self, size: int) -> None:
        with open(self._path, "r+b", opener=_private) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                # macOS has no posix_fallocate.
                file.write(bytes(size))
        self.size = size

    def give_up(self) -> bool:
        """Delete the reserve until ``keep`` finds room for it; return whether there was one."""
        self.size = 0
        try:
            self._path.unlink()
        except OSError:
            return False
        return True


class Disk:
    """The disk's free bytes: asked of the file system once a second, less the bytes written since."""

    def __init__(
        self, look: Callable[[], DiskUsage], min_free: str, reclaimable: Callable[[int], int] = lambda _: 0
    ) -> None:
        """``look`` asks the file system; ``reclaimable`` returns bytes that are in use but can be had back at any time.

        It is told how many bytes must stay free.
        """
        self._look = look
        self._reclaimable_bytes = reclaimable
        self._min_free = min_free
        self._asked = 0.0
        self._free = self._reclaimable = self._to_stay_free = self._written = 0

    @property
    def seen(self) -> tuple[int, int]:
        """The bytes that were free when last asked (0: never asked), and those that must stay free."""
        return self._free, self._to_stay_free

    def has_room_for(self, size: int) -> bool:
        """Return whether a file of this size leaves the disk its free space, by the file system's last answer."""
        return self._min_free == "0" or self._free - self._written >= size

    def lacking(self, needed: int = 0) -> int:
        """Return how many bytes too few are free once ``needed`` more are written; 0 or less if enough are."""
        if self._min_free == "0":
            return 0
        # An eviction is never decided by an answer that may be a second old.
        if time.monotonic() - self._asked >= _ASK_EVERY_SECONDS or self._lacking(needed) > 0:
            self.ask()
        return self._lacking(needed)

    def writes(self, size: int) -> None:
        """Count bytes that are being written."""
        self._written += size

    def _lacking(self, needed: int) -> int:
        return self._to_stay_free + self._written + needed - self._free - self._reclaimable

    def ask(self) -> int:
        """Ask the file system now; return the bytes that are free or can be had back."""
        self._free, total = self._look()
        self._to_stay_free = _to_stay_free(self._min_free, total)
        # Read both at the same moment: bytes of one are missing from the other.
        self._reclaimable = self._reclaimable_bytes(self._to_stay_free)
        self._written = 0
        self._asked = time.monotonic()
        return self._free + self._reclaimable


class Progress:
    """Notes whether evictions free disk space at all: open files or another program's writes may consume it all."""

    def __init__(self) -> None:
        self._evicted = self._came_free = 0
        self._stopped_until = 0.0

    def note(self, evicted: int, came_free: int) -> None:
        """Add an eviction's bytes, and the bytes that the disk gained."""
        self._evicted += evicted
        self._came_free += came_free
        if self._evicted >= ENOUGH_TO_JUDGE_BYTES:
            if self._came_free < self._evicted // 2:
                self._stopped_until = time.monotonic() + _RETRY_SECONDS
            self._evicted = self._came_free = 0

    def stands_still(self) -> bool:
        """Return whether recent evictions gained nothing, so that none should follow for now."""
        return time.monotonic() < self._stopped_until


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o600)


def _reserve_of(free: int) -> int:
    """Return the size of the reserve on a disk with so many bytes free; 0 if there is no room for one."""
    if free < _LEAST_RESERVE_BYTES:
        return 0
    return min(_MOST_RESERVE_BYTES, max(_LEAST_RESERVE_BYTES, free // _RESERVE_DIVISOR))


def _to_stay_free(min_free: str, disk: int) -> int:
    """Return the bytes that must stay free on a disk of this size."""
    if min_free.endswith("%"):
        return min(int(disk * float(min_free[:-1]) / 100), _MOST_FREE_BY_SHARE_BYTES)
    return int(min_free)
