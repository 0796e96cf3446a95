"""Both ends of a real socket: a client whose daemon says anything, and a daemon to whom anything is said.

The first two bytes of a case say how it is delivered; the rest is the stream.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import seeds
from conversation import Conversation, talking
from decoders import frames
from peers import Talk, fake_daemon
from places import PATIENCE, Place, get_message, new_place, put_message, until

from xcache import framing, protocol
from xcache.client import Client
from xcache.entries import Absent, Entry
from xcache.errors import XcacheError

Check = Callable[[bytes], bool]
CONTENT = b"bytes"
# The number under which a client asks, once it has said hello.
FIRST_REQUEST = 2
# Has the file chosen whose content that of a large Put is.
_LARGE = 13
_LOOK_EVERY = 250
# A frame may be large, and what is made of it: a few of them at a time are no leak.
_MORE_MEMORY = 48 * 2**20
# Not the key of the samples, with which anything may happen.
_KEY = "ef" * 32
_CALLS: list[Callable[[Client], Any]] = [
    lambda client: client.get(get_message(seeds.KEY)),
    lambda client: client.get(get_message(seeds.KEY, wait=PATIENCE)),
    lambda client: client.put(put_message(seeds.KEY, b"", b""), b"x" * 100_000, b"program"),
    lambda client: client.report({"hits": 1}),
    lambda client: client.mark_not_cacheable(seeds.KEY, "jit_f", "why"),
    lambda client: client.complain(seeds.KEY, seeds.KEY, "why"),
    lambda client: client.release(seeds.KEY, 5),
]


def answers() -> list[bytes]:
    """Each message as the answer to each call, a file of every kind as the answer to the first, and as a greeting."""
    said = [framing.encode(FIRST_REQUEST, message) for message in seeds.messages()]
    files = [bytes((1, kind)) + framing.encode(FIRST_REQUEST, _found_as_file()) for kind in range(10, 23)]
    called = [bytes((1 + 8 * call, 0)) + each for call in range(len(_CALLS)) for each in said]
    return [*files, *called, *(bytes((0, 0)) + _numbered(each, 1) for each in said)]


def heard_by_clients() -> list[protocol.Message]:
    """All messages; those that are the answer to something, more often."""
    right = [each for each in seeds.messages() if type(each).__name__ in ("Found", "Missing", "Wait", "Stored", "Done")]
    return [*seeds.messages(), *(right * 8), *([_found_as_file()] * 16)]


def conversations() -> list[bytes]:
    """What can be said to a daemon, with and without descriptors."""
    frames = [framing.encode(number, message) for number, message in enumerate(seeds.requests())]
    several = [bytes((at, at * 7 % 256)) + b"".join(frames[at : at + 4]) for at in range(len(frames))]
    # One by one, with the descriptor that a large Put needs.
    return [*several, *(bytes((1, _LARGE)) + frame for frame in frames)]


@contextlib.contextmanager
def client_end() -> Iterator[Check]:
    """A client's every call ends, with a value or one of xcache's own exceptions, and leaves nothing open."""
    case = b""

    def behave(talk: Talk) -> None:
        how, which = case[0], case[1]
        try:
            if how % 8:
                talk.welcome()
            talk.read()
            talk.raw(case[2:] or b"\0", descriptors.chosen(which))
        finally:
            with contextlib.suppress(OSError):
                talk.socket.shutdown(socket.SHUT_WR)
        talk.until_the_end()

    def check(data: bytes) -> bool:
        nonlocal case
        case = data.ljust(2, b"\1")
        client = Client(config, "fuzz")
        try:
            result = _CALLS[case[0] // 8 % len(_CALLS)](client)
        except XcacheError:
            return False
        finally:
            client.close()
        assert result is None or isinstance(result, Absent | Entry | bool), result
        return True

    with new_place() as place, Descriptors() as descriptors, fake_daemon(place.socket, behave):
        # Nobody keeps silent, so that whoever waits for all of it waits for ever.
        config = place.config(timeout=PATIENCE)
        check(b"\1\1")
        before = _open_in(os.getpid())
        yield check
        assert until(lambda: _open_in(os.getpid()) <= before), "descriptors are left open"


@contextlib.contextmanager
def daemon_end() -> Iterator[Check]:
    """The daemon ends every connection that breaks off, serves others meanwhile, and keeps nothing of it."""
    count = 0
    with new_place() as place, Descriptors() as descriptors:
        place.start_daemon()
        with talking(place) as bystander:
            assert until(lambda: bystander.status()["connections"] == 1)
            before = _open_in(bystander.pid)
            # What it has at most when it is well: the largest frame, in every state it can be in.
            for _ in range(3):
                _say(place, _largest(), (), 0)
            memory = _memory_of(bystander.pid)

            def check(data: bytes) -> bool:
                nonlocal count
                data = data.ljust(2, b"\0")
                greeting = b"" if data[0] % 16 == 15 else seeds.hello()
                answered = _say(place, greeting + data[2:], descriptors.chosen(data[1]), data[0])
                count += 1
                if count % _LOOK_EVERY == 1:
                    _is_served(bystander)
                return answered

            yield check
            _is_served(bystander)
            assert until(lambda: bystander.status()["connections"] == 1), "connections are left open"
            assert until(lambda: _open_in(bystander.pid) <= before), "descriptors are left open"
            assert _memory_of(bystander.pid) < memory + _MORE_MEMORY
        assert place.daemon_pid() == bystander.pid
        logs = [path.read_text() for path in place.dir.glob("daemon.log*")]
        assert "Traceback" not in "".join([*logs, place.said()])


class Descriptors(contextlib.ExitStack):
    """Files and what can pass for them."""

    def __enter__(self) -> Descriptors:
        super().__enter__()
        folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        names = {name: folder / name for name in ("file", "large", "empty")}
        for name, content in (("file", CONTENT), ("large", b"x" * (protocol.INLINE_LIMIT + 1)), ("empty", b"")):
            names[name].write_bytes(content)
        self._open = [self._kept(os.open(path, os.O_RDONLY)) for path in (*names.values(), folder, "/dev/zero")]
        self._open += [self._kept(os.open(names["file"], how)) for how in (os.O_RDWR, os.O_WRONLY, os.O_PATH)]
        self._open += map(self._kept, os.pipe())
        self._open += [self.enter_context(each).fileno() for each in socket.socketpair()]
        return self

    def chosen(self, number: int) -> tuple[int, ...]:
        """None of them, one, or a few, by a number of one byte."""
        if number < 10:
            return ()
        kind = self._open[number % len(self._open)]
        return (kind,) if number < 128 else (kind, *self._open[number // 2 % len(self._open) :][: number % 4])

    def _kept(self, descriptor: int) -> int:
        self.callback(os.close, descriptor)
        return descriptor


def _found_as_file() -> protocol.Found:
    return _found()._replace(digest=seeds.KEY, stored_size=len(CONTENT), payload=None)


def _found() -> protocol.Found:
    return next(message for message in seeds.messages() if isinstance(message, protocol.Found))


def _numbered(frame: bytes, request: int) -> bytes:
    return framing.encode(request, framing.decode(frame[4:])[1])


def _largest() -> bytes:
    found = _found()._replace(payload=b"x" * (protocol.MAX_FRAME - 1000))
    return seeds.hello() + framing.encode(2, found) + framing.encode(3, found)[:-1]


def _say(place: Place, said: bytes, descriptors: tuple[int, ...], how: int) -> bool:
    """Say it in two pieces and hear out whatever comes; whether there was more than a welcome."""
    cut = len(said) * (how // 16) // 16
    heard: list[object] = []
    with contextlib.closing(place.connect()) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(said[:cut])
        if descriptors and said[cut:]:
            cut += socket.send_fds(connection, [said[cut:]], list(descriptors))
        connection.sendall(said[cut:])
        if how % 4 == 0:
            # Gone without a look at the answers.
            return False
        # Who broke the protocol is hung up on, and need not hang up first.
        if not frames(said)[1]:
            connection.shutdown(socket.SHUT_WR)
        reader = framing.FrameReader()
        while data := connection.recv(65536):
            heard += reader.feed(data)
    return len(heard) > 1


def _is_served(bystander: Conversation) -> None:
    """Others store and find what they stored, whatever the last case has removed."""
    content = os.urandom(8)
    assert bystander.put(_KEY, content, overwrite=True).kept
    assert bystander.get(_KEY) == content


def _open_in(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _memory_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
