"""The answer to a client's first message: which daemon this is, with which settings, and what keeps it from sharing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from xcache._version import __version__
from xcache.config.config import Config
from xcache.wire import protocol
from xcached.host.reload import LiveSettings

# Many clients may come at once, and the answer looks at files.
_FRESH_SECONDS = 1.0


class Greeting:
    """Makes the answer, and keeps it for a moment."""

    def __init__(self, settings: LiveSettings, problems: Callable[[Config], list[str]]) -> None:
        """``problems`` returns what keeps the daemon from sharing entries with these settings."""
        self._settings = settings
        self._problems = problems
        # A daemon keeps these, whatever the settings say later.
        self._remotes = [tier.public_url for tier in settings.now.tiers()]
        self._directory, self._namespace = protocol.path_text(settings.now.dir), settings.now.namespace
        self._made: protocol.Welcome | None = None
        self._made_of, self._made_at = settings.now, 0.0

    def __call__(self) -> protocol.Welcome:
        """Return the answer."""
        now = self._settings.now
        if self._made is None or self._made_of is not now or time.monotonic() - self._made_at > _FRESH_SECONDS:
            self._made = protocol.Welcome(
                *(protocol.VERSION, __version__, os.getpid(), self._directory, self._remotes, self._namespace),
                now.of_daemon(),
                self._problems(now),
            )
            self._made_of, self._made_at = now, time.monotonic()
        return self._made
