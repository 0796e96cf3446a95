"""Checks each user's files on a thread of its own, so that a user's blocked file system delays nobody else's check."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger("xcached")

Result = TypeVar("Result")
# Checks that may hang at a time; beyond it no files are checked until one ends.
_MOST_THREADS = 32
# The share of time one user's files may be checked for, and the longest pause that follows from it.
_CHECK_SHARE, _LONGEST_PAUSE_SECONDS = 0.1, 300.0


class FileChecks(Generic[Result]):
    """At most one check per user at a time; the user None is the daemon itself. One thread asks."""

    def __init__(self, on_late: Callable[[Result], None]) -> None:
        """``on_late`` gets results that came after their time was up, on the thread of the check."""
        self._on_late = on_late
        self._running: dict[int | None, _Check[Result]] = {}
        self._rests_until: dict[int | None, float] = {}

    def ask(self, user: int | None, check: Callable[[], Result], patience: float) -> Result | None:
        """Return the result of ``check`` within ``patience`` seconds; None if late, or if the last check still runs."""
        self._forget_finished()
        if user in self._running or len(self._running) >= _MOST_THREADS:
            return None
        started = self._running[user] = _Check(check, self._on_late)
        return started.wait(patience)

    def rests_until(self, user: int | None) -> float:
        """Return the time from which all of a user's files may be checked again."""
        self._forget_finished()
        return self._rests_until.get(user, 0.0)

    def _forget_finished(self) -> None:
        for user, check in list(self._running.items()):
            if check.ended:
                del self._running[user]
                pause = (check.ended - check.began) / _CHECK_SHARE
                self._rests_until[user] = check.ended + min(pause, _LONGEST_PAUSE_SECONDS)
        now = time.monotonic()
        self._rests_until = {user: until for user, until in self._rests_until.items() if until > now}


class _Check(Generic[Result]):
    def __init__(self, check: Callable[[], Result], on_late: Callable[[Result], None]) -> None:
        self.began, self.ended = time.monotonic(), 0.0
        self._check = check
        self._on_late = on_late
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._result: Result | None = None
        self._waited_for = True
        threading.Thread(target=self._run, name="xcached-file-check", daemon=True).start()

    def wait(self, patience: float) -> Result | None:
        """Return the result if it comes in time; a later one goes to ``on_late``."""
        self._done.wait(patience)
        with self._lock:
            self._waited_for = False
            return self._result

    def _run(self) -> None:
        result = None
        try:
            result = self._check()
        except Exception:
            # The check must end, or its user's files would never be checked again.
            logger.exception("files could not be checked")
        ended = time.monotonic()
        with self._lock:
            self._result = result
            late = not self._waited_for
        if late and result is not None:
            # Before it counts as ended: the next check's result is newer.
            self._on_late(result)
        self.ended = ended
        self._done.set()
