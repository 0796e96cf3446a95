"""Threads: how many can run, whether xcache can wait on the program's, and the stack that XLA and zstandard need."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from xcache.errors import UnsupportedError

_STACK_BYTES = 8 * 1024**2
_lock = threading.RLock()


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_threads() -> None:
    """Raise UnsupportedError under gevent or eventlet: a wait here would switch greenlets in the middle of jax."""
    patched = {
        "gevent": getattr(sys.modules.get("gevent.monkey"), "saved", None),
        "eventlet": getattr(sys.modules.get("eventlet.patcher"), "already_patched", None),
    }
    for name, modules in patched.items():
        if modules:
            raise UnsupportedError(f"{name} has replaced Python's threads and sockets; xcache cannot wait under it")


@contextlib.contextmanager
def usual_stack() -> Iterator[None]:
    """Give the threads that are started within a usual stack, if the program has chosen a smaller one for new threads.

    A thread that the program starts at the same moment may get it, too.
    """
    with _lock:
        chosen = threading.stack_size()
        if not 0 < chosen < _STACK_BYTES:
            yield
            return
        threading.stack_size(_STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(chosen)


def _begin_in_child() -> None:
    """Another thread of the parent may have held the lock."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
