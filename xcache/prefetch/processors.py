"""The processors of this machine: how many there are, and whether other processes leave one for loading ahead."""

from __future__ import annotations

import os
import time
from pathlib import Path

# Seconds before each look, because one look may meet a thread that wants a processor only for a moment.
_PAUSES = (0.0, 0.001, 0.001)


def threads_to_spare() -> int:
    """Return the number of processors, less one for the program's own thread."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return count - 1


def are_taken() -> bool:
    """Return whether the threads of other processes want all processors of the machine: in two looks of three."""
    count = os.cpu_count() or 1
    looks = []
    for pause in _PAUSES:
        time.sleep(pause)
        try:
            with open("/proc/loadavg", "rb") as file:
                wanting = int(file.read().split()[3].partition(b"/")[0])
            # The look costs less where the whole machine wants too few.
            looks.append(wanting >= count and wanting - _own_threads() >= count)
        except (OSError, ValueError, IndexError):
            return False
    return sum(looks) > 1


def _own_threads() -> int:
    """Return the number of threads of this process that run or want to; a loading program may use all processors."""
    states = []
    for thread in Path("/proc/self/task").iterdir():
        try:
            states.append((thread / "stat").read_bytes().rpartition(b")")[2].split()[0])
        except (OSError, IndexError):
            # The thread has ended meanwhile.
            continue
    return states.count(b"R")
