"""The client against daemons that misbehave: it says so within its time, keeps nothing open, and asks again later."""

from __future__ import annotations

import os
import struct
import tempfile
import threading
import time
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from peers import Talk, answering, fake_daemon
from places import get_message, put_message

from xcache import breaker as breaker_module
from xcache import client as client_module
from xcache import connection as connection_module
from xcache import framing, protocol
from xcache.client import Client
from xcache.entries import Absent
from xcache.errors import (
    ConnectionLostError,
    NobodyThereError,
    NotAskedError,
    ProtocolError,
    RefusedError,
    UnavailableError,
    UncacheableError,
)

KEY = "ab" * 32
TIMEOUT = 0.2


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def client(place):
    made = Client(place.config(timeout=TIMEOUT), "test")
    yield made
    made.close()


@pytest.fixture
def patient_client(place):
    """For what is not about the timeout: with the clock fixture, ten seconds take none."""
    made = Client(place.config(timeout=10), "test")
    yield made
    made.close()


@pytest.fixture
def clock(monkeypatch):
    """Time that goes on as usual, and can be moved on."""

    made = types.SimpleNamespace(ahead=0.0)
    for module in (breaker_module, client_module, connection_module):
        monkeypatch.setattr(module, "monotonic", lambda: time.monotonic() + made.ahead)
    return made


def advance(clock: types.SimpleNamespace, seconds: float) -> None:
    clock.ahead += seconds


def works(
    *, status: Callable[[], None] = lambda: None, get: Callable[[], None] = lambda: None
) -> Callable[[Talk], None]:
    """Has nothing stored, and answers; something may happen before it does."""

    def behave(talk: Talk) -> None:
        talk.welcome()
        while True:
            asked = talk.read()
            if isinstance(asked, protocol.Get):
                get()
                talk.say(protocol.Missing(0))
            elif isinstance(asked, protocol.AskStatus):
                status()
                talk.say(protocol.Status({}, []))
            else:
                talk.say(protocol.Done())

    return behave


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
    with pytest.raises(NobodyThereError):
        client.get(get_message(KEY))
    with pytest.raises(NotAskedError):
        client.get(get_message(KEY))


def test_a_socket_that_nobody_listens_on_any_more(place, client):
    with fake_daemon(place.socket, hangs_up):
        left_behind = place.root / "left"
        os.link(place.socket, left_behind)
    left_behind.rename(place.socket)
    with pytest.raises(NobodyThereError):
        client.get(get_message(KEY))


def test_after_a_failure_the_pauses_in_the_background_double_up_to_a_minute(place, client, clock):
    with pytest.raises(NobodyThereError):
        client.get(get_message(KEY))
    pauses = []
    for _ in range(8):
        start = clock.ahead
        while True:
            try:
                client.report({"hits": 1})
            except NotAskedError as error:
                if "tried again" in str(error):
                    break
                clock.ahead += 0.5
        pauses.append(round(clock.ahead - start))
    assert pauses == sorted(pauses)
    assert pauses[0] == 1
    assert pauses[-1] == 60


def test_after_a_failure_no_compile_tries_again_however_long_ago_it_was(place, client, clock):
    with pytest.raises(NobodyThereError):
        client.get(get_message(KEY))
    with fake_daemon(place.socket, works()) as daemon:
        for _ in range(5):
            clock.ahead += 1000
            with pytest.raises(NotAskedError):
                client.get(get_message(KEY))
        assert daemon.connections == 0


def test_the_daemon_is_tried_in_the_background_after_the_pause_and_all_is_well(place, patient_client, clock):
    client = patient_client
    with pytest.raises(NobodyThereError):
        client.get(get_message(KEY))
    with fake_daemon(place.socket, works()):
        with pytest.raises(NotAskedError):
            client.report({"hits": 1})
        clock.ahead += 1.1
        client.report({"hits": 1})
        assert client.get(get_message(KEY)) == Absent(0)
        assert client.get(get_message(KEY)) == Absent(0)
    with pytest.raises(NobodyThereError):
        client.get(get_message(KEY))
    # One swift answer, and the pause is short again.
    clock.ahead += 1.1
    with pytest.raises(NotAskedError, match="tried again, and still"):
        client.report({"hits": 1})


def gets_until_not_asked(client: Client) -> int:
    """How often a slow daemon is asked before it is left alone."""
    for asked in range(1000):
        try:
            # The last of them may find its time up before the answer comes.
            with suppress(ConnectionLostError):
                client.get(get_message(KEY))
        except NotAskedError:
            return asked
    raise AssertionError("it is asked for ever")


def test_slow_answers_use_up_the_timeout_once_and_then_nothing_is_asked(place, patient_client, clock):
    with fake_daemon(place.socket, works(get=lambda: advance(clock, 3.0))):
        assert gets_until_not_asked(patient_client) == 4
        clock.ahead += 1000
        with pytest.raises(NotAskedError):
            patient_client.get(get_message(KEY))


def test_after_slow_answers_a_swift_answer_in_the_background_has_a_little_asked_again(place, patient_client, clock):
    with fake_daemon(place.socket, works(get=lambda: advance(clock, 3.0))):
        gets_until_not_asked(patient_client)
        clock.ahead += 1000
        patient_client.report({"hits": 1})
        # Less than one such answer may take: that is all a daemon in trouble is trusted with again.
        assert gets_until_not_asked(patient_client) == 1


def test_after_slow_answers_a_slow_answer_in_the_background_changes_nothing(place, patient_client, clock):
    slow = works(status=lambda: advance(clock, 1.0), get=lambda: advance(clock, 3.0))
    with fake_daemon(place.socket, slow):
        gets_until_not_asked(patient_client)
        clock.ahead += 1000
        # What is reported there arrives all the same: nobody waits for it.
        patient_client.report({"hits": 1})
        with pytest.raises(NotAskedError):
            patient_client.get(get_message(KEY))


def test_trying_again_in_the_background_leaves_no_connections_behind(place, patient_client, clock):
    """A program may run for days beside a daemon that is slow now and then."""
    with fake_daemon(place.socket, works(get=lambda: advance(clock, 3.0))):
        for _ in range(10):
            gets_until_not_asked(patient_client)
            clock.ahead += 1000
            patient_client.report({"hits": 1})
        assert len(patient_client._open) == len(patient_client._idle) <= 2


def test_swift_answers_are_asked_for_however_much_they_add_up_to(place, patient_client, clock):
    with fake_daemon(place.socket, works(get=lambda: advance(clock, 0.1))):
        for _ in range(300):
            assert patient_client.get(get_message(KEY)) == Absent(0)


def test_an_answer_to_another_request_is_passed_over(place, client):
    def behave(talk: Talk) -> None:
        talk.welcome()
        talk.read()
        talk.raw(framing.encode(talk.request - 1, protocol.Found("old", 1, 1.0, b"x")))
        talk.say(protocol.Missing(0))
        talk.until_the_end()

    with fake_daemon(place.socket, behave):
        assert client.get(get_message(KEY)) == Absent(0)


def test_a_refusal_is_passed_on_and_no_reason_to_be_silent(place, client):
    with fake_daemon(place.socket, answering(protocol.Refused("disk full", "no room"))) as daemon:
        for _ in range(3):
            with pytest.raises(RefusedError, match="no room") as caught:
                client.put(put_message(KEY, b"", b""), b"x" * 100_000, b"p")
            assert caught.value.kind == "disk full"
        assert daemon.connections == 1


def test_what_cannot_be_cached_is_no_fault_either(place, client):
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


def test_descriptors_that_nobody_asked_for_do_not_pile_up(place, client):
    def behave(talk: Talk) -> None:
        talk.welcome()
        with open(os.devnull, "rb") as file:
            while True:
                talk.read()
                talk.say(protocol.Missing(0), (file.fileno(), file.fileno()))

    with fake_daemon(place.socket, behave):
        assert client.get(get_message(KEY)) == Absent(0)
        before = descriptors()
        for _ in range(20):
            assert client.get(get_message(KEY)) == Absent(0)
        assert descriptors() <= before + protocol.MAX_PREDICTED_FILES


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
