"""The clock for every wait and duration, and the time at which this process began.

It does not call ``time.monotonic``: a program that replaces that function (tests do) means its own waits, and may count
the calls.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path


class _Pauses(threading.local):
    seconds = 0.0


_pauses = _Pauses()


def monotonic() -> float:
    """Return the seconds of a clock that never goes back."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def own_time() -> float:
    """Return the seconds of this thread's own clock, which stands still inside ``elsewhere()``."""
    return monotonic() - _pauses.seconds


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Stop this thread's own clock: the time of a signal handler is not part of the wait it interrupted."""
    before, start = _pauses.seconds, monotonic()
    try:
        yield
    finally:
        _pauses.seconds = before + monotonic() - start


@functools.cache
def process_began() -> float:
    """Return when this program began, in the time of files; infinity if that cannot be told.

    A forked child runs what its parent has loaded, so the time is the parent's.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        # Not time.time, which a program's tests may replace.
        started = time.clock_gettime(time.CLOCK_REALTIME) - since_boot
    except (OSError, AttributeError):
        return float("inf")
    # The parent may have imported nothing of xcache; logging knows when it was imported.
    record = logging.makeLogRecord({})
    return min(started, record.created - record.relativeCreated / 1000)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=process_began)
