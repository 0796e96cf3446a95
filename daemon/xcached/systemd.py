"""The service manager's side of a daemon: sockets it hands over, what it wants to be told, and its journal.

All of it is a few variables of the environment and a datagram; nobody needs systemd for a daemon without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from xcache import framing, protocol
from xcache.errors import StoreError

_FIRST = 3
# What the units call the socket, where more than one is handed over.
_NAME = "xcached"
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7
# A busy manager takes what must not be lost a little later: without it, it would wait for it until it ends the daemon.
_PATIENCE = 5.0
# The units allow for so many starts a minute.
_PAUSE = 10.0


def inherited(environ: Mapping[str, str] = os.environ) -> socket.socket | None:
    """The listening socket that was handed to this process, if one was: by systemd, or by a daemon it was before."""
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
        kind = os.fstat(_FIRST + position)
    except OSError as error:
        raise StoreError(f"the socket that was handed over cannot be used: {error.strerror}") from None
    if not stat.S_ISSOCK(kind.st_mode):
        raise StoreError("what was handed over is not a socket")
    listener = socket.socket(fileno=_FIRST + position)
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
    """The path on which a socket listens."""
    return Path(os.fsdecode(listener.getsockname()))


def turn_away(listener: socket.socket, reason: str) -> None:
    """Tell everybody who comes why there is no daemon, for a while.

    The manager starts one for whoever asks. Were it to end at once each time, the manager would soon give up listening,
    and go on so when what is wrong has long been put right.
    """
    Manager().status(reason)
    refused = framing.encode(1, protocol.Refused("store error", reason))
    deadline = time.monotonic() + _PAUSE
    with contextlib.suppress(TimeoutError):
        while (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            with contextlib.suppress(BlockingIOError, ConnectionError), listener.accept()[0] as connected:
                connected.setblocking(False)
                connected.send(refused)


class Manager:
    """Who started this daemon and wants to hear of it; without such a one, nothing is said."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path if path.startswith("/") else ""
        self._status = ""
        self.watch_every: float | None = None
        """How often it wants a sign of life, in seconds."""
        microseconds = environ.get("WATCHDOG_USEC", "")
        meant = environ.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        if self._address and meant and microseconds.isdigit() and int(microseconds):
            # At half the time after which it would lose patience.
            self.watch_every = int(microseconds) / 2e6

    def ready(self, status: str) -> None:
        """The daemon serves, with these settings."""
        self._tell("READY=1", f"STATUS={_line(status)}", f"MAINPID={os.getpid()}", patience=_PATIENCE)

    def reloading(self) -> None:
        """The settings are being read again; ready() ends that."""
        self._tell(
            "RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}", patience=_PATIENCE
        )

    def leaving(self) -> None:
        """The daemon finishes what it has begun."""
        self._tell("STOPPING=1", "STATUS=leaving")

    def alive(self) -> None:
        """A sign of life."""
        self._tell("WATCHDOG=1")

    def status(self, status: str) -> None:
        """One line on how things are; said when it differs from the last one."""
        if status != self._status:
            self._tell(f"STATUS={_line(status)}")
            self._status = status

    def _tell(self, *words: str, patience: float = 0.0) -> None:
        """Without ``patience``, what it cannot take at once is not said; the next word will be."""
        if not self._address:
            return
        # One who does not listen any more is no reason to stop.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as telling:
            telling.settimeout(patience)
            telling.sendto("\n".join(words).encode("utf-8", "replace"), self._address)


class JournalFormatter(logging.Formatter):
    """Lines for the journal: each with its priority; the journal knows the time and the process."""

    def format(self, record: logging.LogRecord) -> str:
        """Every line of the message with the priority of its level."""
        priority = next((number for level, number in _PRIORITIES if record.levelno >= level), _DEBUG)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines() or [""])


def leads_to_journal(descriptor: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether what is written there goes to the journal."""
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    with contextlib.suppress(OSError):
        found = os.fstat(descriptor)
        return (str(found.st_dev), str(found.st_ino)) == (device, inode)
    return False


def _line(text: str) -> str:
    return text.replace("\n", " ")
