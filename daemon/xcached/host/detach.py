"""Detaches the daemon from the environment of the program that started it, because it serves others and longer.

A daemon started by a service manager or at a terminal keeps the environment chosen for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import sys
import threading
from pathlib import Path

from xcache.errors import StoreError

_MIB = 1024**2
# A service manager meant these for the program, not for this daemon.
_MANAGER_VARIABLES = (
    *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"),
    *("JOURNAL_STREAM", "INVOCATION_ID", "FDSTORE", "MAINPID"),
)
# The least hard limits with which the daemon can serve; lower ones would kill or cripple it.
_LEAST_LIMITS = {
    "RLIMIT_CPU": (600, "seconds of processor time", "ulimit -t"),
    "RLIMIT_FSIZE": (1024 * _MIB, "bytes a file", "ulimit -f"),
    "RLIMIT_AS": (1024 * _MIB, "bytes of address space", "ulimit -v"),
    "RLIMIT_DATA": (512 * _MIB, "bytes of data", "ulimit -d"),
    "RLIMIT_NOFILE": (48, "open files", "ulimit -n"),
}
# Core files are the user's choice. The main thread's stack is fixed by now; those of threads are set below.
_KEPT_LIMITS = ("RLIMIT_CORE", "RLIMIT_STACK")
_THREAD_STACK_BYTES = 8 * _MIB
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_OOM_SCORE = Path("/proc/self/oom_score_adj")


def leave_surroundings() -> None:
    """Reset inherited signals, priorities, limits and variables; StoreError if a hard limit is too low to serve."""
    for name in _MANAGER_VARIABLES:
        os.environ.pop(name, None)
    _hear_all_signals()
    with contextlib.suppress(OSError):
        # EPERM: the process leads a session already.
        os.setsid()
    os.chdir("/")
    _run_as_usual()
    _raise_limits()
    _check_limits()


def _hear_all_signals() -> None:
    for number in signal.valid_signals():
        # Python itself ignores these two, so that the call fails instead.
        if signal.getsignal(number) == signal.SIG_IGN and number not in (signal.SIGPIPE, signal.SIGXFSZ):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _run_as_usual() -> None:
    """Run on all processors with the usual priority, as far as permitted."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(0) != os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        number = _IOPRIO_SET.get(platform.machine())
        if number is not None:
            # ioprio_set(IOPRIO_WHO_PROCESS, this process, IOPRIO_CLASS_NONE): I/O priority follows nice again.
            ctypes.CDLL(None).syscall(number, 1, 0, 0)
        with contextlib.suppress(OSError):
            _OOM_SCORE.write_text("0")
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _raise_limits() -> None:
    for name in (name for name in dir(resource) if name.startswith("RLIMIT_") and name not in _KEPT_LIMITS):
        with contextlib.suppress(OSError, ValueError):
            kind = getattr(resource, name)
            _, hard = resource.getrlimit(kind)
            resource.setrlimit(kind, (hard, hard))
    threading.stack_size(_THREAD_STACK_BYTES)


def _check_limits() -> None:
    for name, (least, what, how) in _LEAST_LIMITS.items():
        _, hard = resource.getrlimit(getattr(resource, name))
        if hard != resource.RLIM_INFINITY and hard < least:
            raise StoreError(
                f"a daemon that this program starts could have no more than {hard} {what} (its hard limit, {how}), and"
                f" needs {least}; start one beforehand where there is no such limit: xcache start"
            )
