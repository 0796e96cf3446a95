"""Speak the protocol to a daemon by hand, correctly or not."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from io import FileIO

from support.places import Place, digest, get_message, put_message
from xcache.client.contents import write_sealed
from xcache.errors import RefusedError
from xcache.wire import framing, protocol
from xcached.store.memory_files import memory_file


class Conversation:
    """One connection to the daemon of a place, on which a test can send anything."""

    def __init__(self, place: Place) -> None:
        self.socket = place.connect()
        self.descriptors: list[int] = []
        self.pid = 0
        self._reader = framing.FrameReader()
        self._heard: list[tuple[int, protocol.Message]] = []
        # Answers that came during the wait for another.
        self._kept: list[tuple[int, protocol.Message]] = []
        self._request = 0

    def greet(self, named: str = "test.py") -> protocol.Welcome:
        """Send Hello."""
        answer = self.ask(protocol.Hello(protocol.VERSION, "test", os.getpid(), named))
        assert isinstance(answer, protocol.Welcome)
        self.pid = answer.pid
        return answer

    def ask(self, message: protocol.Message, contents: Sequence[bytes] = ()) -> protocol.Message:
        """Send a message and return its answer."""
        return self.answer(self.say(message, contents))

    def answer(self, request: int) -> protocol.Message:
        """Return the answer to this request; keep others that come before it."""
        while True:
            for place, (heard, answer) in enumerate(self._kept):
                if heard == request:
                    del self._kept[place]
                    return answer
            self._kept.append(self.hear())

    def say(self, message: protocol.Message, contents: Sequence[bytes] = ()) -> int:
        """Send a message, after contents in files if there are any; return the request's number."""
        for file, content in zip(self.files(len(contents)), contents, strict=True):
            with file:
                write_sealed(file, content)
        self._request += 1
        self.raw(framing.encode(self._request, message))
        return self._request

    def files(self, count: int) -> list[FileIO]:
        """Get files from the daemon, for the contents of the next put."""
        if not count:
            return []
        assert self.ask(protocol.AskFiles(count)) == protocol.Files()
        # Take the latest: earlier ones belong to unread answers.
        mine, self.descriptors[-count:] = self.descriptors[-count:], []
        return [open(descriptor, "wb", buffering=0) for descriptor in mine]

    def raw(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send any bytes."""
        if descriptors:
            data = data[socket.send_fds(self.socket, [data], descriptors) :]
        if data:
            self.socket.sendall(data)

    def hear(self) -> tuple[int, protocol.Message]:
        """Return the next answer with its request's number; ConnectionError if the daemon has hung up."""
        while not self._heard:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 65536, 8)
            self.descriptors += descriptors
            if not data:
                raise ConnectionError("the daemon hung up")
            self._heard += self._reader.feed(data)
        return self._heard.pop(0)

    def answers(self, requests: Sequence[int]) -> dict[int, protocol.Message]:
        """Return the answers to these requests, in whatever order they come."""
        answers = {number: answer for number, answer in self._kept if number in requests}
        while not answers.keys() >= set(requests):
            request, answer = self.hear()
            answers[request] = answer
        return answers

    def any_answer(self) -> tuple[int, protocol.Message]:
        """Return the next unread answer and the request it belongs to."""
        return self._kept.pop(0) if self._kept else self.hear()

    def was_hung_up_on(self) -> bool:
        """Return whether the daemon closes the connection; skip what it still sends."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(65536):
                pass
        return True

    def put(self, key: str, payload: bytes, program: bytes = b"program", **changes: object) -> protocol.Message:
        """Store an entry; large contents go by descriptor."""
        return self.answer(self.begin_put(key, payload, program, **changes))

    def begin_put(self, key: str, payload: bytes, program: bytes = b"program", **changes: object) -> int:
        """Send a put; return the request's number."""
        message = put_message(key, payload, program, **changes)
        inline = {"payload": message.payload, "program": message.program}
        large = {field: each for field, each in inline.items() if each and len(each) > protocol.INLINE_LIMIT}
        return self.say(message._replace(**dict.fromkeys(large)), list(large.values()))

    def get(self, key: str) -> bytes | None:
        """Return an entry's content; RefusedError if the daemon cannot say."""
        found = self.ask(get_message(key))
        if isinstance(found, protocol.Missing):
            return None
        if isinstance(found, protocol.Refused):
            raise RefusedError(found.kind, found.reason)
        assert isinstance(found, protocol.Found), found
        if found.payload is not None:
            return found.payload
        with open(self.descriptors.pop(0), "rb") as file:
            return os.pread(file.fileno(), found.stored_size, found.offset)

    def status(self) -> dict[str, protocol.Scalar]:
        """Return the daemon's status."""
        answer = self.ask(protocol.AskStatus())
        assert isinstance(answer, protocol.Status)
        return answer.facts

    def close(self) -> None:
        """Hang up."""
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@contextlib.contextmanager
def talking(place: Place, named: str = "test.py") -> Iterator[Conversation]:
    """Open a connection that has said Hello, for the length of the block."""
    conversation = Conversation(place)
    try:
        conversation.greet(named)
        yield conversation
    finally:
        conversation.close()


@contextlib.contextmanager
def open_file(content: bytes) -> Iterator[int]:
    """Return a descriptor of a file with this content, as the daemon accepts it."""
    with open(memory_file(), "wb", buffering=0) as file:
        write_sealed(file, content)
        yield file.fileno()


def key_of(name: str) -> str:
    """Return a key."""
    return digest(name.encode())
