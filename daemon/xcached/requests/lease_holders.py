"""Checks whether the holder of a lease is still working, as far as the kernel shows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from xcache.wire.bounded import text_of

# A process that has been stopped or frozen for this long is not compiling.
_STOPPED_SECONDS = 1.0
# A compile uses processors. Without any use it may wait for a disk (state D), or for a remote compiler.
_STUCK_SECONDS, _IDLE_SECONDS = 10.0, 60.0
# A longer gap between two looks means that the daemon itself was stopped, and proves nothing.
_LONGEST_GAP_SECONDS = 5.0
# Threads and children read in one look at all holders, because it happens on the serving thread.
_MOST_READ = 200
_CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


class Seen(NamedTuple):
    """A process's state, and the clock ticks that it and its reaped children have run."""

    state: str
    ticks: int


class LeaseHolders:
    """Looks at lease holders regularly, and remembers since when each has made no progress."""

    def __init__(self) -> None:
        self._known: dict[int, _Holder] = {}

    def look(self, pids: Iterable[int], now: float) -> dict[int, str]:
        """Return the processes not worth waiting for any longer, and why; forget those not among ``pids``."""
        self._known = {pid: self._known.get(pid) or _Holder(pid, now) for pid in pids}
        left = iter(range(_MOST_READ))
        # If there are too many children for one look, those read longest ago come first.
        holders = sorted(self._known.items(), key=lambda known: known[1].children_read)
        found = {pid: holder.look(now, left) for pid, holder in holders}
        return {pid: why for pid, why in found.items() if why}


class _Holder:
    def __init__(self, pid: int, now: float) -> None:
        self._pid = pid
        self._looked_at = self._last_ran_at = self._last_unstopped_at = self.children_read = now
        self._ticks = -1

    def look(self, now: float, left: Iterator[int]) -> str:
        """Return why the process is not worth waiting for, or ""; ``left`` limits how many children are read."""
        seen = see(self._pid)
        gap, self._looked_at = now - self._looked_at, now
        if has_ended(self._pid) or (seen is not None and seen.state in ("Z", "X") and not has_threads(self._pid)):
            # A child that it forked still has the connection.
            return "has ended"
        if seen is None or gap > _LONGEST_GAP_SECONDS:
            self._last_ran_at = self._last_unstopped_at = now
            return ""
        if seen.state not in ("T", "t") and not is_frozen(self._pid):
            self._last_unstopped_at = now
        if now - self._last_unstopped_at >= _STOPPED_SECONDS:
            return "is stopped"
        ticks = seen.ticks
        if now - self._last_ran_at > _STOPPED_SECONDS:
            # Children are read only if the process itself is idle, since there may be many.
            children = ticks_of_children(self._pid, left)
            if children is None:
                return ""
            ticks, self.children_read = ticks + children, now
        if ticks > self._ticks:
            self._last_ran_at = now
        self._ticks = ticks
        if now - self._last_ran_at >= (_STUCK_SECONDS if seen.state == "D" else _IDLE_SECONDS):
            return f"has not run for {now - self._last_ran_at:.0f} s"
        return ""


def has_ended(pid: int) -> bool:
    """Return whether a process is gone; a process of another namespace, or a hidden one, is not."""
    try:
        if pid > 0:
            os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def has_threads(pid: int) -> bool:
    """Return whether a process has other threads than its first."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1  # noqa: PTH208
    except OSError:
        return False


def see(pid: int) -> Seen | None:
    """Return a process's state and ticks; None if it cannot be seen."""
    try:
        # The fields follow the program's name, which may contain anything.
        fields = text_of(f"/proc/{pid}/stat", errors="replace").rpartition(")")[2].split()
        return Seen(fields[0], sum(map(int, fields[11:15])))
    except (OSError, ValueError, IndexError):
        return None


def ticks_of_children(pid: int, left: Iterator[int]) -> int | None:
    """Return the ticks that a process's live children have run: the compiler may be a program of its own.

    Each thread and each child uses one of ``left``; returns None if there are not enough.
    """
    total = 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            if next(left, None) is None:
                return None
            for child in text_of(thread / "children").split():
                if next(left, None) is None:
                    return None
                seen = see(int(child))
                total += seen.ticks if seen else 0
    except (OSError, ValueError):
        pass
    return total


def is_frozen(pid: int) -> bool:
    """Return whether a process's control group is frozen, as by ``docker pause``; False if unknown."""
    try:
        lines = text_of(f"/proc/{pid}/cgroup").splitlines()
    except (OSError, ValueError):
        return False
    groups = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
    for group in groups:
        if group == "/" or "/.." in group:
            continue
        for root in _CGROUPS:
            try:
                return "frozen 1" in text_of(root / group.lstrip("/") / "cgroup.events").splitlines()
            except (OSError, ValueError):
                continue
    return False
