"""Talking to a daemon by hand, in good order or in none."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence

from places import Place, digest, get_message, put_message

from xcache import framing, protocol
from xcache.errors import RefusedError


class Conversation:
    """One connection to the daemon of a place, on which anything can be said."""

    def __init__(self, place: Place) -> None:
        self.socket = place.connect()
        self.descriptors: list[int] = []
        self.pid = 0
        self._reader = framing.FrameReader()
        self._heard: list[tuple[int, protocol.Message]] = []
        self._request = 0

    def greet(self) -> protocol.Welcome:
        """Say hello."""
        answer = self.ask(protocol.Hello(protocol.VERSION, "test", os.getpid(), "test.py"))
        assert isinstance(answer, protocol.Welcome)
        self.pid = answer.pid
        return answer

    def ask(self, message: protocol.Message, descriptors: Sequence[int] = ()) -> protocol.Message:
        """Say something, and hear the answer to it."""
        return self.answer(self.say(message, descriptors))

    def answer(self, request: int) -> protocol.Message:
        """The answer to this request; others that come before it are passed over."""
        while True:
            heard, answer = self.hear()
            if heard == request:
                return answer

    def say(self, message: protocol.Message, descriptors: Sequence[int] = ()) -> int:
        """Say something; the number under which the answer will come."""
        self._request += 1
        self.raw(framing.encode(self._request, message), descriptors)
        return self._request

    def raw(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Say whatever bytes."""
        if descriptors:
            data = data[socket.send_fds(self.socket, [data], descriptors) :]
        if data:
            self.socket.sendall(data)

    def hear(self) -> tuple[int, protocol.Message]:
        """The next answer, with the number of its request; ConnectionError when there will be none."""
        while not self._heard:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 65536, 8)
            self.descriptors += descriptors
            if not data:
                raise ConnectionError("the daemon hung up")
            self._heard += self._reader.feed(data)
        return self._heard.pop(0)

    def answers(self, requests: Sequence[int]) -> dict[int, protocol.Message]:
        """The answers to these, in whatever order they come."""
        answers: dict[int, protocol.Message] = {}
        while not answers.keys() >= set(requests):
            request, answer = self.hear()
            answers[request] = answer
        return answers

    def was_hung_up_on(self) -> bool:
        """Whether the daemon ended the connection; what it still says is passed over."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(65536):
                pass
        return True

    def put(self, key: str, payload: bytes, program: bytes = b"program", **changes: object) -> protocol.Message:
        """Store something, by descriptor what is large."""
        return self.answer(self.begin_put(key, payload, program, **changes))

    def begin_put(self, key: str, payload: bytes, program: bytes = b"program", **changes: object) -> int:
        """Begin to store something; the number under which the answer will come."""
        message = put_message(key, payload, program, **changes)
        with contextlib.ExitStack() as stack:
            descriptors = []
            for field in ("payload", "program"):
                content = getattr(message, field)
                if content is not None and len(content) > protocol.INLINE_LIMIT:
                    message = message._replace(**{field: None})
                    descriptors.append(stack.enter_context(open_file(content)))
            return self.say(message, descriptors)

    def get(self, key: str) -> bytes | None:
        """What is stored, read to its end; RefusedError where the daemon cannot say."""
        found = self.ask(get_message(key))
        if isinstance(found, protocol.Missing):
            return None
        if isinstance(found, protocol.Refused):
            raise RefusedError(found.kind, found.reason)
        assert isinstance(found, protocol.Found), found
        if found.payload is not None:
            return found.payload
        with open(self.descriptors.pop(0), "rb") as file:
            return file.read()

    def status(self) -> dict[str, protocol.Scalar]:
        """The daemon's facts."""
        answer = self.ask(protocol.AskStatus())
        assert isinstance(answer, protocol.Status)
        return answer.facts

    def close(self) -> None:
        """Hang up."""
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@contextlib.contextmanager
def talking(place: Place) -> Iterator[Conversation]:
    """A connection that has said hello, for as long as the block lasts."""
    conversation = Conversation(place)
    try:
        conversation.greet()
        yield conversation
    finally:
        conversation.close()


@contextlib.contextmanager
def open_file(content: bytes) -> Iterator[int]:
    """A descriptor of a file with this content."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        yield file.fileno()


def key_of(name: str) -> str:
    """Some key."""
    return digest(name.encode())
