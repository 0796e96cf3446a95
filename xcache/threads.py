"""The stack of xcache's threads, whatever stack the program gives its own: XLA and zstandard need a usual one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_STACK_BYTES = 8 * 1024**2
_lock = threading.RLock()


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
