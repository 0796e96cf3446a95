"""The daemon: wires everything together, serves, and leaves in good order."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import logging
import logging.handlers
import os
import resource
import signal
import sqlite3
import sys
import time
from pathlib import Path

from xcache import config
from xcache._version import __version__
from xcache.errors import StoreError, XcacheError
from xcache.private import prepare_directory, prepare_meeting_place
from xcache.protocol import FAILED, LOCK, READY
from xcached.server import Server, listen
from xcached.service import Service
from xcached.store import Store
from xcached.trust import Trust

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
    ready = Ready(arguments.ready_fd)
    os.umask(0o077)
    try:
        settings = config.load()
        asyncio.run(serve(settings, arguments.lock_fd, ready))
    except (XcacheError, OSError, sqlite3.Error) as error:
        logger.error("%s", error)
        ready.say(f"{FAILED}{error}")
        sys.exit(f"xcached: {error}" if arguments.ready_fd is None else 1)


class Ready:
    """Tells whoever started the daemon that it is ready, or why not; once."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self.awaited = descriptor is not None

    def say(self, what: str) -> None:
        """Write one line and let go; from then on stderr leads nowhere if it led there."""
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


async def serve(settings: config.Config, lock: int | None, ready: Ready) -> None:
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

    trust = Trust(settings)
    prepare_directory(settings.dir)
    prepare_meeting_place(settings.socket.parent, for_everybody=trust.shared)
    # Who started it by another program has no eye on its stderr.
    start_logging(settings, to_stderr=not ready.awaited)
    allow_descriptors(settings.max_connections)
    lock = take_lock(settings.dir, lock)
    # Signals are held back from here on, so that one which comes early still finds everything to be undone.
    for number in _TELL_TO_LEAVE:
        loop.add_signal_handler(number, stop, signal.Signals(number).name)
    quota = settings.user_quota if trust.shared else 0
    store = Store(settings.dir, settings.max_size, quota, settings.max_age)
    service = Service(store, settings, trust, __version__, stop, begin_anew)
    server = Server(listen(settings.socket, for_everybody=trust.shared), service, settings)
    place = MeetingPlace(settings.socket, settings.dir, lock)
    logger.info("xcached %s serves %s on %s", __version__, settings.dir, settings.socket)
    ready.say(READY)
    try:
        await leave_when_idle(server, place, settings.idle_exit, stopping)
    finally:
        # First the name, so that who comes now starts a fresh daemon and waits for the lock.
        place.leave()
        server.stop_listening()
        await finish(server, service)
        logger.info("left")
    if again:
        # From here on a signal ends this process at once; one that came before is still to be heard of.
        for number in _TELL_TO_LEAVE:
            signal.signal(number, signal.SIG_DFL)
        await asyncio.sleep(0.01)
        if not told_to_leave:
            os.set_inheritable(lock, True)
            os.execv(sys.executable, [sys.executable, "-P", "-m", "xcached", "--lock-fd", str(lock)])  # noqa: S606


class MeetingPlace:
    """The socket's name; it also stands in the lock file, for who looks for the store's daemon elsewhere."""

    def __init__(self, path: Path, directory: Path, lock: int) -> None:
        self._path = path
        self._lock_path = directory / LOCK
        self._lock = lock
        self._inode = path.stat().st_ino
        # On a full disk those who look elsewhere do not find it; that is no reason to serve nobody.
        with contextlib.suppress(OSError):
            os.pwrite(lock, b"%d\n%s" % (os.getpid(), os.fsencode(path)), 0)

    def stands(self) -> bool:
        """Whether the name still leads here."""
        return _inode(self._path) == self._inode

    def store_stands(self) -> bool:
        """Whether the lock is still that of the store which others would open."""
        return _inode(self._lock_path) == os.fstat(self._lock).st_ino

    def leave(self) -> None:
        """Take the name away, so that nobody comes here any more."""
        os.ftruncate(self._lock, 0)
        if self.stands():
            self._path.unlink(missing_ok=True)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


async def leave_when_idle(server: Server, place: MeetingPlace, idle: float, stopping: asyncio.Event) -> None:
    """Return when told to stop, when nobody has asked for ``idle`` seconds (0: never), or when nobody can any more."""
    while not stopping.is_set():
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
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), min(max(left, 0.1), _LOOK_EVERY))


async def finish(server: Server, service: Service) -> None:
    """Write what is in flight, answer it, and close."""
    service.send_waiters_away()
    done = await asyncio.get_running_loop().run_in_executor(None, service.finish, _LAST_ORDERS)
    if not done:
        logger.error("not everything could be written within %g s", _LAST_ORDERS)
    deadline = time.monotonic() + 1.0
    while server.busy() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    server.close()


def start_logging(settings: config.Config, *, to_stderr: bool) -> None:
    """Log to a file that stays bounded, and to stderr when somebody is looking."""
    file = logging.handlers.RotatingFileHandler(settings.dir / LOG, maxBytes=_LOG_SIZE, backupCount=1)
    handlers: list[logging.Handler] = [file]
    if to_stderr:
        handlers.append(logging.StreamHandler())
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
        logger.addHandler(handler)
    # What a daemon does is worth a line even where a program should be silent.
    level = "info" if settings.log == "warning" else settings.log
    logger.setLevel(level.upper())
    # A log that cannot be written is no reason to stop.
    logging.raiseExceptions = False


def allow_descriptors(connections: int) -> None:
    """Have as many descriptors as the connections may need: each, what comes beside a message, and a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
            )


def take_lock(directory: Path, inherited: int | None) -> int:
    """Hold the store's lock for as long as this process lives: one daemon a store."""
    if inherited is not None:
        os.set_inheritable(inherited, False)
        lock = inherited
    else:
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(f"another daemon serves {directory}") from None
    # What stands there is where the last one listened.
    os.ftruncate(lock, 0)
    return lock


if __name__ == "__main__":
    main()
