"""Both ends of a real socket: a client whose daemon sends anything, and a daemon that receives anything.

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

from support import seeds
from support.conversation import Conversation, talking
from support.decoders import frames
from support.peers import Talk, fake_daemon
from support.places import PATIENCE, Place, get_message, new_place, put_message, until
from xcache.client.client import Client
from xcache.client.contents import Absent, SealedEntry
from xcache.errors import XcacheError
from xcache.wire import framing, protocol

Check = Callable[[bytes], bool]
CONTENT = b"bytes"
# The number of a client's first request after Hello.
FIRST_REQUEST = 2
# From here on a case sends descriptors to the daemon, which ends the connection.
_WITH_DESCRIPTORS = 250
_LOOK_EVERY = 250
# Frames and what is decoded from them may be large: a few at a time are no leak.
_MORE_MEMORY = 48 * 2**20
# The samples may do anything to their own key, so this is another.
_KEY = "ef" * 32
_CALLS: list[Callable[[Client], Any]] = [
    lambda client: client.get(get_message(seeds.KEY)),
    lambda client: client.get(get_message(seeds.KEY, wait=PATIENCE)),
    lambda client: client.put(put_message(seeds.KEY, b"", b""), b"x" * 100_000, b"program"),
    lambda client: client.report({"hits": 1}),
    lambda client: client.mark_not_cacheable(seeds.KEY, "jit_f", "why"),
    lambda client: client.complain(protocol.Complain(seeds.KEY, seeds.KEY, "why", False)),
    lambda client: client.release(seeds.KEY, 5),
    lambda client: client.alias(seeds.KEY),
]


def answers() -> list[bytes]:
    """Return each message as the answer to each call, every kind of file as the first answer, and greetings."""
    said = [framing.encode(FIRST_REQUEST, message) for message in seeds.messages()]
    files = [bytes((1, kind)) + framing.encode(FIRST_REQUEST, _found_as_file()) for kind in range(10, 23)]
    called = [bytes((1 + 8 * call, 0)) + each for call in range(len(_CALLS)) for each in said]
    return [*files, *called, *(bytes((0, 0)) + _numbered(each, 1) for each in said)]


def heard_by_clients() -> list[protocol.Message]:
    """Return all messages, answers more than once."""
    right = [
        each
        for each in seeds.messages()
        if type(each).__name__ in ("Found", "Missing", "Wait", "Stored", "Done", "Alias")
    ]
    return [*seeds.messages(), *(right * 8), *([_found_as_file()] * 16)]


def conversations() -> list[bytes]:
    """Return conversations with a daemon, with and without descriptors."""
    frames = [framing.encode(number, message) for number, message in enumerate(seeds.requests())]
    several = [bytes((at, at * 7 % 256)) + b"".join(frames[at : at + 4]) for at in range(len(frames))]
    # Each alone, after a request for the file that a large Put needs, and with a descriptor of the client's own.
    asked = framing.encode(9, protocol.AskFiles(1))
    return [*several, *(bytes((1, 0)) + asked + frame for frame in frames), bytes((1, 255)) + frames[0]]


@contextlib.contextmanager
def client_end() -> Iterator[Check]:
    """Check that every call of a client ends, with a value or an exception of xcache, and leaves nothing open."""
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
        assert result is None or isinstance(result, Absent | SealedEntry | protocol.Alias | bool), result
        return True

    with new_place() as place, Descriptors() as descriptors, fake_daemon(place.socket, behave):
        # The peer never stays silent, so a client that waits this long hangs.
        config = place.config(timeout=PATIENCE)
        check(b"\1\1")
        before = _open_in(os.getpid())
        yield check
        assert until(lambda: _open_in(os.getpid()) <= before), "descriptors are left open"


@contextlib.contextmanager
def daemon_end() -> Iterator[Check]:
    """Check that the daemon closes every broken connection, serves others meanwhile, and keeps nothing of it."""
    count = 0
    with new_place() as place, Descriptors() as descriptors:
        place.start_daemon()
        with talking(place) as bystander:
            assert until(lambda: bystander.status()["connections"] == 1)
            # The daemon keeps a pidfd of each process that was given something, and SQLite a file that was closed while
            # another connection had a lock, until the next one needs it.
            before = _open_in(bystander.pid) + 2
            # The most that a sound daemon has: the largest frame, in all its forms.
            for _ in range(3):
                _say(place, _largest(), (), 0)
            memory = _memory_of(bystander.pid)

            def check(data: bytes) -> bool:
                nonlocal count
                data = data.ljust(2, b"\0")
                greeting = b"" if data[0] % 16 == 15 else seeds.hello()
                sent = descriptors.chosen(data[1]) if data[1] >= _WITH_DESCRIPTORS else ()
                answered = _say(place, greeting + data[2:], sent, data[0])
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
    """Files, and other descriptors that a peer may send instead."""

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
        """Choose none of them, one, or a few, by a number of one byte."""
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
    """Send a stream in two pieces and read all answers; return whether there was more than a Welcome."""
    cut = len(said) * (how // 16) // 16
    heard: list[object] = []
    with contextlib.closing(place.connect()) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(said[:cut])
        if descriptors and said[cut:]:
            cut += socket.send_fds(connection, [said[cut:]], list(descriptors))
        connection.sendall(said[cut:])
        if how % 4 == 0:
            # Leave without reading the answers.
            return False
        # The daemon hangs up after a breach of the protocol, so the client need not.
        if not frames(said)[1]:
            connection.shutdown(socket.SHUT_WR)
        reader = framing.FrameReader()
        while data := connection.recv(65536):
            heard += reader.feed(data)
    return len(heard) > 1


def _is_served(bystander: Conversation) -> None:
    """Store and find an entry on another connection, whatever the last case removed."""
    content = os.urandom(8)
    assert bystander.put(_KEY, content, overwrite=True).kept
    assert bystander.get(_KEY) == content


def _open_in(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _memory_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
