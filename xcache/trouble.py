"""Counts errors of the cache, and warns of each kind once; the program goes on."""

from __future__ import annotations

import logging
import threading

from xcache.counters import Counting
from xcache.errors import NotAskedError
from xcache.request import Request

logger = logging.getLogger("xcache")


class Trouble:
    """Counts errors, and warns of those whose kind and text are both new. Thread-safe."""

    def __init__(self, counting: Counting, warned: set[str]) -> None:
        """``warned`` holds the kinds and texts that this process or its parent has warned of."""
        self._counting = counting
        self._warned = warned
        self._is_silent = False
        self._lock = threading.RLock()

    def note(
        self, error: BaseException, effect: str = "compiling without the cache", request: Request | None = None
    ) -> None:
        """Count an error, and warn of it with its effect on the program."""
        if isinstance(error, NotAskedError):
            return
        kind = getattr(error, "kind", type(error).__name__)
        self._counting.error(kind)
        text = str(error) or "no reason was given"
        self.warn(kind, f"{request.module_name}: {text}" if request else text, effect)

    def warn(self, kind: str, error: str, effect: str = "compiling without the cache") -> None:
        """Warn of an error whose kind and text are both new; log any other at debug level."""
        with self._lock:
            first = self._warned.isdisjoint((kind, error))
            if first:
                self._warned |= {kind, error}
            if not self._is_silent:
                level = logging.WARNING if first else logging.DEBUG
                logger.log(level, "%s (%s); %s", error, kind, effect)

    def fall_silent(self, timeout: float) -> None:
        """Log nothing from now on, and wait until no other thread is logging."""
        self._is_silent = True
        if self._lock.acquire(timeout=timeout):
            self._lock.release()
