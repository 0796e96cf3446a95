"""Find, start and stop the daemon, and connect to it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from xcache._version import __version__
from xcache.cli.output import note, print_line
from xcache.cli.store_file import EMPTY
from xcache.client.connection import Connection
from xcache.client.launcher import Launcher, alive
from xcache.config.config import Config
from xcache.errors import (
    ConfigError,
    ConnectionLostError,
    HungUpError,
    NobodyThereError,
    ProtocolError,
    RefusedError,
    UnavailableError,
    UntrustedError,
)
from xcache.wire import commands, protocol
from xcache.wire.ownership import check_store_directory, trusted_uids

# A daemon that is told to stop gives the requests in progress half a minute.
_STOP_SECONDS = 40.0
# A new daemon may have to open and migrate a large store.
_START_SECONDS = 30.0
# The errors while a daemon is just starting or stopping, and how long to wait for it then.
_TRANSIENT = (NobodyThereError, HungUpError)
_TRANSIENT_SECONDS = 2.0
_RETRY_SECONDS = 0.02


def find(settings: Config) -> Connection | None:
    """Return a connection to the running daemon, or None."""
    connection = _find_any(settings)
    return None if connection is None else _same_protocol(connection)


def find_with_any_store(settings: Config) -> tuple[Connection | None, str | None]:
    """Return a connection to the running daemon, and a warning if it serves another store than the settings name."""
    connection = _find_any(settings, _connect_to_any_store)
    if connection is None:
        return None, None
    said = None if _serves(connection, settings) else _other_store(connection, settings)
    return _same_protocol(connection), said


def connect_or_start(settings: Config) -> tuple[Connection, bool]:
    """Return a connection to the daemon, started if none runs, and whether it was started."""
    launcher = Launcher(settings)
    started = False
    # If a service manager listens, connecting starts the daemon.
    was_down = _is_held_by_none(settings) and settings.socket.is_socket()
    deadline = time.monotonic() + settings.timeout
    while True:
        try:
            return _same_protocol(_connect(settings)), started or was_down
        except _TRANSIENT as error:
            was_down = False
            if started or time.monotonic() >= deadline:
                raise _no_answer(settings, error) from None
        except ConnectionLostError as error:
            raise _no_answer(settings, error) from None
        started = launcher.start()
        if started:
            launcher.wait(_START_SECONDS)
        else:
            # Another process is starting one, or the last one has not ended yet.
            time.sleep(_RETRY_SECONDS)


def connect_for_change(settings: Config) -> Connection:
    """Return a connection to the daemon, started if none runs and the setting autostart allows it."""
    if settings.autostart:
        return connect_or_start(settings)[0]
    connection = find(settings)
    if connection is None:
        raise UnavailableError(
            "only a daemon can change the store, none runs, and the setting autostart is off; start one: xcache start"
        )
    return connection


def stop(settings: Config, *, comes_back: bool = False) -> protocol.Welcome | None:
    """Stop the daemon and wait until it has ended; return its welcome, or None if none ran.

    With ``comes_back``, fail instead of stopping a daemon that this user could not start again.
    """
    connection = _find_any(settings)
    if connection is None:
        return None
    welcome, listener = connection.welcome, connection.listener
    by_hand = listener.pid == welcome.pid and not Launcher(settings).may_start()
    # The daemon itself refuses other users.
    if comes_back and by_hand and os.getuid() in (0, listener.uid):
        connection.close()
        raise UnavailableError(
            f"process {welcome.pid} was started by hand, as {settings.daemon_user!r}, and only that account could start"
            " it again; end it and start it as you did: xcache stop, and xcached under that account"
        )
    deadline = time.monotonic() + _STOP_SECONDS
    with contextlib.closing(connection):
        asked = "xcache restart" if comes_back else "xcache stop"
        connection.demand(commands.Stop(asked), protocol.Done, settings.timeout)
        connection.wait_for_end(_STOP_SECONDS)
    launcher = Launcher(settings)
    # The connection ends just before the process does, and another daemon may take the store at once.
    while launcher.held() and alive(welcome.pid):
        if time.monotonic() >= deadline:
            raise UnavailableError(
                f"the daemon (process {welcome.pid}) was told to stop, and has not ended within {_STOP_SECONDS:g} s"
            )
        time.sleep(_RETRY_SECONDS)
    return welcome


def none_ran_message(settings: Config, problems: Sequence[str]) -> str:
    """Return the message for the case that no daemon was found."""
    if problems:
        return f"no daemon was running for {settings.dir}, which may be another store than the settings mean"
    if os.access(settings.dir, os.R_OK | os.X_OK) or not settings.daemon_user:
        return "no daemon was running"
    return f"nobody listens on {settings.socket}"


def await_activated(settings: Config) -> protocol.Welcome:
    """Return the welcome of a daemon that a service manager starts, allowing for a slow start."""
    with contextlib.closing(_connection(settings, settings.socket, _START_SECONDS)) as connection:
        return connection.welcome


def unusable_store(settings: Config) -> str | None:
    """Return why this user's programs could not start a daemon on the store, or make one, or None."""
    if not Launcher(settings).may_start():
        return None
    place = nearest(settings.dir)
    if place != settings.dir:
        may_be_made = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
        return None if may_be_made else f"{settings.dir} does not exist and cannot be made"
    try:
        check_store_directory(settings.dir)
    except UntrustedError as error:
        return str(error)
    return None if os.access(settings.dir, os.W_OK | os.X_OK) else f"{settings.dir} cannot be written"


def nearest(path: Path) -> Path:
    """Return the path itself, or the nearest folder above it that this user can see."""
    # os.path returns False where Path raises: the folder above may be closed.
    return next(each for each in (path, *path.parents) if os.path.lexists(each) or each == each.parent)


def say_empty(settings: Config, said: str = EMPTY) -> None:
    """Print that the store is empty, and note why programs cannot use it if that is so."""
    print_line(said)
    if reason := unusable_store(settings):
        note(f"programs run without the cache: {reason}")


def flush(settings: Config, *, of_runs: bool = False) -> bool:
    """Have the daemon, if one runs, write pending changes, and note a failure; return False if none runs.

    With ``of_runs``, note as well that it could not record the last runs.
    """
    try:
        connection = find(settings)
        if connection is None:
            return False
        with contextlib.closing(connection):
            connection.demand(commands.Sync(), protocol.Done, settings.timeout)
            if of_runs:
                note_unrecorded_runs(connection, settings.timeout)
    except (UnavailableError, RefusedError) as error:
        note(f"the latest uses may be missing: {error}")
    return True


def note_unrecorded_runs(connection: Connection, timeout: float) -> None:
    """Say that the store did not take the last runs, if that is so."""
    facts = connection.demand(protocol.AskStatus(), protocol.Status, timeout).facts
    if missing := facts.get("unrecorded_runs"):
        runs = "run was" if missing == 1 else f"{missing} runs were"
        note(f"the last {runs} not recorded: the store could not be written (`xcache status`, and the daemon's log)")


def _find_any(settings: Config, connect: Callable[[Config], Connection] | None = None) -> Connection | None:
    """Return a connection to the running daemon of any version, or None; never start one."""
    connect = connect or _connect
    launcher = Launcher(settings)
    if _is_held_by_none(settings) and not _may_serve_another(settings):
        return None
    deadline = time.monotonic() + min(settings.timeout, _TRANSIENT_SECONDS)
    while True:
        try:
            return connect(settings)
        except _TRANSIENT as error:
            if not launcher.held():
                return None
            if time.monotonic() >= deadline:
                raise _no_answer(settings, error) from None
        except ConnectionLostError as error:
            raise _no_answer(settings, error) from None
        time.sleep(_RETRY_SECONDS)


def _is_held_by_none(settings: Config) -> bool:
    """Return whether no daemon has the store, as far as this user can see; a service manager may listen for it."""
    machine_uid = settings.daemon_uid()
    if machine_uid is not None and not _is_of(settings.dir, machine_uid):
        # The machine's daemon has another store than the settings name, or one that this user cannot see.
        return False
    return os.access(settings.dir, os.R_OK | os.X_OK) and not Launcher(settings).held()


def _may_serve_another(settings: Config) -> bool:
    """Return whether the daemon of another store may listen on the socket.

    A manager's socket may exist before the store has a lock file, or be named in it by a daemon that has ended;
    connecting would start another daemon.
    """
    if not settings.socket.is_socket() or not (settings.dir / protocol.LOCK).exists():
        return False
    address = Launcher(settings).address()
    return address is None or not _same_file(address, settings.socket)


def _is_of(directory: Path, uid: int) -> bool:
    try:
        return directory.stat().st_uid == uid
    except OSError:
        return False


def _connect(settings: Config) -> Connection:
    connection = _connect_to_any_store(settings)
    if not _serves(connection, settings):
        connection.close()
        raise ConfigError(f"nothing was done: {_other_store(connection, settings)}")
    return connection


def _serves(connection: Connection, settings: Config) -> bool:
    theirs = connection.welcome.directory
    return theirs == protocol.path_text(settings.dir) or _same_file(Path(theirs), settings.dir)


def _other_store(connection: Connection, settings: Config) -> str:
    return (
        f"the daemon on {connection.path} serves {connection.welcome.directory}, not {settings.dir}; programs use it"
        " all the same; "
        + (
            "for a daemon of your own, set XCACHE_DAEMON_USER= (empty), too"
            if settings.daemon_user
            else "change XCACHE_SOCKET or XCACHE_DIR"
        )
    )


def _connect_to_any_store(settings: Config) -> Connection:
    try:
        return _connection(settings, settings.socket)
    except NobodyThereError:
        # The store's daemon may listen on another socket.
        elsewhere = Launcher(settings).address() if Launcher(settings).held() else None
        if elsewhere is None:
            raise
        return _connection(settings, elsewhere)


def _connection(settings: Config, path: Path, timeout: float | None = None) -> Connection:
    return Connection(path, timeout or settings.timeout, __version__, trusted_uids(settings.daemon_uid()))


def _same_protocol(connection: Connection) -> Connection:
    welcome = connection.welcome
    if welcome.protocol == protocol.VERSION:
        return connection
    connection.close()
    raise ProtocolError(
        f"the daemon (xcache {welcome.version}, process {welcome.pid}) speaks version {welcome.protocol} of the"
        f" protocol, and this xcache {protocol.VERSION}; replace it: xcache restart"
    )


def _no_answer(settings: Config, error: ConnectionLostError) -> UnavailableError:
    perhaps = "; perhaps it was given another XCACHE_SOCKET" if isinstance(error, NobodyThereError) else ""
    process = Launcher(settings).process()
    ending = f"; to end it: kill -9 {process} (what it has acknowledged stays)" if process and not perhaps else ""
    return UnavailableError(f"the daemon of {settings.dir} does not answer ({error}){perhaps}{ending}")


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
