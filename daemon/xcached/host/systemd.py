"""The daemon's side of a service manager: socket activation, notifications, and the journal.

This takes a few environment variables and a datagram; no code of systemd is needed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from xcache.errors import StoreError
from xcache.wire import framing, protocol

_FIRST_FD = 3
# The units' name for the socket, needed if several are handed over.
_NAME = "xcached"
# Seconds for a busy manager to take an important notification; without one, it would kill the daemon in the end.
_NOTIFY_SECONDS = 5.0
# A daemon that cannot start stays this long: the units limit how many starts there may be in a minute.
_TURN_AWAY_SECONDS = 10.0
# It looks this often whether its problem may be solved.
_LOOK_SECONDS = 0.2


def inherited(environ: Mapping[str, str] = os.environ) -> socket.socket | None:
    """Return the listening socket handed to this process by systemd or by its former self, if any."""
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = environ.get("LISTEN_FDS", "")
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    if not count.isdigit() or count == "0":
        return None
    position = names.index(_NAME) if _NAME in names else 0
    if int(count) > 1 and _NAME not in names:
        raise StoreError(f"{count} sockets were handed over and none is called {_NAME}")
    try:
        kind = os.fstat(_FIRST_FD + position)
    except OSError as error:
        raise StoreError(f"the socket that was handed over cannot be used: {error.strerror}") from None
    if not stat.S_ISSOCK(kind.st_mode):
        raise StoreError("the descriptor that was handed over is not a socket")
    listener = socket.socket(fileno=_FIRST_FD + position)
    listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if (listener.family, listener.type) != (socket.AF_UNIX, socket.SOCK_STREAM) or not listening:
        listener.detach()
        raise StoreError("the socket that was handed over is not a Unix socket that listens for streams")
    if not listener.getsockname() or listener.getsockname()[0] in ("\0", 0):
        listener.detach()
        raise StoreError("the socket that was handed over has no path")
    listener.set_inheritable(False)
    return listener


def address(listener: socket.socket) -> Path:
    """Return the path on which a socket listens."""
    return Path(os.fsdecode(listener.getsockname()))


def turn_away(listener: socket.socket, reason: str, may_be_solved: Callable[[], bool]) -> None:
    """Tell clients for a while why there is no daemon; leave early once the problem may be solved.

    The manager starts a daemon for every client. If each ended at once, the manager would soon stop listening, and
    would not begin again even after the problem was solved.
    """
    Manager().status(reason)
    refused = framing.encode(1, protocol.Refused("store error", reason))
    deadline = time.monotonic() + _TURN_AWAY_SECONDS
    while (left := deadline - time.monotonic()) > 0 and not may_be_solved():
        listener.settimeout(min(left, _LOOK_SECONDS))
        with contextlib.suppress(TimeoutError, BlockingIOError, ConnectionError), listener.accept()[0] as connected:
            if may_be_solved():
                # The client, hung up on, connects again, and the manager starts the next daemon.
                return
            connected.setblocking(False)
            connected.send(refused)


class Manager:
    """The service manager that started this daemon and wants to be notified; does nothing if there is none."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path if path.startswith("/") else ""
        self._status = ""
        self.watch_every: float | None = None
        """Seconds between two heartbeats, if the manager wants them."""
        microseconds = environ.get("WATCHDOG_USEC", "")
        meant = environ.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        if self._address and meant and microseconds.isdigit() and int(microseconds):
            # Half the time after which the manager would kill the daemon.
            self.watch_every = int(microseconds) / 2e6

    def ready(self, status: str) -> None:
        """Tell the manager that the daemon serves, with the current settings."""
        self._tell("READY=1", f"STATUS={_line(status)}", f"MAINPID={os.getpid()}", patience=_NOTIFY_SECONDS)

    def reloading(self) -> None:
        """Tell the manager that the settings are being read again; ready() has to follow."""
        self._tell(
            "RELOADING=1",
            f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}",
            patience=_NOTIFY_SECONDS,
        )

    def leaving(self) -> None:
        """Tell the manager that the daemon is shutting down."""
        self._tell("STOPPING=1", "STATUS=leaving")

    def heartbeat(self) -> None:
        """Send a heartbeat."""
        self._tell("WATCHDOG=1")

    def status(self, status: str) -> None:
        """Send a status line, if it differs from the last one."""
        if status != self._status:
            self._tell(f"STATUS={_line(status)}")
            self._status = status

    def _tell(self, *words: str, patience: float = 0.0) -> None:
        """Send a notification; without ``patience`` it is dropped if the manager cannot take it at once."""
        if not self._address:
            return
        # A manager that no longer listens is no reason to stop.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as telling:
            telling.settimeout(patience)
            telling.sendto("\n".join(words).encode("utf-8", "replace"), self._address)


def leads_to_journal(descriptor: int) -> bool:
    """Return whether a descriptor leads to the journal."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    with contextlib.suppress(OSError):
        found = os.fstat(descriptor)
        return (str(found.st_dev), str(found.st_ino)) == (device, inode)
    return False


def _line(text: str) -> str:
    return text.replace("\n", " ")
