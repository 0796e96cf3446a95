"""The one cache of this process, and the rules for replacing it."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xcache.cache import Cache

_current: Cache | None = None
_may_be_made = True
# Held by the thread that makes the process's cache or closes it. Two caches would undo each other's changes to jaxlib.
switching = threading.RLock()


def _begin_switching_in_child() -> None:
    global switching
    switching = threading.RLock()


if hasattr(os, "register_at_fork"):
    # Another thread of the parent may have been switching.
    os.register_at_fork(after_in_child=_begin_switching_in_child)


def current() -> Cache | None:
    """Return the process's cache, or None."""
    return _current


def use(cache: Cache) -> None:
    """Make this the process's cache, and close the one before."""
    global _current
    if _current is not None:
        _current.close()
    _current = cache


def use_none() -> None:
    """Close the process's cache, if there is one."""
    if _current is not None:
        leave(_current)


def only_when_asked() -> None:
    """Allow the process a cache, from now on, only if its code asks for one."""
    global _may_be_made
    _may_be_made = False


def may_be_made() -> bool:
    """Return whether the process may have a cache that its code has not asked for."""
    return _may_be_made


def leave(cache: Cache) -> None:
    """Close a cache; if it was the process's, the process has none afterwards."""
    global _current
    cache.close()
    if _current is cache:
        _current = None
