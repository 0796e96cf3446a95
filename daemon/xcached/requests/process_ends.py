"""Finds out how client processes end: only a crash is evidence against an entry they were loading.

A pidfd keeps naming one process even if its number is reused. From Linux 6.15 on it reports how the process ended even
after its parent has reaped it; before, only /proc does, and only until then.
"""

from __future__ import annotations

import asyncio
import enum
import fcntl
import os
import select
import signal
import struct
from collections.abc import Callable
from pathlib import Path

from xcache.wire.bounded import text_of
from xcached.caller import Process

# Seconds in which a process may end after its connection closed: freeing large devices takes a while.
_LONGEST_END_SECONDS = 60.0
# Ending processes of one user that are waited for, each with a descriptor. A process counts even if only its first
# thread has ended.
_MOST_WAITING = 64
_CRASHES = {
    signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS
}  # fmt: skip
# Fields of Linux's proc(5), counted after the program's name, and PF_EXITING of include/linux/sched.h.
_STATE, _FLAGS, _EXITING = 0, 6, 0x4
# From linux/pidfd.h: the ioctl, the structure's size, the flag for the exit status, and the status's offset.
_GET_INFO, _INFO_SIZE, _INFO_EXIT, _EXIT_AT = 0xC040FF0B, 64, 1 << 3, 60


class ProcessEnd(enum.Enum):
    """How a process ended while it was loading an entry."""

    CRASHED = enum.auto()
    OTHERWISE = enum.auto()
    """By an exit, by a signal that is no crash, or not at all: it only closed its connection."""
    UNKNOWN = enum.auto()


class ProcessEnds:
    """Watches the processes that were given entries. Belongs to the serving thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watched: dict[Process, int | None] = {}
        self._waiting: dict[Process, list[Callable[[ProcessEnd, int | None], None]]] = {}
        self._closed = False

    def watch(self, process: Process) -> None:
        """Start watching a running process, unless it is watched already."""
        if process not in self._watched and not self._closed:
            self._watched[process] = _open(process.pid)

    def tell(self, process: Process, judge: Callable[[ProcessEnd], None]) -> None:
        """Call ``judge`` with the end of a process, now or later, after a connection closed during a load."""
        self.tell_status(process, lambda ending, _: judge(ending))

    def tell_status(self, process: Process, judge: Callable[[ProcessEnd, int | None], None]) -> None:
        """Call ``judge`` with the end of a process, and its status as of waitpid if the kernel told that."""
        if self._closed:
            return
        descriptor = self._watched.get(process)
        if descriptor is None:
            judge(ProcessEnd.UNKNOWN, None)
        elif _has_ended(descriptor):
            judge(*_ending(descriptor, process.pid))
        elif not _is_ending(process.pid):
            judge(ProcessEnd.OTHERWISE, None)
        elif process in self._waiting:
            self._waiting[process].append(judge)
        elif sum(other.uid == process.uid for other in self._waiting) >= _MOST_WAITING:
            judge(ProcessEnd.OTHERWISE, None)
        else:
            self._waiting[process] = [judge]
            self._loop.add_reader(descriptor, self._judge, process)
            self._loop.call_later(_LONGEST_END_SECONDS, self._judge, process)

    def forget(self, process: Process) -> None:
        """Stop watching a process without connections, unless its end is awaited."""
        if process not in self._waiting and (descriptor := self._watched.pop(process, None)) is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Stop watching and judging: to a daemon that is leaving, every end would look unknown."""
        self._closed = True
        for process, descriptor in self._watched.items():
            if descriptor is not None:
                if process in self._waiting:
                    self._loop.remove_reader(descriptor)
                os.close(descriptor)
        self._watched.clear()
        self._waiting.clear()

    def _judge(self, process: Process) -> None:
        waiting = self._waiting.pop(process, None)
        descriptor = self._watched.get(process)
        if waiting is None or descriptor is None:
            # The process ended before its time was up.
            return
        self._loop.remove_reader(descriptor)
        ended = _has_ended(descriptor)
        ending, status = _ending(descriptor, process.pid) if ended else (ProcessEnd.OTHERWISE, None)
        for judge in waiting:
            judge(ending, status)
        if process.connections == 0:
            self.forget(process)


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def _has_ended(descriptor: int) -> bool:
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    return bool(ready.poll(0))


def _is_ending(pid: int) -> bool:
    """Return whether a process is exiting, rather than having only closed a connection, as exec does."""
    try:
        return bool(int(_fields(pid)[_FLAGS]) & _EXITING)
    except (OSError, ValueError, IndexError):
        return True


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the program's name, which may contain anything."""
    return text_of(f"/proc/{pid}/stat", errors="replace").rpartition(")")[2].split()


def _ending(descriptor: int, pid: int) -> tuple[ProcessEnd, int | None]:
    status = _status_after_waiting(descriptor)
    if status is None:
        status = _status_before_waiting(descriptor, pid)
    if status is None:
        # The parent reaped it between the two looks.
        status = _status_after_waiting(descriptor)
    if status is None:
        return ProcessEnd.UNKNOWN, None
    crashed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in _CRASHES
    return ProcessEnd.CRASHED if crashed else ProcessEnd.OTHERWISE, status


def _status_after_waiting(descriptor: int) -> int | None:
    """Return the status of a reaped process; None if it is not reaped, or before Linux 6.15."""
    info = bytearray(_INFO_SIZE)
    struct.pack_into("=Q", info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return None
    (said,) = struct.unpack_from("=Q", info, 0)
    return int(struct.unpack_from("=i", info, _EXIT_AT)[0]) if said & _INFO_EXIT else None


def _status_before_waiting(descriptor: int, pid: int) -> int | None:
    """Return the status of a process not yet reaped; None for another user's process unless this is root."""
    try:
        if os.geteuid() not in (0, Path(f"/proc/{pid}").stat().st_uid):
            # The kernel reports 0 for other users' processes.
            return None
        fields = _fields(pid)
        # Make sure it is still the same process, and its number was not reused.
        signal.pidfd_send_signal(descriptor, 0)
        # A zombie, or one that is being reaped at this moment.
        return int(fields[-1]) if fields[_STATE] in "ZX" else None
    except (OSError, ValueError, IndexError):
        return None
