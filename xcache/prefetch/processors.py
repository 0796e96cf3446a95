"""The processors of this machine: how many there are, and whether one is left for loading ahead."""

from __future__ import annotations

import os
import time

# Seconds before each look, because one look may meet a thread that wants a processor only for a moment.
_PAUSES = (0.0, 0.001, 0.001)


def threads_to_spare() -> int:
    """Return the number of processors, less one for the program's own thread."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return count - 1


def are_all_busy() -> bool:
    """Return whether more threads of the whole machine want a processor than there are: in two looks of three."""
    looks = []
    for pause in _PAUSES:
        time.sleep(pause)
        try:
            with open("/proc/loadavg", "rb") as file:
                looks.append(int(file.read().split()[3].partition(b"/")[0]))
        except (OSError, ValueError, IndexError):
            return False
    return sorted(looks)[1] > (os.cpu_count() or 1)
