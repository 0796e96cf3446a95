"""Where the store's one daemon is met: the lock that makes it one, and the name of its socket."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from xcache import framing, protocol
from xcache._version import __version__
from xcache.errors import ProtocolError, StoreError, UntrustedError
from xcache.private import check_peer
from xcache.protocol import LOCK

logger = logging.getLogger("xcached")

# As long as one that was told to leave may take, and a little more.
_LEAVING_SECONDS = 40.0
_RETRY_EVERY = 0.05
_ASKING_SECONDS = 2.0


class MeetingPlace:
    """The socket's name; it also stands in the lock file, for who looks for the store's daemon elsewhere."""

    def __init__(self, path: Path, directory: Path, lock: int, *, stays: bool) -> None:
        """``stays``: the name belongs to the service manager, who goes on listening when this daemon has left."""
        self._path = path
        self._lock_path = directory / LOCK
        self._lock = lock
        self._stays = stays
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
        """Take the name away, so that nobody comes here any more; one that stays leads to the next daemon."""
        if self._stays and self.stands():
            return
        os.ftruncate(self._lock, 0)
        if self.stands():
            self._path.unlink(missing_ok=True)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


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
            os.close(lock)
            raise StoreError(f"another daemon serves {directory}") from None
    # What stands there is where the last one listened.
    os.ftruncate(lock, 0)
    return lock


async def take_over(directory: Path, inherited: int | None, own: Path) -> int:
    """The store's lock for the service manager's daemon: one that a program started meanwhile is asked to leave.

    Otherwise whoever comes by the manager's socket would wait for a daemon that cannot start. One that listened by the
    same name sees by itself that it was taken; what is said there now would be heard by the new daemon.
    """
    deadline = time.monotonic() + _LEAVING_SECONDS
    asked = False
    while True:
        try:
            return take_lock(directory, inherited)
        except StoreError:
            if time.monotonic() >= deadline:
                raise
        asked = asked or _ask_to_leave(directory, own)
        await asyncio.sleep(_RETRY_EVERY)


def _ask_to_leave(directory: Path, own: Path) -> bool:
    """Tell the daemon that has the lock to leave, if it has said where it listens; whether it was told."""
    hello = protocol.Hello(protocol.VERSION, __version__, os.getpid(), "xcached")
    leave = protocol.Stop("the service manager's daemon takes over")
    try:
        process, _, path = (directory / LOCK).read_bytes().partition(b"\n")
        if not path or path == os.fsencode(own):
            return False
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connected:
            connected.settimeout(_ASKING_SECONDS)
            connected.connect(path)
            check_peer(connected)
            connected.sendall(framing.encode(1, hello) + framing.encode(2, leave))
            reader = framing.FrameReader()
            while data := connected.recv(65536):
                if any(request == 2 for request, _ in reader.feed(data)):
                    logger.info("process %s, which served %s, was asked to leave", process.decode(), directory)
                    return True
    except (OSError, ProtocolError, UntrustedError) as error:
        logger.debug("the daemon that has %s could not be asked to leave: %s", directory, error)
    return False
