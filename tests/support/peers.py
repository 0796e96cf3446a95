"""Daemons that misbehave, for tests of the client."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from support.places import Place
from xcache.wire import framing, protocol


class Talk:
    """The daemon's end of one connection."""

    def __init__(self, connected: socket.socket, heard: list[protocol.Message]) -> None:
        self.socket = connected
        self._heard = heard
        self._reader = framing.FrameReader()
        self._messages: list[tuple[int, protocol.Message]] = []
        self.request = 0

    def read(self) -> protocol.Message:
        """Return the next request; ConnectionError if the client has left."""
        while not self._messages:
            data = self.socket.recv(65536)
            if not data:
                raise ConnectionError
            self._messages += self._reader.feed(data)
        self.request, message = self._messages.pop(0)
        self._heard.append(message)
        return message

    def say(self, message: protocol.Message, descriptors: tuple[int, ...] = ()) -> None:
        """Answer the last request."""
        self.raw(framing.encode(self.request, message), descriptors)

    def raw(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send any bytes."""
        if descriptors:
            socket.send_fds(self.socket, [data], list(descriptors))
        else:
            self.socket.sendall(data)

    def welcome(self, version: int = protocol.VERSION) -> None:
        """Read the Hello and answer it."""
        self.read()
        self.say(protocol.Welcome(version, "fake", 1, "/fake"))

    def until_the_end(self) -> None:
        """Read until the client leaves."""
        while self.socket.recv(65536):
            pass


class FakeDaemon:
    """Listens, and answers each connection by a function."""

    def __init__(self, path: Path, behave: Callable[[Talk], None]) -> None:
        self.heard: list[protocol.Message] = []
        self.connections = 0
        self._behave = behave
        self._open: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(50)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def stop(self) -> None:
        """Close all connections."""
        # To close alone would not wake who waits in accept() or recv().
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connected)
            thread = threading.Thread(target=self._serve, args=(connected,))
            thread.start()
            self._threads.append(thread)

    def _serve(self, connected: socket.socket) -> None:
        with connected, contextlib.suppress(OSError):
            self._behave(Talk(connected, self.heard))


@contextlib.contextmanager
def fake_daemon(path: Path, behave: Callable[[Talk], None]) -> Iterator[FakeDaemon]:
    """Run such a daemon for the length of the block."""
    daemon = FakeDaemon(path, behave)
    try:
        yield daemon
    finally:
        daemon.stop()
        path.unlink(missing_ok=True)


def answering(*answers: protocol.Message) -> Callable[[Talk], None]:
    """Return a behaviour that welcomes each client and gives these answers in order, the last one for ever."""

    def behave(talk: Talk) -> None:
        talk.welcome()
        for answer in answers:
            talk.read()
            talk.say(answer)
        while True:
            talk.read()
            talk.say(answers[-1])

    return behave


@contextlib.contextmanager
def relaying(path: Path, place: Place, delay: float) -> Iterator[FakeDaemon]:
    """Serve a place's daemon at another path, and delay every answer of a connection but the first."""

    def behave(talk: Talk) -> None:
        is_first = True

        def before_answer(_: bytes) -> None:
            nonlocal is_first
            if not is_first:
                time.sleep(delay)
            is_first = False

        relay(talk.socket, place.socket, before_answer=before_answer)

    with fake_daemon(path, behave) as daemon:
        yield daemon


def relay(
    client: socket.socket,
    path: Path,
    *,
    before_request: Callable[[bytes], None] = lambda _: None,
    before_answer: Callable[[bytes], None] = lambda _: None,
) -> None:
    """Pass messages between a client and the daemon at a path, until either hangs up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon, contextlib.suppress(OSError):
        daemon.connect(str(path))
        asking = threading.Thread(target=_pass_on, args=(client, daemon, before_request))
        asking.start()
        try:
            _pass_on(daemon, client, before_answer)
        finally:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            asking.join()


def _pass_on(source: socket.socket, target: socket.socket, before: Callable[[bytes], None]) -> None:
    with contextlib.suppress(OSError):
        while True:
            data, descriptors, _, _ = socket.recv_fds(source, 1 << 20, protocol.MAX_PREDICTED_FILES)
            try:
                if not data:
                    break
                before(data)
                sent = socket.send_fds(target, [data], descriptors)
                target.sendall(data[sent:])
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
