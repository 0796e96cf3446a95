"""The daemon's periodic work: it follows the settings' files, and keeps the service manager informed."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from xcached.host.reload import Following, LiveSettings
from xcached.host.systemd import Manager

logger = logging.getLogger("xcached")


class Upkeep:
    """Runs on the serving loop, so that the service manager gets no heartbeat from a loop that hangs."""

    def __init__(self, manager: Manager, settings: LiveSettings, describe: Callable[[], str]) -> None:
        """``describe`` returns in a few words what the daemon is doing."""
        self._manager = manager
        self._settings = settings
        self._describe = describe
        self._loop = asyncio.get_running_loop()
        self._ticking: asyncio.TimerHandle | None = None
        self._following: Following | None = None
        # From here on no SIGHUP is lost; it is handled when the loop runs.
        self._loop.add_signal_handler(signal.SIGHUP, self.reload)

    def begin(self) -> None:
        """Tell the manager that the daemon serves, and start following the settings."""
        self._following = Following(self._settings, self._report_status)
        self._manager.ready(self._status())
        self._tick()

    def reload(self) -> None:
        """Read the settings again, on request."""
        logger.info("reading the settings again")
        self._manager.reloading()
        self._settings.reload()
        self._manager.ready(self._status())

    def look(self) -> None:
        """Check for changes that went unnoticed, and update the status."""
        if self._following is not None:
            self._following.look()
        self._report_status()

    def close(self) -> None:
        """Stop following and sending heartbeats."""
        if self._following is not None:
            self._following.close()
        if self._ticking is not None:
            self._ticking.cancel()

    def _report_status(self) -> None:
        self._manager.status(self._status())

    def _status(self) -> str:
        problem = self._settings.problem
        return self._describe() + (f"; a change of the settings was refused: {problem}" if problem else "")

    def _tick(self) -> None:
        if self._manager.watch_every is not None:
            self._manager.heartbeat()
            self._ticking = self._loop.call_later(self._manager.watch_every, self._tick)
