"""A session with one client: frames in, answers out, descriptors beside the answers."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sqlite3
import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from xcache.errors import ProtocolError, XcacheError
from xcache.wire import commands, framing, protocol
from xcached.caller import Answer, Caller, Later, Reply, Stream, Work, close_all
from xcached.host.reload import LiveSettings
from xcached.net.sockets import has_left, is_unread, read_from
from xcached.net.turns import DESCRIPTOR_CHARGE, LEAST_CHARGE, Account, Turns
from xcached.requests.service import Service
from xcached.store.memory_files import close_files
from xcached.store.writer import refusal

logger = logging.getLogger("xcached")

# Frames with less than this to come are read without a reservation.
_SMALL_BYTES = 64 * 1024
# Requests that never wait for the writer thread.
_ANSWERED_AT_ONCE = frozenset(
    kind.__name__
    for kind in (
        protocol.Hello, protocol.Get, protocol.Predict, protocol.AskAlias, protocol.Loading, protocol.Loaded,
        protocol.Release, protocol.Report, protocol.AskStatus, commands.Stop, commands.AskProgram, commands.Watch,
    )
)  # fmt: skip
_WITH_FILES = (protocol.Put, commands.ImportEntry, commands.ImportHistory)
# Requests that cost far more memory than their size: answers that may fill a frame, a task for each of many keys.
_LARGE = (commands.AskEntries, commands.AskObjects, commands.DescribeEntries, commands.AskPresence, commands.Fetch)
# The kernel counts unread descriptors against their sender, the daemon.
_TOO_MANY_DESCRIPTORS = protocol.Refused(
    "too many descriptors", "too many are in flight to clients that do not read them"
)


class SessionServer(Protocol):
    """The server, as a session sees it."""

    last_request: float
    settings: LiveSettings
    turns: Turns

    def forget(self, session: Session) -> None:
        """Forget a session that has ended."""


class Session:
    """One client's connection. asyncio's transports drop descriptors, so the session uses the socket itself.

    It reads up to the next frame and a little more, and answers when it is the user's turn.
    """

    def __init__(
        self,
        connected: socket.socket,
        caller: Caller,
        account: Account,
        server: SessionServer,
        service: Service,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.in_flight = 0
        self.caller = caller
        self.account = account
        self._socket = connected
        self._server = server
        self._settings = server.settings
        self._service = service
        self._loop = loop
        self._reader = framing.FrameReader()
        self._owes_since: float | None = time.monotonic()
        # Bytes reserved in the user's account for a large frame being read, and charged for promised answers.
        self._reserved = 0
        self._awaited: dict[Later, int] = {}
        # Answers that take more than a turn: the request, its charge, and what is left to do.
        self._works: deque[tuple[int, int, Work]] = deque()
        self._outgoing: deque[tuple[int, memoryview, Sequence[int]]] = deque()
        self._greeted = self._leaving = False
        self._reading = self._writing = False
        self.update_reading()

    def close(self) -> None:
        """End the session and drop its pending requests."""
        if self._socket.fileno() < 0:
            return
        if self._reading:
            self._loop.remove_reader(self._socket.fileno())
        if self._writing:
            self._loop.remove_writer(self._socket.fileno())
        self._reading = self._writing = False
        self.account.close(self._socket)
        close_files(self.caller.take_files())
        for _, frame, descriptors in self._outgoing:
            close_all(descriptors)
            self.account.note_unsent(-len(frame), -len(descriptors))
        self._outgoing.clear()
        self._reader = framing.FrameReader()
        # Promised answers are no longer charged; requests at the writer thread are, until they are done.
        self.account.in_hand -= sum(self._awaited.values())
        self._awaited.clear()
        for _, charge, work in self._works:
            self.account.in_hand -= charge
            work.close()
        self._works.clear()
        self.account.waiting_to_read.pop(self, None)
        self.account.waiting_to_answer.pop(self, None)
        self._release_reservation()
        self._server.forget(self)
        self._server.turns.resume_waiting(self.account)

    def drop(self) -> None:
        """End the session on the daemon's own initiative: a load in progress then counts as no crash."""
        self.caller.loading = None
        self.close()

    def drop_if_silent(self, now: float) -> None:
        """Drop a client that was silent for too long: no hello, half a frame, or an answer it does not read."""
        if not self._reading and not self._writing:
            # The daemon itself is not reading from it, because it has too much in flight.
            self._owes_since = None
        elif self._owes_since is not None and now - self._owes_since >= self._settings.now.silence:
            what = "read no answer" if self._writing else "sent nothing"
            seconds, mine = self._settings.now.silence, {"uid": self.caller.uid}
            logger.warning("process %d %s for %g s and was dropped", self.caller.pid, what, seconds, extra=mine)
            self.drop()

    @property
    def is_working(self) -> bool:
        """Whether there is an answer that takes more than a turn."""
        return bool(self._works)

    def stop_reading(self) -> None:
        """Answer the requests in flight and read no more; the client asks the next daemon."""
        self._leaving = True
        self.update_reading()

    def _on_readable(self) -> None:
        try:
            data = read_from(self._socket)
        except (BlockingIOError, InterruptedError):
            return
        except ProtocolError as error:
            self._disconnect(error)
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._reader.add(data)
        served = self._reader.ready and self._server.turns.serve_or_queue(self)
        if not served and self._socket.fileno() >= 0:
            self.update_reading()
            self._note_debt()

    def serve(self, until: float) -> bool:
        """Answer the frames that have arrived, until a time; return whether there is more to answer now."""
        try:
            self._work_on(until)
            while self._reader.ready and self._may_answer() and not self._works:
                if not self.account.has_room_for_later_answer and not self._comes_first():
                    self.account.waiting_to_answer[self] = None
                    break
                if (taken := self._reader.take()) is None:
                    break
                if self._reserved:
                    self._release_reservation()
                self._handle(*taken)
                self._work_on(until)
                if time.monotonic() >= until:
                    break
        except ProtocolError as error:
            self._disconnect(error)
        if self._socket.fileno() < 0:
            return False
        self.update_reading()
        self._note_debt()
        has_more = self._reader.ready and self._may_answer() and self not in self.account.waiting_to_answer
        return has_more or bool(self._works)

    def _comes_first(self) -> bool:
        """Return whether the next request can be answered now although too much is in flight."""
        return self.account.has_room_for_answer and self._reader.next_name in _ANSWERED_AT_ONCE

    def _disconnect(self, error: ProtocolError) -> None:
        logger.warning("process %d was disconnected: %s", self.caller.pid, error, extra={"uid": self.caller.uid})
        self.drop()

    def _handle(self, size: int, request: int, message: protocol.Message) -> None:
        self._server.last_request = time.monotonic()
        if not self._greeted:
            if not isinstance(message, protocol.Hello):
                raise ProtocolError("its first message was not Hello")
            self._greeted = True
            self.caller.program = message.program[:200]
            self._send(request, Reply(self._service.welcome()))
            return
        if isinstance(message, _LARGE) and has_left(self._socket):
            # These only answer questions, of which a session without room reads the end late.
            self.close()
            return
        files = message.files if isinstance(message, _WITH_FILES) else 0
        least = protocol.MAX_FRAME if isinstance(message, _LARGE) else LEAST_CHARGE
        charge = max(size, least) + DESCRIPTOR_CHARGE * files
        answer: Answer
        try:
            answer = self._service.handle(self.caller, message)
        except Exception as error:  # noqa: BLE001 - told to the client
            answer = self._refusal(error, type(message).__name__)
        self._take(request, charge, answer)

    def _work_on(self, until: float) -> None:
        """Go on with what takes long, until a time, but at least for a step."""
        while self._works:
            request, charge, work = self._works.popleft()
            answer: Answer
            try:
                while True:
                    next(work)
                    if self._socket.fileno() < 0:
                        work.close()
                        self.account.in_hand -= charge
                        return
                    if time.monotonic() >= until:
                        self._works.appendleft((request, charge, work))
                        return
            except StopIteration as end:
                answer = end.value
            except Exception as error:  # noqa: BLE001 - told to the client
                answer = self._refusal(error, "request")
            self.in_flight -= 1
            self.account.in_hand -= charge
            self._take(request, charge, answer)
            self._server.turns.resume_waiting(self.account)

    def _refusal(self, error: Exception, what: str) -> Reply:
        if not isinstance(error, (OSError, XcacheError, sqlite3.Error)):
            # A defect in one request must not end the service of all others.
            logger.error("a %s failed", what, exc_info=error, extra={"uid": self.caller.uid})
        return Reply(refusal(error))

    def _take(self, request: int, charge: int, answer: Answer) -> None:
        """Send an answer, or have it sent when it is known."""
        if isinstance(answer, Reply):
            self._send(request, answer)
        elif isinstance(answer, Stream):
            answer.say = lambda word: self._say(request, word)
            answer.say(answer.first)
        elif answer is not None:
            self.in_flight += 1
            self.account.in_hand += charge
            if isinstance(answer, Generator):
                self._works.append((request, charge, answer))
            elif isinstance(answer, Later):
                self._awaited[answer] = charge
                answer.connect(
                    say=lambda word: self._say(request, word),
                    give=lambda reply: self._answer_awaited(answer, request, reply),
                )
            else:

                def tell(done: Future[Any]) -> None:
                    # The connection of one that was cancelled has ended.
                    found = protocol.Done() if done.cancelled() else done.result()
                    reply = found if isinstance(found, Reply) else Reply(found)
                    self._loop.call_soon_threadsafe(self._answer, request, charge, reply)

                answer.add_done_callback(tell)

    def _say(self, request: int, word: protocol.Message) -> bool:
        """Send a notice, unless the client is slow to read the earlier ones; return whether it was sent."""
        if self._writing:
            return False
        self._send(request, Reply(word))
        return True

    def _answer_awaited(self, awaited: Later, request: int, reply: Reply | Work) -> None:
        """Send an answer that was promised by a Later, or make it in turns."""
        charge = self._awaited.pop(awaited, 0)
        if isinstance(reply, Reply):
            self._answer(request, charge, reply)
        elif self._socket.fileno() >= 0:
            self._works.append((request, charge, reply))
            self._server.turns.queue(self)

    def _answer(self, request: int, charge: int, reply: Reply) -> None:
        """Send an answer that was not ready at once."""
        self.in_flight -= 1
        self.account.in_hand -= charge
        self._server.last_request = time.monotonic()
        self._send(request, reply)
        self._go_on()
        self._server.turns.resume_waiting(self.account)

    def _go_on(self) -> None:
        """Go on serving and reading after something the session waited for."""
        if self._socket.fileno() < 0:
            return
        if self._reader.ready and self._may_answer():
            self._server.turns.serve_or_queue(self)
        if self._socket.fileno() >= 0:
            self.update_reading()

    def _send(self, request: int, reply: Reply) -> None:
        if self._socket.fileno() < 0:
            close_all(reply.descriptors)
            return
        if reply.descriptors and not self.account.may_lend(len(reply.descriptors)):
            close_all(reply.descriptors)
            reply = Reply(_TOO_MANY_DESCRIPTORS)
        try:
            frame = memoryview(framing.encode(request, reply.message))
        except ProtocolError as error:
            # The client waits for an answer.
            close_all(reply.descriptors)
            logger.error("an answer cannot be sent: %s", error, extra={"uid": self.caller.uid})
            reply = Reply(protocol.Refused("protocol error", f"the answer cannot be sent: {str(error)[:200]}"))
            frame = memoryview(framing.encode(request, reply.message))
        self._outgoing.append((request, frame, reply.descriptors))
        self.account.note_unsent(len(frame), len(reply.descriptors))
        if not self._writing:
            self._flush()

    def _on_writable(self) -> None:
        self._flush()
        self._go_on()
        self._server.turns.resume_waiting(self.account)

    def _flush(self) -> None:
        """Send as much as the socket takes; the rest follows when it is writable."""
        try:
            while self._outgoing:
                request, data, descriptors = self._outgoing[0]
                if not descriptors:
                    sent = self._socket.send(data)
                elif (sent := self._send_with(data, descriptors)) < 0:
                    frame = memoryview(framing.encode(request, _TOO_MANY_DESCRIPTORS))
                    self._outgoing[0] = (request, frame, ())
                    self.account.note_unsent(len(frame) - len(data), -len(descriptors))
                    continue
                self.account.note_unsent(-sent, -len(descriptors))
                # A client that reads a part of an answer is not silent.
                self._owes_since = None
                if sent == len(data):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = (request, data[sent:], ())
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.close()
            return
        if bool(self._outgoing) != self._writing:
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(self._socket.fileno(), self._on_writable)
            else:
                self._loop.remove_writer(self._socket.fileno())
        self._note_debt()

    def _send_with(self, data: memoryview, descriptors: Sequence[int]) -> int:
        """Send descriptors with data; return the bytes sent, or -1 if the kernel has too many descriptors in flight."""
        beside_unread = is_unread(self._socket)
        try:
            sent = socket.send_fds(self._socket, [data], descriptors)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            sent = -1
        else:
            self.account.lend(self._socket, len(descriptors), beside_unread=beside_unread)
        close_all(descriptors)
        return sent

    def update_reading(self) -> None:
        """Start or stop reading: only from a client that reads its answers, with room in its user's account."""
        read = not self._reader.ready and self._may_answer() and self._has_room()
        if read and not self._reading:
            self._loop.add_reader(self._socket.fileno(), self._on_readable)
        elif self._reading and not read:
            self._loop.remove_reader(self._socket.fileno())
        self._reading = read

    def _has_room(self) -> bool:
        """Return whether the rest of a large frame may be read; a reservation lasts until its end."""
        if self._reserved or not self._reader.unfinished or self._reader.missing <= _SMALL_BYTES:
            return True
        if not self.account.has_room_for_large_message:
            self.account.waiting_to_read[self] = None
            return False
        self._reserved = self._reader.missing
        self.account.reserved += self._reserved
        return True

    def _release_reservation(self) -> None:
        if self._reserved:
            self.account.reserved -= self._reserved
            self._reserved = 0
            self._server.turns.resume_waiting(self.account)

    def _may_answer(self) -> bool:
        return (
            not self._writing
            and not self._leaving
            and self.in_flight < self._settings.now.max_requests
            and self._socket.fileno() >= 0
        )

    def _note_debt(self) -> None:
        """Note since when the client owes a hello, the rest of a frame, or the reading of an answer."""
        if self._greeted and not self._reader.unfinished and not self._writing:
            self._owes_since = None
        elif self._owes_since is None:
            self._owes_since = time.monotonic()
