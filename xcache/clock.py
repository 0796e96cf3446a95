"""The clock for every wait and duration, and the time at which this process began.

It calls neither ``time.monotonic`` nor ``time.sleep``: a program that replaces these functions (tests do) means its own
waits, may count the calls, and may raise.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from _thread import allocate_lock
from collections.abc import Iterator


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


def pause(seconds: float) -> None:
    """Let this thread do nothing for so long."""
    held = allocate_lock()
    held.acquire()
    # A negative time would mean to wait without an end.
    held.acquire(timeout=max(0.0, seconds))


@functools.cache
def process_began() -> float:
    """Return when this program began, in the time of files; infinity if that cannot be told.

    A forked child runs what its parent has loaded, so the time is the parent's.
    """
    try:
        ticks = _start_of_program(os.getpid())
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        # Not time.time, which a program's tests may replace.
        started = time.clock_gettime(time.CLOCK_REALTIME) - age
    except (OSError, AttributeError):
        return float("inf")
    # The parent may have ended; logging knows when it was imported.
    record = logging.makeLogRecord({})
    return min(started, record.created - record.relativeCreated / 1000)


def own_start() -> str:
    """Return the clock ticks since the boot at which this process began, by which it is known as long as it lives."""
    try:
        return _fields_of(os.getpid())[19]
    except (OSError, IndexError):
        return ""


def since_boot() -> float:
    """Return the seconds of a clock that never goes back, and goes on while the machine sleeps, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def command_began(variable: str) -> float:
    """Return when, by ``since_boot``, the command began that this process is a part of.

    That is the outermost of its ancestors that has this variable in its environment, with the same value, as have all
    between them. A shell's own variables, which it exports to its children, are not in its environment.
    """
    began = since_boot()
    with contextlib.suppress(OSError, ValueError, IndexError):
        began = min(began, _start_of_program(os.getpid()) / os.sysconf("SC_CLK_TCK"))
        said = os.fsencode(f"{variable}={os.environ.get(variable, '')}")
        process = os.getppid()
        while process and said in _content_of(f"/proc/{process}/environ").split(b"\0"):
            fields = _fields_of(process)
            began, process = int(fields[19]) / os.sysconf("SC_CLK_TCK"), int(fields[1])
    return began


def _start_of_program(process: int) -> int:
    """Return the clock ticks at which a process, or the ancestor that it was forked from, began."""
    ours = _fields_of(process)
    while True:
        parent = int(ours[1])
        try:
            theirs = _fields_of(parent)
        except (OSError, IndexError):
            break
        # A new program has its code and its stack at other addresses; a fork keeps them.
        if theirs[23:26] != ours[23:26] or ours[25] == "0":
            break
        ours = theirs
    return int(ours[19])


# More than an environment has.
_MOST_BYTES = 8 * 1024**2


def _content_of(path: str) -> bytes:
    """Return the content of a file of the kernel's; this module is below those that read what others write."""
    with open(path, "rb") as file:
        return file.read(_MOST_BYTES)


def _fields_of(process: int) -> list[str]:
    """Return the fields of a process's state that follow its name."""
    return _content_of(f"/proc/{process}/stat").decode(errors="replace").rpartition(")")[2].split()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=process_began)
