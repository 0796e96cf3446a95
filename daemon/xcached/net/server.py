"""The server: accepts connections on the socket, and keeps track of them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
import socket
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from xcache.errors import StoreError
from xcache.wire import framing, protocol
from xcache.wire.ownership import Peer, peer_of
from xcached.caller import Caller, Process
from xcached.host.reload import LiveSettings
from xcached.net.session import Session
from xcached.net.sockets import close_connection
from xcached.net.turns import Account, Turns
from xcached.requests.service import Service
from xcached.requests.trust import Trust

logger = logging.getLogger("xcached")

# Where users share a daemon, each may have a third as many connections as are free. So the first user gets a quarter
# of all, and every further user finds some.
_FREE_FOR_ONE = 3
# Seconds of accepting before connected clients are served again.
_ACCEPT_SECONDS = 0.005
# Connections that may wait to be accepted, where users share a daemon. One user's flood may fill it, and every newcomer
# waits until it has moved up: with the 4096 of most systems for seconds. A client that finds it full tries again 500
# times a second.
_SHARED_BACKLOG = 512
# Checks for silent clients within the time that silence may last.
_CHECKS_PER_SILENCE = 4
_LONGEST_CHECK_SECONDS, _SHORTEST_CHECK_SECONDS = 1.0, 0.02
# Errors of accept() that last until something is closed, and the pause after one.
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PAUSE_SECONDS = 0.1


class Server:
    """Accepts connections, and keeps track of them."""

    def __init__(self, listener: socket.socket, service: Service, trust: Trust, settings: LiveSettings) -> None:
        self.last_request = time.monotonic()
        self.settings = settings
        self._listener = listener
        self._service = service
        self._trust = trust
        self._loop = asyncio.get_running_loop()
        self.turns = Turns(self._loop)
        self._connections: set[Session] = set()
        self._accounts: dict[int, Account] = {}
        self._listening = True
        # Weak: each lasts as long as one of its connections.
        self._processes: weakref.WeakValueDictionary[tuple[int, int], Process] = weakref.WeakValueDictionary()
        listener.setblocking(False)
        if trust.shared:
            listener.listen(_SHARED_BACKLOG)
        self._loop.add_reader(listener.fileno(), self._accept)
        self._look_again()

    def stop_listening(self) -> None:
        """Accept no new connections. The service manager may keep the socket listening for the next daemon."""
        self._listening = False
        self._loop.remove_reader(self._listener.fileno())
        for connection in self._connections:
            connection.stop_reading()

    def close(self) -> None:
        """Drop every connection."""
        for connection in list(self._connections):
            connection.drop()

    def connections(self) -> int:
        """Return how many connections are open."""
        return len(self._connections)

    def callers(self) -> Iterator[Caller]:
        """Return the clients that are connected."""
        return (connection.caller for connection in self._connections)

    def describe(self) -> str:
        """Return a few words for the service manager's status line."""
        count = self.connections()
        return f"{count} connection{'' if count == 1 else 's'}"

    def busy(self) -> bool:
        """Return whether a client still waits for an answer or holds a lease."""
        return self._service.busy() or any(connection.in_flight for connection in self._connections)

    def working(self) -> bool:
        """Return whether an answer that takes more than a turn is being made."""
        return any(connection.is_working for connection in self._connections)

    def _accept(self) -> None:
        until = time.monotonic() + _ACCEPT_SECONDS
        while time.monotonic() < until:
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    # The client hung up; others may be waiting.
                    continue
                # Pause, because the loop would report the same again at once.
                logger.error("no connections are accepted for the moment: %s", error)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(_PAUSE_SECONDS, self._listen_again)
                return
            self._admit(accepted)

    def _admit(self, accepted: socket.socket) -> None:
        """Queue a connection for its user's turn, or close it: all users share the backlog.

        So nothing is done here that costs more than a few system calls.
        """
        uid = None
        try:
            peer = peer_of(accepted)
            uid = peer.uid
            if _has_gone(accepted):
                close_connection(accepted, uid)
                return
            refused = self._why_refused(uid)
        except OSError as error:
            refused = protocol.Refused("store error", str(error))
        if refused is not None:
            logger.warning("a connection was refused: %s", refused.reason, extra={"uid": uid})
            with contextlib.suppress(OSError):
                # A client's first request has the number 1.
                accepted.send(framing.encode(1, refused))
            close_connection(accepted, uid)
            return
        account = self._accounts.get(peer.uid)
        if account is None:
            account = self._accounts[peer.uid] = Account(peer.uid, is_one_of_several=self._trust.shared)
        account.connections += 1
        self.turns.queue(_Newcomer(self, accepted, peer, account))

    def begin(self, accepted: socket.socket, peer: Peer, account: Account) -> None:
        """Begin the session of a connection that was admitted."""
        if not self._listening or _has_gone(accepted):
            account.connections -= 1
            close_connection(accepted, peer.uid)
            return
        process = self._processes.setdefault((peer.pid, peer.uid), Process(peer.pid, peer.uid))
        caller = Caller(peer.pid, peer.uid, process)
        self._connections.add(Session(accepted, caller, account, self, self._service, self._loop))

    def _why_refused(self, uid: int) -> protocol.Refused | None:
        trust, most = self._trust, self.settings.now.max_connections
        if not trust.admits(uid):
            return protocol.Refused("not permitted", f"this daemon is not for other users (uid {uid})")
        # Connections that still wait for their turn, or ended but cannot be closed yet, count as well.
        count = sum(account.connections + account.unclosed for account in self._accounts.values())
        if count >= most:
            return protocol.Refused("too many connections", f"there are {most} connections already")
        if trust.shared and not trust.administers(uid):
            account = self._accounts.get(uid)
            theirs = account.connections + account.unclosed if account is not None else 0
            if theirs >= max(1, (most - count) // _FREE_FOR_ONE):
                return protocol.Refused("too many connections", f"user {uid} has {theirs} connections already")
        return None

    def _listen_again(self) -> None:
        if self._listening:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _drop_the_silent(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections):
            connection.drop_if_silent(now)
        for account in self._accounts.values():
            account.close_what_was_read()
        for account in [account for account in self._accounts.values() if account.is_idle]:
            del self._accounts[account.uid]
        self._look_again()

    def _look_again(self) -> None:
        # At least once a second, because the setting may become shorter.
        seconds = min(self.settings.now.silence / _CHECKS_PER_SILENCE, _LONGEST_CHECK_SECONDS)
        self._loop.call_later(max(seconds, _SHORTEST_CHECK_SECONDS), self._drop_the_silent)

    def forget(self, connection: Session) -> None:
        """Forget a connection that has ended."""
        self._connections.discard(connection)
        connection.account.connections -= 1
        self._service.leave(connection.caller)


class _Newcomer:
    """A connection that waits for its user's turn to become a session."""

    def __init__(self, server: Server, accepted: socket.socket, peer: Peer, account: Account) -> None:
        self.account = account
        self._server = server
        self._accepted = accepted
        self._peer = peer

    def serve(self, until: float) -> bool:  # noqa: ARG002 - as a session has it
        """Begin the session; there is nothing more to do then."""
        self._server.begin(self._accepted, self._peer, self.account)
        return False

    def update_reading(self) -> None:
        """Do nothing: the session has not begun."""

    def drop(self) -> None:
        """Close the connection, because its session could not begin."""
        self.account.connections -= 1
        close_connection(self._accepted, self._peer.uid)


def _has_gone(accepted: socket.socket) -> bool:
    """Return whether a client hung up before its session began, also if it sent something first.

    Nobody waits for what it sent: a client sends nothing that matters before it was welcomed.
    """
    accepted.setblocking(False)
    poll = select.poll()
    poll.register(accepted, 0)
    return bool(poll.poll(0))


def listen(path: Path, *, for_everybody: bool) -> socket.socket:
    """Return a socket listening at ``path``, for this user only or for every user of the machine."""
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
    """Return whether a process accepts connections there, or a killed daemon only left the file."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except (TimeoutError, BlockingIOError):
            # The backlog is full, so a daemon is listening.
            return True
        except OSError:
            return False
        return True
