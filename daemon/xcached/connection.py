"""One client's connection: frames in, answers out, descriptors beside them."""

from __future__ import annotations

import array
import asyncio
import logging
import socket
import sqlite3
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from xcache import framing, protocol
from xcache.errors import ProtocolError, XcacheError
from xcached.caller import Caller, Later, Reply, close_all
from xcached.service import Service
from xcached.settings import Settings
from xcached.writer import refusal

logger = logging.getLogger("xcached")

_READ = 64 * 1024
_DESCRIPTOR = array.array("i").itemsize
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Keeper(Protocol):
    """Who keeps the connections."""

    last_request: float
    settings: Settings

    def forget(self, connection: Connection) -> None:
        """It has ended, and is kept no longer."""


class Asked(NamedTuple):
    """A request that has arrived, with the descriptors that came for it."""

    number: int
    message: protocol.Message
    descriptors: list[int]


class Connection:
    """One client. asyncio's own transports drop descriptors, so this reads and writes the socket itself."""

    def __init__(
        self,
        connected: socket.socket,
        caller: Caller,
        keeper: Keeper,
        service: Service,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.in_flight = 0
        self.caller = caller
        self._socket = connected
        self._keeper = keeper
        self._settings = keeper.settings
        # Room for one descriptor too many, so that it is noticed.
        self._ancillary = socket.CMSG_SPACE((self._settings.now.max_descriptors + 1) * _DESCRIPTOR)
        self._service = service
        self._loop = loop
        self._reader = framing.FrameReader(self._settings.now.max_frame)
        self._owes_since: float | None = time.monotonic()
        self._descriptors: list[int] = []
        self._waiting: deque[Asked] = deque()
        self._outgoing: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._greeted = self._leaving = False
        self._reading = self._writing = False
        self._read_or_not()

    def close(self) -> None:
        """End the connection and forget what it still wanted."""
        if self._socket.fileno() < 0:
            return
        if self._reading:
            self._loop.remove_reader(self._socket.fileno())
        if self._writing:
            self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._drop_descriptors()
        for _, descriptors in self._outgoing:
            close_all(descriptors)
        self._outgoing.clear()
        for asked in self._waiting:
            close_all(asked.descriptors)
        self._waiting.clear()
        self._keeper.forget(self)

    def drop(self) -> None:
        """End the connection by the daemon's own doing: what the client was loading has nothing to do with it."""
        self.caller.loading.clear()
        self.close()

    def drop_if_silent(self, now: float) -> None:
        """Drop who has not said hello, has not finished what was begun, or takes no answer, for too long."""
        if not self._reading and not self._writing:
            # It has asked for so much that it is not heard for the moment.
            self._owes_since = None
        elif self._owes_since is not None and now - self._owes_since >= self._settings.now.silence:
            what = "took no answer" if self._writing else "said nothing"
            logger.warning("process %d %s for %g s and was dropped", self.caller.pid, what, self._settings.now.silence)
            self.drop()

    def hear_no_more(self) -> None:
        """Answer what is in flight and nothing else; who is hung up on asks the next daemon."""
        self._leaving = True
        self._read_or_not()

    def _on_readable(self) -> None:
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_READ, self._ancillary, _CLOSE_ON_EXEC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % _DESCRIPTOR])
                self._descriptors += numbers
        if not data:
            self.close()
            return
        try:
            if len(self._descriptors) > self._settings.now.max_descriptors:
                raise ProtocolError(f"more than {self._settings.now.max_descriptors} descriptors")
            for request, message in self._reader.feed(data):
                self._waiting.append(Asked(request, message, self._descriptors_for(message)))
        except ProtocolError as error:
            self._disconnect(error)
            return
        if not self._reader.unfinished:
            self._drop_descriptors()
        self._work()
        self._note_what_is_owed()

    def _descriptors_for(self, message: protocol.Message) -> list[int]:
        """The kernel ends a read behind what came with descriptors: they belong to the one message that wants any."""
        if not isinstance(message, protocol.Put) or not message.wants_descriptors:
            return []
        mine, self._descriptors = self._descriptors, []
        return mine

    def _work(self) -> None:
        """Answer what was asked, as far as the answers can be sent and not too much is in flight."""
        while self._waiting and not self._leaving and not self._writing and self._may_ask_more():
            asked = self._waiting.popleft()
            try:
                self._handle(asked)
            except ProtocolError as error:
                self._disconnect(error)
                return
            finally:
                close_all(asked.descriptors)
        if self._socket.fileno() >= 0:
            self._read_or_not()

    def _disconnect(self, error: ProtocolError) -> None:
        logger.warning("process %d was disconnected: %s", self.caller.pid, error)
        self.drop()

    def _handle(self, asked: Asked) -> None:
        self._keeper.last_request = time.monotonic()
        request, message, descriptors = asked
        if not self._greeted:
            if not isinstance(message, protocol.Hello):
                raise ProtocolError("it did not say hello")
            self._greeted = True
            self.caller.program = message.program[:200]
            self._send(request, Reply(self._service.welcome()))
            return
        try:
            answer = self._service.handle(self.caller, message, descriptors)
        except (OSError, XcacheError, sqlite3.Error) as error:
            answer = Reply(refusal(error))
        except Exception as error:
            # One request that meets a defect must not end the service of all others.
            logger.exception("a %s failed", type(message).__name__)
            answer = Reply(refusal(error))
        if isinstance(answer, Reply):
            self._send(request, answer)
        elif answer is not None:
            self.in_flight += 1
            if isinstance(answer, Later):
                answer.connect(
                    say=lambda word: self._say(request, word),
                    give=lambda reply: self._answer(request, reply),
                )
            else:
                answer.add_done_callback(
                    lambda done: self._loop.call_soon_threadsafe(self._answer, request, Reply(done.result()))
                )

    def _say(self, request: int, word: protocol.Message) -> None:
        """A word before the answer; who has not taken the last ones yet needs no more of them."""
        if not self._writing:
            self._send(request, Reply(word))

    def _answer(self, request: int, reply: Reply) -> None:
        """An answer that took its time."""
        self.in_flight -= 1
        self._keeper.last_request = time.monotonic()
        self._send(request, reply)
        if self._socket.fileno() >= 0:
            self._work()

    def _send(self, request: int, reply: Reply) -> None:
        if self._socket.fileno() < 0:
            close_all(reply.descriptors)
            return
        try:
            frame = memoryview(framing.encode(request, reply.message))
        except BaseException:
            close_all(reply.descriptors)
            raise
        self._outgoing.append((frame, reply.descriptors))
        if not self._writing:
            self._flush()

    def _on_writable(self) -> None:
        self._flush()
        if self._socket.fileno() >= 0:
            self._work()

    def _flush(self) -> None:
        """Send what can be sent; the rest when the socket takes it."""
        try:
            while self._outgoing:
                data, descriptors = self._outgoing[0]
                if descriptors:
                    sent = socket.send_fds(self._socket, [data], descriptors)
                    close_all(descriptors)
                else:
                    sent = self._socket.send(data)
                # Whoever takes a part of it is not silent.
                self._owes_since = None
                if sent == len(data):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = (data[sent:], ())
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
        self._note_what_is_owed()

    def _read_or_not(self) -> None:
        """Read on only from who takes the answers and has not asked for too much already."""
        free = not self._writing and self._may_ask_more()
        read = free and not self._waiting and not self._leaving
        if read and not self._reading:
            self._loop.add_reader(self._socket.fileno(), self._on_readable)
        elif self._reading and not read:
            self._loop.remove_reader(self._socket.fileno())
        self._reading = read

    def _may_ask_more(self) -> bool:
        return self.in_flight < self._settings.now.max_requests

    def _note_what_is_owed(self) -> None:
        """Since when the client owes the rest of a frame, or its hello, or to take an answer."""
        if self._greeted and not self._reader.unfinished and not self._writing:
            self._owes_since = None
        elif self._owes_since is None:
            self._owes_since = time.monotonic()

    def _drop_descriptors(self) -> None:
        close_all(self._descriptors)
        self._descriptors = []
