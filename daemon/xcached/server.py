"""The socket: frames in, answers out, descriptors beside them."""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from xcache import protocol
from xcache.errors import ProtocolError, StoreError, UntrustedError, XcacheError
from xcache.private import check_peer
from xcached.service import Client, Reply, Service
from xcached.writer import refusal

logger = logging.getLogger("xcached")

_MAX_CONNECTIONS = 1024
_MAX_IN_FLIGHT = 64
_READ = 256 * 1024
_DESCRIPTOR = array.array("i").itemsize
_ANCILLARY = socket.CMSG_SPACE(protocol.MAX_DESCRIPTORS * _DESCRIPTOR)
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Server:
    """Listens, and keeps the connections."""

    def __init__(self, listener: socket.socket, service: Service) -> None:
        self.last_request = time.monotonic()
        self._listener = listener
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    def stop_listening(self) -> None:
        """Take no new connections."""
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for connection in self._connections:
            connection.hear_no_more()

    def close(self) -> None:
        """Drop every connection."""
        for connection in list(self._connections):
            connection.close()

    def busy(self) -> bool:
        """Whether an answer is still owed to anybody."""
        return any(connection.in_flight for connection in self._connections)

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
        try:
            peer = check_peer(accepted)
            if len(self._connections) >= _MAX_CONNECTIONS:
                raise UntrustedError(f"there are {_MAX_CONNECTIONS} connections already")
        except (OSError, UntrustedError) as error:
            logger.warning("a connection was refused: %s", error)
            accepted.close()
            return
        accepted.setblocking(False)
        self._connections.add(Connection(accepted, Client(peer.pid, peer.uid, ""), self, self._service, self._loop))
        self._service.connections = len(self._connections)

    def _listen_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def forget(self, connection: Connection) -> None:
        """A connection has ended."""
        self._connections.discard(connection)
        self._service.connections = len(self._connections)


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
        client: Client,
        server: Server,
        service: Service,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.in_flight = 0
        self._socket = connected
        self._client = client
        self._server = server
        self._service = service
        self._loop = loop
        self._reader = protocol.FrameReader()
        self._descriptors: list[int] = []
        self._waiting: deque[Asked] = deque()
        self._outgoing: deque[tuple[memoryview, int | None]] = deque()
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
        _close_all(descriptor for _, descriptor in self._outgoing if descriptor is not None)
        self._outgoing.clear()
        for asked in self._waiting:
            _close_all(asked.descriptors)
        self._waiting.clear()
        self._server.forget(self)

    def hear_no_more(self) -> None:
        """Answer what is in flight and nothing else; who is hung up on asks the next daemon."""
        self._leaving = True
        self._read_or_not()

    def _on_readable(self) -> None:
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_READ, _ANCILLARY, _CLOSE_ON_EXEC)
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
            if len(self._descriptors) > protocol.MAX_DESCRIPTORS:
                raise ProtocolError(f"more than {protocol.MAX_DESCRIPTORS} descriptors")
            for request, message in self._reader.feed(data):
                self._waiting.append(Asked(request, message, self._descriptors_for(message)))
        except ProtocolError as error:
            self._disconnect(error)
            return
        if not self._reader.unfinished:
            self._drop_descriptors()
        self._work()

    def _descriptors_for(self, message: protocol.Message) -> list[int]:
        """The kernel ends a read behind what came with descriptors: they belong to the one message that wants any."""
        if not isinstance(message, protocol.Put) or not message.wants_descriptors:
            return []
        mine, self._descriptors = self._descriptors, []
        return mine

    def _work(self) -> None:
        """Answer what was asked, as far as the answers can be sent and not too much is in flight."""
        while self._waiting and not self._leaving and not self._writing and self.in_flight < _MAX_IN_FLIGHT:
            asked = self._waiting.popleft()
            try:
                self._handle(asked)
            except ProtocolError as error:
                self._disconnect(error)
                return
            finally:
                _close_all(asked.descriptors)
        if self._socket.fileno() >= 0:
            self._read_or_not()

    def _disconnect(self, error: ProtocolError) -> None:
        logger.warning("process %d was disconnected: %s", self._client.pid, error)
        self.close()

    def _handle(self, asked: Asked) -> None:
        self._server.last_request = time.monotonic()
        request, message, descriptors = asked
        if not self._greeted:
            if not isinstance(message, protocol.Hello):
                raise ProtocolError("it did not say hello")
            self._greeted = True
            self._client = self._client._replace(program=message.program[:200])
            self._send(request, Reply(self._service.welcome()))
            return
        try:
            answer = self._service.handle(self._client, message, descriptors)
        except (OSError, XcacheError) as error:
            answer = Reply(refusal(error))
        except Exception as error:
            # One request that meets a defect must not end the service of all others.
            logger.exception("a %s failed", type(message).__name__)
            answer = Reply(refusal(error))
        if isinstance(answer, Future):
            self.in_flight += 1
            answer.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._answered, request, done))
        else:
            self._send(request, answer)

    def _answered(self, request: int, done: Future[protocol.Message]) -> None:
        self.in_flight -= 1
        self._server.last_request = time.monotonic()
        if self._socket.fileno() >= 0:
            self._send(request, Reply(done.result()))
            self._work()

    def _send(self, request: int, reply: Reply) -> None:
        self._outgoing.append((memoryview(protocol.encode(request, reply.message)), reply.descriptor))
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
                data, descriptor = self._outgoing[0]
                if descriptor is None:
                    sent = self._socket.send(data)
                else:
                    sent = socket.send_fds(self._socket, [data], [descriptor])
                    os.close(descriptor)
                if sent == len(data):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = (data[sent:], None)
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

    def _read_or_not(self) -> None:
        """Read on only from who takes the answers and has not asked for too much already."""
        free = not self._writing and self.in_flight < _MAX_IN_FLIGHT
        read = free and not self._waiting and not self._leaving
        if read and not self._reading:
            self._loop.add_reader(self._socket.fileno(), self._on_readable)
        elif self._reading and not read:
            self._loop.remove_reader(self._socket.fileno())
        self._reading = read

    def _drop_descriptors(self) -> None:
        _close_all(self._descriptors)
        self._descriptors = []


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def listen(path: Path) -> socket.socket:
    """A listening socket at ``path`` that only this user can connect to."""
    if _answers(path):
        raise StoreError(f"another daemon listens on {path}")
    if path.is_socket():
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
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
        except TimeoutError:
            return True
        except OSError:
            return False
        return True
