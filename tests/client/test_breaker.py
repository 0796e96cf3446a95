"""A daemon in trouble costs a program one timeout in all: when it is asked again, and when it is left alone."""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from contextlib import suppress

import pytest
from peers import Talk, fake_daemon
from places import get_message

from xcache import breaker, connection, protocol
from xcache import client as client_module
from xcache.client import Client
from xcache.entries import Absent
from xcache.errors import ConnectionLostError, NobodyThereError, NotAskedError

KEY = "ab" * 32


@pytest.fixture
def client(place):
    """With the clock fixture, ten seconds take none."""
    made = Client(place.config(timeout=10), "test")
    yield made
    made.close()


@pytest.fixture
def clock(monkeypatch):
    """Time that goes on as usual, and can be moved on."""

    made = types.SimpleNamespace(ahead=0.0)
    for module, name in ((breaker, "monotonic"), (client_module, "own_time"), (connection, "own_time")):
        monkeypatch.setattr(module, name, lambda: time.monotonic() + made.ahead)
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


def test_the_daemon_is_tried_in_the_background_after_the_pause_and_all_is_well(place, client, clock):
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
    with pytest.raises(NotAskedError, match="tried again"):
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


def test_slow_answers_use_up_the_timeout_once_and_then_nothing_is_asked(place, client, clock):
    with fake_daemon(place.socket, works(get=lambda: advance(clock, 3.0))):
        assert gets_until_not_asked(client) == 4
        clock.ahead += 1000
        with pytest.raises(NotAskedError):
            client.get(get_message(KEY))


def test_after_slow_answers_a_swift_answer_in_the_background_has_a_little_asked_again(place, client, clock):
    with fake_daemon(place.socket, works(get=lambda: advance(clock, 3.0))):
        gets_until_not_asked(client)
        clock.ahead += 1000
        client.report({"hits": 1})
        # Less than one such answer may take: that is all a daemon in trouble is trusted with again.
        assert gets_until_not_asked(client) == 1


def test_after_slow_answers_a_slow_answer_in_the_background_changes_nothing(place, client, clock):
    slow = works(status=lambda: advance(clock, 1.0), get=lambda: advance(clock, 3.0))
    with fake_daemon(place.socket, slow):
        gets_until_not_asked(client)
        clock.ahead += 1000
        # What is reported there arrives all the same: nobody waits for it.
        client.report({"hits": 1})
        with pytest.raises(NotAskedError):
            client.get(get_message(KEY))


def test_a_daemon_that_was_only_slow_and_is_gone_when_it_is_tried_again_is_a_failure(place, client, clock):
    # As two threads find it whose answers come at the same time.
    for _ in range(2):
        client._breaker.waited(6.0)
    clock.ahead += 1000
    with pytest.raises(NobodyThereError):
        client.report({"hits": 1})
    clock.ahead += 1000
    with pytest.raises(NotAskedError, match="tried again"):
        client.report({"hits": 1})


def test_trying_again_in_the_background_leaves_no_connections_behind(place, client, clock):
    """A program may run for days beside a daemon that is slow now and then."""
    with fake_daemon(place.socket, works(get=lambda: advance(clock, 3.0))):
        for _ in range(10):
            gets_until_not_asked(client)
            clock.ahead += 1000
            client.report({"hits": 1})
        assert len(client._open) == len(client._idle) <= 2


def test_swift_answers_are_asked_for_however_much_they_add_up_to(place, client, clock):
    with fake_daemon(place.socket, works(get=lambda: advance(clock, 0.1))):
        for _ in range(300):
            assert client.get(get_message(KEY)) == Absent(0)
