"""Talking to the daemon: find it, start it, wait until it has left."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from xcache import protocol
from xcache._version import __version__
from xcache.cli.output import note
from xcache.config import Config
from xcache.connection import Connection
from xcache.errors import (
    ConfigError,
    ConnectionLostError,
    HungUpError,
    NobodyThereError,
    ProtocolError,
    RefusedError,
    UnavailableError,
)
from xcache.launcher import Launcher, alive
from xcache.private import trusted_uids

# A daemon gives what is in flight half a minute when it is told to leave.
_LEAVING_SECONDS = 40.0
# A new one may have a large store to open and to migrate.
_STARTING_SECONDS = 30.0
# What is met while one is just starting or leaving, and how long that is worth waiting for.
_BETWEEN = (NobodyThereError, HungUpError)
_BETWEEN_SECONDS = 2.0
_RETRY_EVERY = 0.02


def find(settings: Config) -> Connection | None:
    """A connection to the daemon, or None when none runs."""
    connection = _find_any(settings)
    return None if connection is None else _same_protocol(connection)


def reach(settings: Config) -> tuple[Connection, bool]:
    """A connection to the daemon, which is started when none runs; and whether it was."""
    launcher = Launcher(settings)
    started = False
    # Where a service manager listens, connecting starts it.
    slept = _sleeps(settings) and settings.socket.is_socket()
    deadline = time.monotonic() + settings.timeout
    while True:
        try:
            return _same_protocol(_connect(settings)), started or slept
        except _BETWEEN as error:
            slept = False
            if started or time.monotonic() >= deadline:
                raise _silent(settings, error) from None
        except ConnectionLostError as error:
            raise _silent(settings, error) from None
        started = launcher.start()
        if started:
            launcher.wait(_STARTING_SECONDS)
        else:
            # Somebody else's is on its way, or the last one is still leaving.
            time.sleep(_RETRY_EVERY)


def reach_for_change(settings: Config) -> Connection:
    """A connection to the daemon, which is started unless the user wants none to start by itself."""
    if settings.autostart:
        return reach(settings)[0]
    connection = find(settings)
    if connection is None:
        raise UnavailableError(
            "only a daemon changes the store, none runs, and the setting autostart is off; start one: xcache start"
        )
    return connection


def leave(settings: Config) -> protocol.Welcome | None:
    """Tell the daemon to leave and wait until it has; None when none ran."""
    connection = _find_any(settings)
    if connection is None:
        return None
    welcome = connection.welcome
    deadline = time.monotonic() + _LEAVING_SECONDS
    with contextlib.closing(connection):
        connection.demand(protocol.Stop("xcache stop"), protocol.Done, settings.timeout)
        connection.wait_for_end(_LEAVING_SECONDS)
    launcher = Launcher(settings)
    # The connection ends just before the process does. Its place may also be taken by another at once.
    while launcher.held() and alive(welcome.pid):
        if time.monotonic() >= deadline:
            raise UnavailableError(
                f"the daemon (process {welcome.pid}) was told to leave, and has not within {_LEAVING_SECONDS:g} s"
            )
        time.sleep(_RETRY_EVERY)
    return welcome


def knock(settings: Config) -> protocol.Welcome:
    """The welcome of a daemon that somebody else starts, however long that takes."""
    with contextlib.closing(_connection(settings, settings.socket, _STARTING_SECONDS)) as connection:
        return connection.welcome


def bring_up_to_date(settings: Config) -> bool:
    """Have a daemon, if one runs, write what it holds back; say so where that fails. Whether one runs."""
    try:
        connection = find(settings)
        if connection is None:
            return False
        with contextlib.closing(connection):
            connection.demand(protocol.Sync(), protocol.Done, settings.timeout)
    except (UnavailableError, RefusedError) as error:
        note(f"the latest uses may be missing: {error}")
    return True


def _find_any(settings: Config) -> Connection | None:
    """A connection to whatever version runs; none is started by looking for it."""
    launcher = Launcher(settings)
    if _sleeps(settings):
        return None
    deadline = time.monotonic() + min(settings.timeout, _BETWEEN_SECONDS)
    while True:
        try:
            return _connect(settings)
        except _BETWEEN as error:
            if not launcher.held():
                return None
            if time.monotonic() >= deadline:
                raise _silent(settings, error) from None
        except ConnectionLostError as error:
            raise _silent(settings, error) from None
        time.sleep(_RETRY_EVERY)


def _sleeps(settings: Config) -> bool:
    """Whether no daemon has the store, as far as this user may know: somebody may listen for it all the same."""
    return os.access(settings.dir, os.R_OK | os.X_OK) and not Launcher(settings).held()


def _connect(settings: Config) -> Connection:
    connection = _connect_wherever(settings)
    theirs = connection.welcome.directory
    if theirs != protocol.path_text(settings.dir) and not _same_directory(Path(theirs), settings.dir):
        connection.close()
        raise ConfigError(
            f"the daemon on {settings.socket} serves {theirs}, not {settings.dir}; change XCACHE_SOCKET or XCACHE_DIR"
        )
    return connection


def _connect_wherever(settings: Config) -> Connection:
    try:
        return _connection(settings, settings.socket)
    except NobodyThereError:
        # The store's daemon may have been started where the socket is elsewhere.
        elsewhere = Launcher(settings).address() if Launcher(settings).held() else None
        if elsewhere is None:
            raise
        return _connection(settings, elsewhere)


def _connection(settings: Config, path: Path, timeout: float | None = None) -> Connection:
    return Connection(path, timeout or settings.timeout, __version__, trusted_uids(settings.daemon_user))


def _same_protocol(connection: Connection) -> Connection:
    welcome = connection.welcome
    if welcome.protocol == protocol.VERSION:
        return connection
    connection.close()
    raise ProtocolError(
        f"the daemon (xcache {welcome.version}, process {welcome.pid}) speaks version {welcome.protocol} of the"
        f" protocol, and this xcache {protocol.VERSION}; replace it: xcache restart"
    )


def _silent(settings: Config, error: ConnectionLostError) -> UnavailableError:
    perhaps = "; perhaps it was given another XCACHE_SOCKET" if isinstance(error, NobodyThereError) else ""
    return UnavailableError(f"a daemon has {settings.dir} and does not answer ({error}){perhaps}")


def _same_directory(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
