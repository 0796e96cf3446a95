"""The socket: who is taken, and who is kept."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import weakref
from pathlib import Path

from xcache import framing, protocol
from xcache.errors import StoreError
from xcache.private import peer_of
from xcached.caller import Caller, Process
from xcached.connection import Connection
from xcached.service import Service
from xcached.settings import Settings

logger = logging.getLogger("xcached")

# Of the connections, where there are several users: one may have this share.
_ONE_USERS_SHARE = 4
# How often, within the time that silence may last, there is a look at who is silent.
_LOOKS = 4
_LOOK_EVERY = 1.0


class Server:
    """Listens, and keeps the connections."""

    def __init__(self, listener: socket.socket, service: Service, settings: Settings) -> None:
        self.last_request = time.monotonic()
        self.settings = settings
        self._listener = listener
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        self._listening = True
        # For as long as a connection of theirs lasts.
        self._processes: weakref.WeakValueDictionary[tuple[int, int], Process] = weakref.WeakValueDictionary()
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)
        self._look_again()

    def stop_listening(self) -> None:
        """Take no new connections. The socket may go on to listen, for the next daemon."""
        self._listening = False
        self._loop.remove_reader(self._listener.fileno())
        for connection in self._connections:
            connection.hear_no_more()

    def close(self) -> None:
        """Drop every connection."""
        for connection in list(self._connections):
            connection.drop()

    def describe(self) -> str:
        """What it is doing, in a few words."""
        count = len(self._connections)
        return f"{count} connection{'' if count == 1 else 's'}"

    def busy(self) -> bool:
        """Whether an answer is still owed to anybody, or somebody compiles for others."""
        return self._service.busy() or any(connection.in_flight for connection in self._connections)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # No descriptor is free: to be told of it again at once would not help.
            logger.error("no connections are taken for a second: %s", error)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(1.0, self._listen_again)
            return
        accepted.setblocking(False)
        try:
            peer = peer_of(accepted)
            refused = self._why_refused(peer.uid)
        except OSError as error:
            refused = protocol.Refused("store error", str(error))
        if refused is not None:
            logger.warning("a connection was refused: %s", refused.reason)
            with contextlib.suppress(OSError):
                # A client's first request has the number 1.
                accepted.send(framing.encode(1, refused))
            accepted.close()
            return
        process = self._processes.setdefault((peer.pid, peer.uid), Process(peer.pid))
        caller = Caller(peer.pid, peer.uid, process)
        self._connections.add(Connection(accepted, caller, self, self._service, self._loop))
        self._service.administration.connections = len(self._connections)

    def _why_refused(self, uid: int) -> protocol.Refused | None:
        trust, most = self._service.trust, self.settings.now.max_connections
        if not trust.admits(uid):
            return protocol.Refused("not permitted", f"this daemon is not for other users (uid {uid})")
        if len(self._connections) >= most:
            return protocol.Refused("too many connections", f"there are {most} connections already")
        if trust.shared and not trust.administers(uid):
            theirs = sum(connection.caller.uid == uid for connection in self._connections)
            if theirs >= max(1, most // _ONE_USERS_SHARE):
                return protocol.Refused("too many connections", f"user {uid} has {theirs} connections already")
        return None

    def _listen_again(self) -> None:
        if self._listening:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _drop_the_silent(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections):
            connection.drop_if_silent(now)
        self._look_again()

    def _look_again(self) -> None:
        # Soon, too, where it may become shorter meanwhile.
        self._loop.call_later(min(self.settings.now.silence / _LOOKS, _LOOK_EVERY), self._drop_the_silent)

    def forget(self, connection: Connection) -> None:
        """A connection has ended."""
        self._connections.discard(connection)
        self._service.administration.connections = len(self._connections)
        self._service.leave(connection.caller)


def listen(path: Path, *, for_everybody: bool) -> socket.socket:
    """A listening socket at ``path`` that only this user can connect to, or every user of the machine."""
    if _answers(path):
        raise StoreError(f"another daemon listens on {path}")
    if path.is_socket():
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o111 if for_everybody else 0o177)
    try:
        listener.bind(os.fspath(path))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"{path}: {error.strerror}") from None
    finally:
        os.umask(before)
    listener.listen(socket.SOMAXCONN)
    return listener


def _answers(path: Path) -> bool:
    """Whether somebody takes connections there, and it is not only what a killed daemon left behind."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except (TimeoutError, BlockingIOError):
            # It is busy: so many wait to be taken that the kernel keeps no more.
            return True
        except OSError:
            return False
        return True
