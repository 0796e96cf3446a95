"""Connects to the daemon: starts one if none runs, and replaces one that is older than this program."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping

from xcache.client.connection import Connection, left
from xcache.client.launcher import Launcher
from xcache.clock import pause
from xcache.config.config import Config
from xcache.config.table import as_typed
from xcache.errors import HungUpError, NobodyThereError, ProtocolError, UnavailableError
from xcache.wire import protocol
from xcache.wire.ownership import trusted_uids

logger = logging.getLogger("xcache")

_RETRY_SECONDS = 0.01


class Connector:
    """Makes connections to the daemon of one store. Thread-safe."""

    def __init__(self, config: Config, version: str, launcher: Launcher | None) -> None:
        """With a ``launcher``, a daemon is started if none runs."""
        self._config = config
        self._version = version
        self._launcher = launcher
        # Only to find the daemon's socket.
        self._finder = launcher or Launcher(config)
        self._trusted: set[int] | None = None
        self._is_leaving = False
        # Whether the daemon's settings were compared with this program's.
        self._is_compared = False

    def start_no_more(self) -> None:
        """Start no daemon from now on: the program is leaving, and perhaps so is the folder of its store."""
        self._is_leaving = True

    def connect(self, deadline: float) -> Connection:
        """Connect; start a daemon if none runs, and stop one that is older than this program."""
        if self._trusted is None:
            self._trusted = trusted_uids(self._config.daemon_uid())
        replaced = started = hung_up = False
        listening: float | None = None
        path = self._config.socket
        while True:
            try:
                connection = Connection(path, left(deadline), self._version, self._trusted)
            except HungUpError:
                # The daemon was stopping, or was killed; the next one will listen soon.
                if hung_up:
                    raise
                hung_up = True
                pause(min(_RETRY_SECONDS, left(deadline)))
                continue
            except NobodyThereError:
                if self._launcher is None or self._is_leaving:
                    elsewhere = self._finder.address()
                    if elsewhere is None or elsewhere == path:
                        raise
                    path = elsewhere
                    continue
                # All threads wait for the same start. If it fails, none of them starts another daemon.
                if listening is None:
                    listening = self._launcher.listen()
                elif reason := self._launcher.failure(listening):
                    raise UnavailableError(f"the daemon did not start: {reason}") from None
                # This is tried in each round, because a stopping daemon holds the store longer than its socket.
                started = started or self._launcher.start(listening)
                # The daemon of this store may listen elsewhere, if it was started without XDG_RUNTIME_DIR (cron, sudo)
                # or with another temporary directory (batch jobs).
                path = (not started and self._launcher.address()) or self._config.socket
                pause(min(_RETRY_SECONDS, left(deadline)))
                continue
            theirs = connection.welcome.protocol
            if theirs == protocol.VERSION:
                if self._launcher is not None:
                    # The daemon is ready; its start has nothing more to report.
                    self._launcher.close()
                self._warn_of_differences(connection.welcome)
                return connection
            if theirs > protocol.VERSION or replaced or self._launcher is None:
                connection.close()
                raise ProtocolError(
                    f"the daemon speaks version {theirs} of the protocol, this program {protocol.VERSION}"
                )
            from xcache.wire import commands

            with contextlib.closing(connection):
                connection.demand(commands.Stop("a newer xcache takes over"), protocol.Done, left(deadline))
                connection.wait_for_end(left(deadline))
            replaced = True

    def _warn_of_differences(self, welcome: protocol.Welcome) -> None:
        """Warn once of settings of this program that the daemon does not have, and of what keeps it from sharing."""
        if welcome.remotes is None or self._is_compared:
            return
        self._is_compared = True
        restart = "to start it with the settings of now: xcache restart"
        remedy = restart if self._config.daemon_uid() is None else "the machine's daemon has settings of its own"
        if ignored := self._config.ignored_by(welcome.settings or {}):
            logger.warning("%s; %s", told_of_ignored(ignored), remedy)
        self._warn_of_tiers(welcome, remedy)

    def _warn_of_tiers(self, welcome: protocol.Welcome, remedy: str) -> None:
        tiers = self._config.tiers()
        theirs = set(map(_plain, welcome.remotes or ()))
        missing = [tier.public_url for tier in tiers if _plain(tier.public_url) not in theirs]
        for problem in (welcome.problems or ()) if tiers else ():
            logger.warning("%s; `xcache doctor` says what to do", problem)
        if tiers and not missing and welcome.namespace != self._config.namespace:
            logger.warning(
                "the daemon was started with %s, and the settings of this program name %s, so what it compiles is"
                " shared in that of the daemon; %s",
                _said(welcome.namespace),
                _said(self._config.namespace),
                remedy,
            )
        if missing:
            logger.warning(
                "the daemon was started without %s, which the settings of this program name, so nothing is shared"
                " there; %s",
                ", ".join(missing),
                remedy,
            )


def told_of_ignored(ignored: Mapping[str, str]) -> str:
    """Return, in words, which settings do not count here, and what the daemon has in their place."""
    given = ", ".join(f"XCACHE_{name.upper()}" for name in ignored)
    theirs = ", ".join(f"{name}={as_typed(name, value)!r}" for name, value in ignored.items())
    return f"{given} as given here {'do' if len(ignored) > 1 else 'does'} not count: the daemon runs with {theirs}"


def _said(namespace: str | None) -> str:
    return f"the namespace {namespace}" if namespace else "no namespace"


def _plain(address: str) -> str:
    """Return an address in one spelling, as far as that matters to a warning."""
    beginning, slashes, rest = address.partition("://")
    where, slash, path = rest.partition("/")
    return f"{beginning}{slashes}{where.lower()}{slash}{path}".rstrip("/")
