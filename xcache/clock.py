"""The clock that waits and times are measured by.

Asked for by its own call: a program that puts a clock of its own in place of ``time.monotonic`` (tests do) means its
own waits, and may count how often it is asked.
"""

from __future__ import annotations

import time


def monotonic() -> float:
    """Seconds that only ever go forward."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)
