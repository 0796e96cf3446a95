"""The client against daemons that misbehave: it says so within its time, keeps nothing open, and asks again later."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.peers import Talk, answering, fake_daemon
from support.places import PATIENCE, get_message, put_message, until

from xcache.client import connection
from xcache.client.client import Client
from xcache.errors import (
    ConnectionLostError,
    NobodyThereError,
    NotAskedError,
    ProtocolError,
    RefusedError,
    UnavailableError,
    UncacheableError,
)
from xcache.wire import framing, protocol

KEY = "ab" * 32
TIMEOUT = 0.2


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def client(place):
    made = Client(place.config(timeout=TIMEOUT), "test")
    yield made
    made.close()


def hangs_up(talk: Talk) -> None:
    pass


def is_silent(talk: Talk) -> None:
    talk.until_the_end()


def hangs_after_hello(talk: Talk) -> None:
    talk.welcome()
    talk.until_the_end()


def hangs_up_after_the_request(talk: Talk) -> None:
    talk.welcome()
    talk.read()


def says_half_a_frame_and_hangs_up(talk: Talk) -> None:
    talk.welcome()
    talk.read()
    talk.raw(framing.encode(talk.request, protocol.Found("d", 5, 1.0, b"bytes"))[:-3])


def drips(talk: Talk) -> None:
    talk.welcome()
    talk.read()
    for byte in struct.pack(">I", 10000) + b"x" * 10000:
        talk.raw(bytes([byte]))
        time.sleep(0.01)


def answers_other_requests_for_ever(talk: Talk) -> None:
    talk.welcome()
    talk.read()
    while True:
        talk.raw(framing.encode(talk.request + 1, protocol.Missing(0)))
        time.sleep(0.001)


def answers_other_requests_without_a_pause(talk: Talk) -> None:
    talk.welcome()
    talk.read()
    frames = framing.encode(talk.request + 1, protocol.Missing(0)) * 100
    while True:
        talk.raw(frames)


def drips_without_a_pause(talk: Talk) -> None:
    talk.welcome()
    talk.read()
    talk.raw(struct.pack(">I", protocol.MAX_FRAME))
    while True:
        talk.raw(b"x")


def says_garbage(talk: Talk) -> None:
    talk.welcome()
    talk.read()
    talk.raw(struct.pack(">I", 10) + b"\xc1" * 10)
    talk.until_the_end()


def says_garbage_at_once(talk: Talk) -> None:
    talk.raw(b"HTTP/1.0 400 Bad Request\r\n\r\n")
    talk.until_the_end()


def announces_too_much(talk: Talk) -> None:
    talk.welcome()
    talk.read()
    talk.raw(struct.pack(">I", protocol.MAX_FRAME + 1))
    talk.until_the_end()


def promises_a_descriptor(talk: Talk) -> None:
    talk.welcome()
    talk.read()
    talk.say(protocol.Found("d", 5, 1.0, None))
    talk.until_the_end()


def hands_over_a_directory(talk: Talk) -> None:
    talk.welcome()
    talk.read()
    folder = os.open("/", os.O_RDONLY)
    talk.say(protocol.Found("d", 5, 1.0, None), (folder,))
    os.close(folder)
    talk.until_the_end()


def hands_over_many_descriptors(talk: Talk) -> None:
    talk.welcome()
    talk.read()
    with open(os.devnull, "rb") as file:
        talk.raw(b"\x00", (file.fileno(),) * 20)
    talk.until_the_end()


FAULTS = {
    hangs_up: ConnectionLostError,
    is_silent: ConnectionLostError,
    hangs_after_hello: ConnectionLostError,
    hangs_up_after_the_request: ConnectionLostError,
    says_half_a_frame_and_hangs_up: ConnectionLostError,
    drips: ConnectionLostError,
    answers_other_requests_for_ever: ConnectionLostError,
    answers_other_requests_without_a_pause: UnavailableError,
    drips_without_a_pause: UnavailableError,
    says_garbage: ProtocolError,
    says_garbage_at_once: ProtocolError,
    announces_too_much: ProtocolError,
    promises_a_descriptor: ProtocolError,
    hands_over_a_directory: UnavailableError,
    hands_over_many_descriptors: UnavailableError,
    answering(protocol.Done()): ProtocolError,
    answering(protocol.Hello(1, "v", 1, "p")): ProtocolError,
}
CALLS = {
    "get": lambda client: client.get(get_message(KEY)),
    "put": lambda client: client.put(put_message(KEY, b"", b""), b"x" * 100_000, b"p" * 100_000),
    "report": lambda client: client.report({"hits": 1}),
}


@pytest.mark.parametrize("behave", FAULTS, ids=[getattr(fault, "__name__", "?") for fault in FAULTS])
def test_a_fault_is_named_costs_one_timeout_and_leaves_nothing_open(place, client, behave):
    before = descriptors()
    with fake_daemon(place.socket, behave):
        with pytest.raises(FAULTS[behave]):
            client.get(get_message(KEY))
        # Not a second timeout for the next program.
        with pytest.raises(NotAskedError):
            client.get(get_message(KEY))
        # The daemon's own end is closed with the daemon.
    assert descriptors() == before


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_kind_of_answer_is_a_fault_in_every_call(place, client, call):
    with fake_daemon(place.socket, answering(protocol.Welcome(1, "v", 1, "d"))), pytest.raises(ProtocolError):
        CALLS[call](client)


def test_nobody_there(place, client):
    with pytest.raises(NobodyThereError) as error:
        client.get(get_message(KEY))
    # A connection that never was is not said to be lost.
    assert error.value.kind == "no daemon"
    with pytest.raises(NotAskedError):
        client.get(get_message(KEY))


def test_a_socket_that_nobody_listens_on_any_more(place, client):
    with fake_daemon(place.socket, hangs_up):
        left_behind = place.root / "left"
        os.link(place.socket, left_behind)
    left_behind.rename(place.socket)
    with pytest.raises(NobodyThereError):
        client.get(get_message(KEY))


def test_seconds_are_said_as_people_say_them(place):
    with (
        fake_daemon(place.socket, is_silent),
        pytest.raises(ConnectionLostError, match=r"did not answer within 0(\.\d\d?)? s$"),
    ):
        connection.Connection(place.socket, 0.123456, "test").close()


def test_an_answer_to_another_request_is_passed_over(place, client):
    def behave(talk: Talk) -> None:
        talk.welcome()
        talk.read()
        talk.raw(framing.encode(talk.request - 1, protocol.Found("old", 1, 1.0, b"x")))
        talk.say(protocol.Missing(0))
        talk.until_the_end()

    with fake_daemon(place.socket, behave):
        assert client.get(get_message(KEY)).lease == 0


def test_a_refusal_is_passed_on_and_no_reason_to_be_silent(place, client):
    with fake_daemon(place.socket, answering(protocol.Refused("disk full", "no room"))) as daemon:
        for _ in range(3):
            with pytest.raises(RefusedError, match="no room") as caught:
                client.put(put_message(KEY, b"", b""), b"x" * 100_000, b"p")
            assert caught.value.kind == "disk full"
        assert daemon.connections == 1


def test_an_uncacheable_program_is_no_fault_either(place, client):
    with fake_daemon(place.socket, answering(protocol.NotCacheable("it has a pointer"))) as daemon:
        for _ in range(3):
            with pytest.raises(UncacheableError, match="it has a pointer"):
                client.get(get_message(KEY))
        assert daemon.connections == 1


def test_a_daemon_that_does_not_read_holds_up_a_put_no_longer_than_its_time(place, client):
    gate = threading.Event()

    def behave(talk: Talk) -> None:
        talk.welcome()
        gate.wait(30)

    message = put_message(KEY, b"", b"", details={str(n): "x" * 10_000 for n in range(80)})
    with fake_daemon(place.socket, behave):
        with pytest.raises(ConnectionLostError):
            client.put(message, b"x" * 100, b"p")
        gate.set()


def test_a_connection_that_is_in_use_while_the_client_is_closed_is_closed_with_its_answer(place):
    client = Client(place.config(timeout=PATIENCE), "test")
    asked, closed, hung_up = threading.Event(), threading.Event(), threading.Event()

    def behave(talk: Talk) -> None:
        talk.welcome()
        talk.read()
        asked.set()
        assert closed.wait(PATIENCE)
        talk.say(protocol.Missing(0))
        talk.until_the_end()
        hung_up.set()

    with fake_daemon(place.socket, behave):
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.get, get_message(KEY))
            assert asked.wait(PATIENCE)
            client.close()
            closed.set()
            answer.result(PATIENCE)
        assert hung_up.wait(PATIENCE)


def test_descriptors_that_nobody_asked_for_do_not_pile_up(place, client):
    def behave(talk: Talk) -> None:
        talk.welcome()
        with open(os.devnull, "rb") as file:
            while True:
                talk.read()
                talk.say(protocol.Missing(0), (file.fileno(), file.fileno()))

    with fake_daemon(place.socket, behave):
        assert client.get(get_message(KEY)).lease == 0
        before = descriptors()
        for _ in range(20):
            assert client.get(get_message(KEY)).lease == 0
        assert descriptors() <= before + protocol.MAX_PREDICTED_FILES


def test_descriptors_beside_notices_do_not_pile_up(place, client):
    seen = []

    def behave(talk: Talk) -> None:
        talk.welcome()
        talk.read()
        with open(os.devnull, "rb") as file:
            for _ in range(100):
                notice = framing.encode(talk.request, protocol.Wait(1, "p", 0.0, 1.0))
                talk.raw(notice, (file.fileno(), file.fileno()))
                time.sleep(0.001)
                seen.append(descriptors())
        talk.say(protocol.Missing(0))
        talk.until_the_end()

    with fake_daemon(place.socket, behave):
        before = descriptors()
        assert client.get(get_message(KEY)._replace(wait=60.0)).lease == 0
    assert max(seen) < before + 60


def test_a_descriptor_is_that_of_its_own_answer(place, client):
    """One that came beside an answer that was passed over must not be read in place of the right one."""

    def behave(talk: Talk) -> None:
        talk.welcome()
        talk.read()
        for request, content in ((talk.request - 1, b"wrong"), (talk.request, b"right")):
            with tempfile.TemporaryFile() as file:
                file.write(content)
                file.seek(0)
                talk.raw(framing.encode(request, protocol.Found("d", 5, 1.0, None)), (file.fileno(),))
        talk.until_the_end()

    with fake_daemon(place.socket, behave):
        assert client.get(get_message(KEY)).sealed == b"right"


def test_where_the_queue_of_connections_is_full_a_client_tries_again(place, monkeypatch):
    """A crowd, or somebody who connects all the time, has filled it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, contextlib.ExitStack() as others:
        listener.bind(str(place.socket))
        listener.listen(0)
        with pytest.raises(BlockingIOError):
            while True:
                other = others.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                other.setblocking(False)
                other.connect(str(place.socket))
        naps = []

        def nap(seconds: float) -> None:
            naps.append(seconds)
            if len(naps) == 3:
                others.enter_context(listener.accept()[0])

        monkeypatch.setattr(connection, "pause", nap)
        # It is let in, says hello, and hears nothing.
        with pytest.raises(ConnectionLostError, match="did not answer within"):
            connection.Connection(place.socket, 0.5, "test")
        assert len(naps) == 3


@pytest.mark.parametrize("kind", ["file", "pipe", "folder", "read-only memory file"])
def test_a_large_content_is_written_into_nothing_but_a_memory_file(place, client, tmp_path, kind):
    content = b"x" * (protocol.INLINE_LIMIT * 4)
    with contextlib.ExitStack() as stack:

        def kept(descriptor: int) -> int:
            stack.callback(os.close, descriptor)
            return descriptor

        path = tmp_path / "file"
        path.touch()
        if kind == "file":
            given = kept(os.open(path, os.O_RDWR))
        elif kind == "pipe":
            _, given = map(kept, os.pipe())
        elif kind == "folder":
            given = kept(os.open(tmp_path, os.O_RDONLY))
        else:
            memory = kept(os.memfd_create("memory", os.MFD_ALLOW_SEALING))
            given = kept(os.open(f"/proc/self/fd/{memory}", os.O_RDONLY))

        def behave(talk: Talk) -> None:
            talk.welcome()
            talk.read()
            talk.say(protocol.Files(), (given,))
            talk.until_the_end()

        with fake_daemon(place.socket, behave):
            before = descriptors()
            with pytest.raises(ProtocolError, match="memory file cannot be written"):
                client.put(put_message(KEY, content, b"p", payload=None, program=None), content, b"p")
            assert until(lambda: descriptors() <= before)
        assert path.read_bytes() == b""
