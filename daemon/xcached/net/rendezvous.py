"""The lock that admits one daemon per store, and the socket where clients find it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from xcache._version import __version__
from xcache.errors import NoLocksError, ProtocolError, StoreError, UntrustedError
from xcache.wire import commands, framing, protocol
from xcache.wire.ownership import at_once, check_peer
from xcache.wire.protocol import LOCK, MOST_LOCK_BYTES

logger = logging.getLogger("xcached")

# The time a daemon may take to leave, and a margin.
_LEAVING_SECONDS = 40.0
_RETRY_SECONDS = 0.05
_ASK_SECONDS = 2.0


class Rendezvous:
    """The socket's path. The lock file names it too, for clients with another setting of ``socket``."""

    def __init__(self, path: Path, directory: Path, lock: int, *, stays: bool) -> None:
        """``stays``: the socket belongs to the service manager, which keeps listening after this daemon has left."""
        self._path = path
        self._lock_path = directory / LOCK
        self._lock = lock
        self._stays = stays
        self._inode = path.stat().st_ino
        # On a full disk this fails, and only clients with another socket cannot find the daemon.
        with contextlib.suppress(OSError):
            # The inode is written as well, so that a copy of the store does not lead here.
            os.pwrite(lock, b"%d %d\n%s" % (os.getpid(), os.fstat(lock).st_ino, os.fsencode(path)), 0)

    def has_socket(self) -> bool:
        """Return whether the path still leads to this daemon's socket."""
        return _inode(self._path) == self._inode

    def store_stands(self) -> bool:
        """Return whether the held lock file is still the one at the store's path."""
        return _inode(self._lock_path) == os.fstat(self._lock).st_ino

    def leave(self) -> None:
        """Unlink the socket, so that no new client comes; one of the service manager leads to the next daemon."""
        if self._stays and self.has_socket():
            return
        os.ftruncate(self._lock, 0)
        if self.has_socket():
            self._path.unlink(missing_ok=True)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def take_lock(directory: Path, inherited: int | None) -> int:
    """Take the store's lock for the life of this process, so that it is the store's only daemon."""
    if inherited is not None:
        os.set_inheritable(inherited, False)
        lock = inherited
    else:
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if not isinstance(error, BlockingIOError):
                raise NoLocksError(directory, error.strerror) from None
            raise StoreError(f"another daemon serves {directory}") from None
    # Erase where the last daemon listened.
    os.ftruncate(lock, 0)
    return lock


async def take_over(directory: Path, inherited: int | None, own: Path) -> int:
    """Take the store's lock for the service manager's daemon; ask a daemon that a client started to leave.

    Otherwise clients of the manager's socket would wait for a daemon that cannot start. A daemon that listened on the
    same path notices by itself that its socket was replaced; a message sent there would reach this one.
    """
    deadline = time.monotonic() + _LEAVING_SECONDS
    asked = False
    while True:
        try:
            return take_lock(directory, inherited)
        except NoLocksError:
            raise
        except StoreError:
            if time.monotonic() >= deadline:
                raise
        asked = asked or _ask_to_leave(directory, own)
        await asyncio.sleep(_RETRY_SECONDS)


def _ask_to_leave(directory: Path, own: Path) -> bool:
    """Ask the lock's holder to leave if the lock file names its socket; return whether it was told."""
    hello = protocol.Hello(protocol.VERSION, __version__, os.getpid(), "xcached")
    leave = commands.Stop("the service manager's daemon takes over")
    try:
        with open(directory / LOCK, "rb", opener=at_once) as lock:
            process, _, path = (lock.read(MOST_LOCK_BYTES) or b"").partition(b"\n")
        if not path or path == os.fsencode(own):
            return False
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connected:
            connected.settimeout(_ASK_SECONDS)
            connected.connect(path)
            check_peer(connected)
            connected.sendall(framing.encode(1, hello) + framing.encode(2, leave))
            reader = framing.FrameReader()
            while data := connected.recv(65536):
                if any(request == 2 for request, _ in reader.feed(data)):
                    logger.info("process %s, which served %s, was asked to leave", process.decode(), directory)
                    return True
    except (OSError, ProtocolError, UntrustedError) as error:
        logger.debug("the daemon that serves %s could not be asked to leave: %s", directory, error)
    return False
