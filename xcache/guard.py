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
        self._warmed_up_at: float | None = None

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

    def warm(self) -> None:
        """Note that all that the program needs is compiled."""
        self._warmed_up_at = monotonic()

    def check(self, described: str, cause: str, on_miss: str, since: float | None) -> None:
        """Raise CompileInGuardError, or warn, if nothing may be compiled now.

        ``since`` is the moment from which the setting ``on_miss`` holds; None if only ``warm`` begins it.
        """
        meaning = ledger.meaning_of(cause)
        why = cause if meaning == cause else f"{meaning} ({cause})"
        if self._inside:
            raise CompileInGuardError(f"{described} would be compiled within no_compiles(): {why}")
        begins = [moment for moment in (self._warmed_up_at, since) if moment is not None]
        if on_miss == "allow" or not begins or monotonic() < min(begins):
            return
        if on_miss == "fail":
            raise CompileInGuardError(f"{described} would be compiled after the program was warmed up: {why}")
        logger.warning("%s is compiled after the program was warmed up: %s", described, why)


guard = Guard()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=guard.begin_in_child)
