"""The clock that waits and times are measured by.

Asked for by its own call: a program that puts a clock of its own in place of ``time.monotonic`` (tests do) means its
own waits, and may count how often it is asked.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator


class _Here(threading.local):
    elsewhere = 0.0


_here = _Here()


def monotonic() -> float:
    """Seconds that only ever go forward."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def own_time() -> float:
    """The same on a clock of this thread's, which stands still while the program is ``elsewhere``."""
    return monotonic() - _here.elsewhere


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """What a signal handler does in here is no part of what it has interrupted, and of no wait in there."""
    before, start = _here.elsewhere, monotonic()
    try:
        yield
    finally:
        _here.elsewhere = before + monotonic() - start
