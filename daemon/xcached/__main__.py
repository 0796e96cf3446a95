"""The daemon's entry point: builds its parts, serves, and shuts down cleanly."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Callable

from xcache._version import __version__
from xcache.config.config import Config
from xcache.errors import ConfigError, XcacheError
from xcache.wire.ownership import prepare_directory, prepare_meeting_place
from xcache.wire.protocol import FAILED, READY
from xcached.assembly import assemble, limits_of
from xcached.host.detach import leave_surroundings
from xcached.host.logs import ForJournal, log_to, note_failure, set_level, start_logging
from xcached.host.reload import LiveSettings, file_states
from xcached.host.systemd import Manager, address, inherited, leads_to_journal, turn_away
from xcached.host.upkeep import Upkeep
from xcached.net.rendezvous import Rendezvous, take_lock, take_over
from xcached.net.server import Server, listen
from xcached.requests.service import Service
from xcached.requests.trust import Trust
from xcached.store.store import Store

logger = logging.getLogger("xcached")

# Seconds for the requests in flight when the daemon is told to leave.
_FINISH_SECONDS = 30.0
_POLL_SECONDS = 2.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    """Serve until told to stop, or until the daemon has been idle for long enough."""
    parser = argparse.ArgumentParser(prog="xcached", description="The daemon of xcache; settings as for xcache itself.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--lock-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    ready, listener = Ready(arguments.ready_fd), None
    # Note the files' states before reading them, so that no change is missed.
    files = file_states()
    os.umask(0o077)
    try:
        if ready.awaited:
            leave_surroundings()
        # Ignored until there is something to reload.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        listener = inherited()
        asyncio.run(serve(LiveSettings(), listener, arguments.lock_fd, ready))
    except (XcacheError, OSError, sqlite3.Error) as error:
        journal = leads_to_journal(2)
        if journal and not logger.handlers:
            log_to(logging.StreamHandler(), ForJournal())
        if not journal:
            # sys.exit() prints the error to stderr, so the log must not.
            logger.handlers = [handler for handler in logger.handlers if type(handler) is not logging.StreamHandler]
        if logger.handlers:
            logger.error("%s", error)
        if listener is not None and not ready.said:
            turn_away(listener, f"the daemon cannot start: {error}", lambda: file_states() != files)
        ready.say(f"{FAILED}{error}")
        sys.exit(1 if journal or ready.awaited else f"xcached: {error}")


class Ready:
    """Tells the process that started the daemon, once, that it is ready or why it is not."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self.awaited = descriptor is not None
        self.said = False

    def say(self, what: str) -> None:
        """Write one line and close the pipe; redirect stderr, which led to the same process, to /dev/null."""
        self.said = True
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            # Begin a new line, in case a library left one unfinished.
            os.write(self._descriptor, f"\n{what.replace(chr(10), ' ')}\n".encode("utf-8", "replace"))
        os.close(self._descriptor)
        self._descriptor = None
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 2)
        os.close(nowhere)


async def serve(settings: LiveSettings, listener: socket.socket | None, lock: int | None, ready: Ready) -> None:
    """Start, serve and stop; restart in the same process if the database is damaged or gone."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(note_failure)
    stopping = asyncio.Event()
    again, told_to_leave = False, False

    def stop(reason: str) -> None:
        nonlocal told_to_leave
        told_to_leave = True
        logger.info("leaving: %s", reason)
        stopping.set()

    def restart(reason: str) -> None:
        nonlocal again
        again = True
        logger.error("restarting: %s", reason)
        stopping.set()

    config, manager = settings.now, Manager()
    trust = Trust(config)
    if config.daemon_user and not trust.shared:
        raise ConfigError(
            f"this machine has one daemon for all users, and it runs as {config.daemon_user!r} (daemon_user,"
            f" {config.sources['daemon_user']}); one of user {os.getuid()} would serve nobody"
        )
    prepare_directory(config.dir)
    if listener is None:
        prepare_meeting_place(config.socket.parent, for_everybody=trust.shared)
    # With a pipe, the starting process does not read stderr.
    start_logging(config, to_stderr=not ready.awaited)
    allow_descriptors(config.max_connections)
    lock = take_lock(config.dir, lock) if listener is None else await take_over(config.dir, lock, address(listener))
    # Handle signals from here on, so that an early one still leads to a clean shutdown.
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop, signal.Signals(number).name)
    upkeep = Upkeep(manager, settings, lambda: f"serves {config.dir}, {server.describe()}")
    # After a restart in the same process, the service manager's watchdog is already running.
    manager.heartbeat()
    store = Store(config.dir, limits_of(config, shared=trust.shared), shared=trust.shared)
    # The service adopts changed settings; trust does so first, because it may refuse them.
    settings.when_changed(trust.adopt)
    service = assemble(store, settings, trust, stop, restart, lambda: server.connections(), lambda: server.callers())
    activated = listener is not None
    if listener is None:
        listener = listen(config.socket, for_everybody=trust.shared)
    server = Server(listener, service, trust, settings)
    rendezvous = Rendezvous(address(listener), config.dir, lock, stays=activated)
    logger.info("xcached %s serves %s on %s", __version__, config.dir, address(listener))
    settings.when_changed(lambda new: allow_descriptors(new.max_connections))
    settings.when_changed(set_level)
    settings.when_changed(lambda new: warn_of_quota(new, trust))
    warn_of_quota(config, trust)
    ready.say(READY)
    upkeep.begin()
    try:
        await leave_when_idle(server, rendezvous, upkeep, stopping, store, restart)
    finally:
        if not again:
            manager.leaving()
        # Remove the socket first: a client that comes now starts a new daemon, which waits for the lock.
        rendezvous.leave()
        server.stop_listening()
        if not activated:
            listener.close()
        await finish(server, service)
        upkeep.close()
        logger.info("left")
    if again:
        # From here on a signal ends the process at once; the sleep has a signal noticed that has come already.
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        await asyncio.sleep(0.01)
        if not told_to_leave:
            os.set_inheritable(lock, True)
            if activated:
                # The process ID stays, so the variables of socket activation still name this process.
                os.set_inheritable(listener.fileno(), True)
            os.execv(sys.executable, [sys.executable, *interpreter_options(), "--lock-fd", str(lock)])  # noqa: S606


def interpreter_options() -> list[str]:
    """Return this process's arguments without the daemon's own: the interpreter's options and the program."""
    return sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]


def warn_of_quota(config: Config, trust: Trust) -> None:
    """Warn if the quota is so large that it protects nobody."""
    if trust.shared and config.max_size and config.user_quota >= config.max_size:
        logger.warning(
            "user_quota (%d) is no less than max_size (%d): it protects nobody beyond a fair share",
            config.user_quota,
            config.max_size,
        )


async def leave_when_idle(
    server: Server,
    rendezvous: Rendezvous,
    upkeep: Upkeep,
    stopping: asyncio.Event,
    store: Store,
    restart: Callable[[str], None],
) -> None:
    """Return when told to stop, when idle for long enough, or when clients can no longer reach the daemon or its store.

    If only the database or its journal was deleted or replaced, have the daemon restarted.
    """
    while not stopping.is_set():
        idle = server.settings.now.idle_exit
        left = server.last_request + idle - time.monotonic() if idle else _POLL_SECONDS
        if left <= 0 and not server.busy():
            logger.info("leaving: idle for %g s", idle)
            return
        if not rendezvous.has_socket():
            # Logging out may remove the user's runtime directory.
            logger.info("leaving: the socket was removed")
            return
        if not rendezvous.store_stands():
            logger.info("leaving: the store was removed")
            return
        if not store.database.is_in_place():
            restart("the database or its journal was deleted or replaced")
            return
        upkeep.look()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), min(max(left, 0.1), _POLL_SECONDS))


async def finish(server: Server, service: Service) -> None:
    """Finish and answer the requests in flight, then close."""
    service.begin_to_leave()
    # A look-up in progress must not find the store closed.
    deadline = time.monotonic() + 1.0
    while server.working() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    done = await asyncio.get_running_loop().run_in_executor(None, service.finish, _FINISH_SECONDS)
    if not done:
        logger.error("not everything could be written within %g s", _FINISH_SECONDS)
    deadline = time.monotonic() + 1.0
    while server.busy() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    server.close()


def allow_descriptors(connections: int) -> None:
    """Raise the limit of open files to four for each connection, for its socket and the files in its requests."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
            )


if __name__ == "__main__":
    main()
