"""Tell when this process began, so that a file which changed later is not taken for what the process has imported."""

from __future__ import annotations

import os
import time
from pathlib import Path

# The kernel's flag of a process that has not executed a program since it was forked: its modules are its parent's.
_FORKED_ONLY = 0x40


def process_began() -> float:
    """Return when this process, or the one that it was forked from, executed Python; 0.0 if that cannot be told."""
    process = "self"
    try:
        while True:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            parent, flags, ticks = fields[1], int(fields[6]), int(fields[19])
            if not flags & _FORKED_ONLY or parent == "0":
                break
            process = parent
    except (OSError, ValueError, IndexError):
        return 0.0
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot
