"""A guard for programs that must not compile any more, such as servers that have got ready."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

from xcache.clock import monotonic
from xcache.errors import CompileInGuardError
from xcache.wire import ledger

logger = logging.getLogger("xcache")


class Guard:
    """Says what happens when something is to be compiled. It holds for all threads of the process."""

    def __init__(self) -> None:
        # The thread of each guard in force. Setting and popping are one step each.
        self._inside: dict[object, int] = {}
        self._is_warmed_up = False
        self._begin_count()

    def _begin_count(self) -> None:
        self._lock = threading.RLock()
        # Programs that were compiled although the setting ``on_miss`` is there, because it did not hold yet.
        self._unheld = 0

    @contextlib.contextmanager
    def forbidding(self) -> Iterator[None]:
        """Forbid compiles within."""
        this = object()
        try:
            # Here, because Ctrl-C may come directly after it.
            self._inside[this] = threading.get_ident()
            yield
        finally:
            self._inside.pop(this, None)

    def begin_in_child(self) -> None:
        """Forget, in a forked child, the guards of threads that it does not have: they would never end."""
        here = threading.get_ident()
        self._inside = {this: thread for this, thread in self._inside.items() if thread == here}
        # The parent speaks of its own.
        self._begin_count()

    def warm(self) -> None:
        """Note that all that the program needs is compiled."""
        self._is_warmed_up = True

    def check(self, described: str, cause: str, on_miss: str, since: float | None) -> None:
        """Raise CompileInGuardError, or warn, if nothing may be compiled now.

        ``since`` is the moment from which the setting ``on_miss`` holds; None if only ``warm`` begins it.
        """
        meaning = ledger.meaning_of(cause)
        why = cause if meaning == cause else f"{meaning} ({cause})"
        if self._inside:
            raise CompileInGuardError(f"{described} would be compiled within no_compiles(): {why}")
        if on_miss == "allow":
            return
        if not self._holds(since):
            with self._lock:
                self._unheld += 1
            return
        when = "after the program was warmed up" if self._is_warmed_up else f"while XCACHE_ON_MISS={on_miss} holds"
        if on_miss == "fail":
            raise CompileInGuardError(f"{described} would be compiled {when}: {why}")
        logger.warning("%s is compiled %s: %s", described, when, why)

    def unheld(self, on_miss: str, since: float | None) -> str:
        """Return, once, that ``on_miss`` has not held and what was compiled; nothing if it has, or nothing was."""
        with self._lock:
            count, self._unheld = self._unheld, 0
        if not count or self._holds(since):
            return ""
        time = "no XCACHE_ON_MISS_AFTER is set" if since is None else "the time of XCACHE_ON_MISS_AFTER has not come"
        compiled = "1 program was" if count == 1 else f"{count} programs were"
        return (
            f"XCACHE_ON_MISS={on_miss} did not hold, because xcache.warmed_up() was not called and {time}: "
            f"{compiled} compiled; with XCACHE_ON_MISS_AFTER=0 it holds from the first compile on"
        )

    def _holds(self, since: float | None) -> bool:
        return self._is_warmed_up or (since is not None and monotonic() >= since)


guard = Guard()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=guard.begin_in_child)
