"""The daemon: wires everything together, serves, and leaves in good order."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import logging.handlers
import os
import resource
import signal
import socket
import sqlite3
import sys
import time

from xcache._version import __version__
from xcache.config import Config
from xcache.errors import ConfigError, XcacheError
from xcache.private import prepare_directory, prepare_meeting_place
from xcache.protocol import FAILED, READY
from xcached.place import MeetingPlace, take_lock, take_over
from xcached.server import Server, listen
from xcached.service import Service
from xcached.settings import Settings
from xcached.store import Store
from xcached.systemd import JournalFormatter, Manager, address, inherited, leads_to_journal, turn_away
from xcached.trust import Trust
from xcached.upkeep import Upkeep

logger = logging.getLogger("xcached")

LOG = "daemon.log"
_LOG_SIZE = 1024 * 1024
# What is in flight when the daemon is told to leave has this long.
_LAST_ORDERS = 30.0
_LOOK_EVERY = 2.0
_TELL_TO_LEAVE = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    """Serve until told to stop, or until nobody has asked for a while."""
    parser = argparse.ArgumentParser(prog="xcached", description="The daemon of xcache; settings as for xcache itself.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--lock-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    ready, listener = Ready(arguments.ready_fd), None
    os.umask(0o077)
    # Until there are settings to be read again.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        listener = inherited()
        asyncio.run(serve(Settings(), listener, arguments.lock_fd, ready))
    except (XcacheError, OSError, sqlite3.Error) as error:
        journal = leads_to_journal(2)
        if journal and not logger.handlers:
            log_to(logging.StreamHandler(), JournalFormatter())
        logger.error("%s", error)
        if listener is not None and not ready.said:
            turn_away(listener, f"the daemon cannot start: {error}")
        ready.say(f"{FAILED}{error}")
        sys.exit(1 if journal or arguments.ready_fd is not None else f"xcached: {error}")


class Ready:
    """Tells whoever started the daemon that it is ready, or why not; once."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self.awaited = descriptor is not None
        self.said = False

    def say(self, what: str) -> None:
        """Write one line and let go; from then on stderr leads nowhere if it led there."""
        self.said = True
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            # On a line of its own, whatever a library has left unfinished there.
            os.write(self._descriptor, f"\n{what.replace(chr(10), ' ')}\n".encode("utf-8", "replace"))
        os.close(self._descriptor)
        self._descriptor = None
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 2)
        os.close(nowhere)


async def serve(settings: Settings, listener: socket.socket | None, lock: int | None, ready: Ready) -> None:
    """Start, serve, stop; and begin anew in the same process if the store needs that."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    again, told_to_leave = False, False

    def stop(reason: str) -> None:
        nonlocal told_to_leave
        told_to_leave = True
        logger.info("leaving: %s", reason)
        stopping.set()

    def begin_anew(reason: str) -> None:
        nonlocal again
        again = True
        logger.error("beginning anew: %s", reason)
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
    # Who started it by another program has no eye on its stderr.
    start_logging(config, to_stderr=not ready.awaited)
    allow_descriptors(config.max_connections)
    lock = take_lock(config.dir, lock) if listener is None else await take_over(config.dir, lock, address(listener))
    # Signals are held back from here on, so that one which comes early still finds everything to be undone.
    for number in _TELL_TO_LEAVE:
        loop.add_signal_handler(number, stop, signal.Signals(number).name)
    upkeep = Upkeep(manager, settings, lambda: f"serves {config.dir}, {server.describe()}")
    # One that begins anew was being watched already.
    manager.alive()
    store = Store(config.dir, *limits(config, trust))
    service = Service(store, settings, trust, __version__, stop, begin_anew)
    activated = listener is not None
    if listener is None:
        listener = listen(config.socket, for_everybody=trust.shared)
    server = Server(listener, service, settings)
    place = MeetingPlace(address(listener), config.dir, lock, stays=activated)
    logger.info("xcached %s serves %s on %s", __version__, config.dir, address(listener))
    take_changes(settings, trust, store)
    ready.say(READY)
    upkeep.begin()
    try:
        await leave_when_idle(server, place, upkeep, stopping)
    finally:
        if not again:
            manager.leaving()
        # First the name, so that who comes now starts a fresh daemon and waits for the lock.
        place.leave()
        server.stop_listening()
        if not activated:
            listener.close()
        await finish(server, service)
        upkeep.close()
        logger.info("left")
    if again:
        # From here on a signal ends this process at once; one that came before is still to be heard of.
        for number in _TELL_TO_LEAVE:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        await asyncio.sleep(0.01)
        if not told_to_leave:
            os.set_inheritable(lock, True)
            if activated:
                # The process is the same, and so the variables still speak of it.
                os.set_inheritable(listener.fileno(), True)
            os.execv(sys.executable, [sys.executable, "-P", "-m", "xcached", "--lock-fd", str(lock)])  # noqa: S606


def take_changes(settings: Settings, trust: Trust, store: Store) -> None:
    """Have those who do not ask for a setting each time told of a change; who may refuse it comes first."""
    settings.when_changed(trust.take)
    settings.when_changed(lambda new: store.limit(*limits(new, trust)))
    settings.when_changed(lambda new: allow_descriptors(new.max_connections))
    settings.when_changed(set_level)


def limits(config: Config, trust: Trust) -> tuple[int, int, float]:
    """How much the store may hold, and each user's entries, and how old; a quota is for where there are several."""
    return config.max_size, config.user_quota if trust.shared else 0, config.max_age


async def leave_when_idle(server: Server, place: MeetingPlace, upkeep: Upkeep, stopping: asyncio.Event) -> None:
    """Return when told to stop, when nobody has asked for a while, or when nobody can any more."""
    while not stopping.is_set():
        idle = server.settings.now.idle_exit
        left = server.last_request + idle - time.monotonic() if idle else _LOOK_EVERY
        if left <= 0 and not server.busy():
            logger.info("leaving: idle for %g s", idle)
            return
        if not place.stands():
            # The end of a session may take the runtime directory with it.
            logger.info("leaving: the socket was removed")
            return
        if not place.store_stands():
            logger.info("leaving: the store was removed")
            return
        upkeep.look()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), min(max(left, 0.1), _LOOK_EVERY))


async def finish(server: Server, service: Service) -> None:
    """Write what is in flight, answer it, and close."""
    service.begin_to_leave()
    done = await asyncio.get_running_loop().run_in_executor(None, service.finish, _LAST_ORDERS)
    if not done:
        logger.error("not everything could be written within %g s", _LAST_ORDERS)
    deadline = time.monotonic() + 1.0
    while server.busy() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    server.close()


def start_logging(config: Config, *, to_stderr: bool) -> None:
    """Log to a file that stays bounded, and to stderr when somebody is looking; or to the journal instead."""
    line = logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s")
    if leads_to_journal(2):
        log_to(logging.StreamHandler(), JournalFormatter())
    else:
        log_to(logging.handlers.RotatingFileHandler(config.dir / LOG, maxBytes=_LOG_SIZE, backupCount=1), line)
        if to_stderr:
            log_to(logging.StreamHandler(), line)
    set_level(config)
    # A log that cannot be written is no reason to stop.
    logging.raiseExceptions = False


def log_to(handler: logging.Handler, formatter: logging.Formatter) -> None:
    """Have the daemon's lines go there, and what its loop says of defects."""
    handler.setFormatter(formatter)
    for source in (logger, logging.getLogger("asyncio")):
        source.addHandler(handler)


def set_level(config: Config) -> None:
    """What a daemon does is worth a line even where a program should be silent."""
    logger.setLevel("INFO" if config.log == "warning" else config.log.upper())


def allow_descriptors(connections: int) -> None:
    """Have as many descriptors as the connections may need: each, what comes beside a message, and a file or two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
            )


if __name__ == "__main__":
    main()
