"""Turns on the serving thread: users are answered in a fair order, within limits on their work in flight."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
from typing import Protocol

from xcached.fair_queue import FairQueue
from xcached.net.sockets import close_connection, is_unread

logger = logging.getLogger("xcached")

# Seconds for one session's turn, and for all turns before the loop reads again.
_TURN_SECONDS, _SLICE_SECONDS = 0.001, 0.005
# Limits per user: bytes of requests not yet answered (with those being read), and of answers not yet read. Both exceed
# what one user's programs need to keep every thread of the daemon busy.
MOST_IN_HAND_BYTES, MOST_UNSENT_BYTES = 8 * 1024**2, 32 * 1024**2
# The least charge of a request, and the charge of each descriptor: descriptors are as scarce as memory.
LEAST_CHARGE, DESCRIPTOR_CHARGE = 512, 32 * 1024
# The kernel allows as many unread descriptors in flight as the daemon may have open, and then sends none at all.
# If there are several users, each gets this fraction (1/n) of them.
_LENT_DIVISOR = 4


class TurnTaker(Protocol):
    """A session, as Turns sees it."""

    account: Account

    def serve(self, until: float) -> bool:
        """Answer until a time; return whether there is more to answer."""

    def update_reading(self) -> None:
        """Start reading again if that is possible by now."""

    def drop(self) -> None:
        """End the session."""


class Account:
    """One user's work in flight in bytes, over all sessions, and the descriptors sent to that user."""

    def __init__(self, uid: int, *, is_one_of_several: bool = True) -> None:
        self.uid = uid
        self._part = _LENT_DIVISOR if is_one_of_several else 1
        self.connections = 0
        self.in_hand = self.reserved = self.unsent = 0
        # Descriptors in answers that were not sent yet.
        self.unsent_descriptors = 0
        # Sessions without room for a large message, and sessions whose next request has to wait.
        self.waiting_to_read: dict[TurnTaker, None] = {}
        self.waiting_to_answer: dict[TurnTaker, None] = {}
        # Descriptors in answers that may be unread, and ended connections that still hold some.
        self._lent: dict[socket.socket, int] = {}
        self._unclosed: set[socket.socket] = set()

    @property
    def is_idle(self) -> bool:
        """Whether the account can be dropped: work the writer thread has counts even after its user hung up."""
        return not self.connections and not self.in_hand and not self._unclosed

    @property
    def unclosed(self) -> int:
        """The number of connections that have ended and cannot be closed yet."""
        return len(self._unclosed)

    def may_lend(self, count: int) -> bool:
        """Return whether this many more descriptors may be in flight to this user."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // self._part - self.unsent_descriptors
        if sum(self._lent.values()) + count > most:
            self._lent = {connection: lent for connection, lent in self._lent.items() if is_unread(connection)}
        return sum(self._lent.values()) + count <= most

    def note_unsent(self, size: int, descriptors: int) -> None:
        """Note an answer that is to be sent; with negative numbers, one that was sent or dropped."""
        self.unsent += size + DESCRIPTOR_CHARGE * descriptors
        self.unsent_descriptors += descriptors

    def lend(self, connection: socket.socket, count: int, *, beside_unread: bool) -> None:
        """Note sent descriptors. Unless the connection had unread data before, the client has read all earlier ones."""
        self._lent[connection] = count + (self._lent.get(connection, 0) if beside_unread else 0)

    def close(self, connection: socket.socket) -> None:
        """Close a connection, once the client has read the descriptors in it or has ended."""
        lent = self._lent.pop(connection, 0)
        ending = socket.socket(fileno=connection.detach())
        if lent and is_unread(ending):
            self._lent[ending] = lent
            self._unclosed.add(ending)
            with contextlib.suppress(OSError):
                ending.shutdown(socket.SHUT_RDWR)
        else:
            close_connection(ending, self.uid)

    def close_what_was_read(self) -> None:
        """Close ended connections that hold no descriptors any more."""
        for connection in [connection for connection in self._unclosed if not is_unread(connection)]:
            self._unclosed.discard(connection)
            self._lent.pop(connection, None)
            close_connection(connection, self.uid)

    @property
    def has_room_for_answer(self) -> bool:
        """Whether there is room for one more answer."""
        return self.unsent < MOST_UNSENT_BYTES

    @property
    def has_room_for_later_answer(self) -> bool:
        """Whether there is room for one more request that is answered later."""
        return self.in_hand < MOST_IN_HAND_BYTES and self.unsent < MOST_UNSENT_BYTES

    @property
    def has_room_for_large_message(self) -> bool:
        """Whether there is room to read one more large message."""
        return self.in_hand + self.reserved < MOST_IN_HAND_BYTES


class Turns:
    """The queue of sessions with something to answer. Belongs to the serving thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._line: FairQueue[TurnTaker] = FairQueue()
        self._queued: set[TurnTaker] = set()
        self._serving = self._scheduled = False

    def serve_or_queue(self, session: TurnTaker) -> bool:
        """Serve a session in its user's turn; return whether that was at once, since nobody else waits."""
        at_once = not (self._serving or self._scheduled or self._line or session in self._queued)
        if at_once:
            self._serving = True
            began = time.monotonic()
            try:
                took = self._serve_next(session, began) - began
            finally:
                self._serving = False
            if took > _TURN_SECONDS:
                # Before the loop reads again, many sessions may be as ready: from now on they wait for their turns.
                self._serve_soon()
        else:
            self._append(session)
        if self._line and not self._serving:
            self._serve_soon()
        return at_once

    def queue(self, session: TurnTaker) -> None:
        """Serve a session in its user's turn, but not now."""
        self._append(session)
        if not self._serving:
            self._serve_soon()

    def resume_waiting(self, account: Account) -> None:
        """Resume the sessions that waited because their user had too much in flight."""
        while account.waiting_to_read and account.has_room_for_large_message:
            session = next(iter(account.waiting_to_read))
            del account.waiting_to_read[session]
            session.update_reading()
        while account.waiting_to_answer and account.has_room_for_later_answer:
            session = next(iter(account.waiting_to_answer))
            del account.waiting_to_answer[session]
            self.serve_or_queue(session)

    def _serve_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._serve_again)

    def _serve_again(self) -> None:
        self._scheduled = False
        self._serve()

    def _serve(self) -> None:
        began = now = time.monotonic()
        self._serving = True
        try:
            while now < began + _SLICE_SECONDS and (turn := self._line.take()) is not None:
                self._queued.discard(turn.item)
                now = self._serve_next(turn.item, now)
        finally:
            self._serving = False
        if self._line:
            self._serve_soon()

    def _serve_next(self, session: TurnTaker, now: float) -> float:
        """Serve a session for one turn, and charge its user; return the time afterwards."""
        try:
            more = session.serve(now + _TURN_SECONDS)
        except Exception:
            # A defect in one session must not end the service of all others.
            logger.exception("a connection failed")
            session.drop()
            more = False
        ended = time.monotonic()
        self._line.charge(session.account.uid, ended - now)
        if more:
            self._append(session)
        return ended

    def _append(self, session: TurnTaker) -> None:
        if session not in self._queued:
            self._queued.add(session)
            self._line.add(session.account.uid, session)
