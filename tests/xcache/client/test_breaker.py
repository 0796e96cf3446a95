"""A daemon in trouble costs a program one timeout in all: when it is asked again, and when it is left alone."""

from __future__ import annotations

import os
import socket
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from support.peers import Talk, fake_daemon
from support.places import PATIENCE, get_message, until
from support.resources import descriptors_of

from xcache.client import breaker, connection
from xcache.client.client import Client
from xcache.client.contents import Absent
from xcache.errors import ConnectionLostError, NobodyThereError, NotAskedError, UnavailableError
from xcache.wire import protocol

KEY = "ab" * 32


@pytest.fixture
def client(place):
    """A client with a timeout of ten seconds; the clock fixture makes them pass at once."""
    made = Client(place.config(timeout=10), "test")
    yield made
    made.close()


def sockets() -> int:
    return descriptors_of(os.getpid())["socket:"]


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
                talk.say(protocol.Status({}, [], []))
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
        assert client.get(get_message(KEY)).lease == 0
        assert client.get(get_message(KEY)).lease == 0
    with pytest.raises(NobodyThereError):
        client.get(get_message(KEY))
    # One swift answer, and the pause is short again.
    clock.ahead += 1.1
    with pytest.raises(NotAskedError, match="tried again"):
        client.report({"hits": 1})


def gets_until_not_asked(client: Client) -> int:
    """Return how often the client asks a slow daemon before it leaves it alone."""
    for asked in range(1000):
        try:
            # The last of them may find its time up before the answer comes.
            with suppress(ConnectionLostError):
                client.get(get_message(KEY))
        except NotAskedError:
            return asked
    raise AssertionError("it is asked for ever")


@pytest.mark.parametrize(("late", "at_most"), [(0.1, 100), (0.4, 25), (3.0, 3)])
def test_late_answers_use_up_the_timeout_once_and_then_nothing_is_asked(place, client, clock, late, at_most):
    with fake_daemon(place.socket, works(get=lambda: advance(clock, late))):
        assert 0.8 * at_most <= gets_until_not_asked(client) <= at_most + 1
        assert client.lost_seconds <= 10.0 + late
        with pytest.raises(NotAskedError):
            client.get(get_message(KEY))


def test_after_late_answers_nothing_more_may_be_lost_however_well_the_daemon_seems(place, client, clock):
    with fake_daemon(place.socket, works(get=lambda: advance(clock, 3.0))):
        lost = []
        for _ in range(5):
            gets_until_not_asked(client)
            lost.append(client.lost_seconds)
            # Swift: the daemon is asked again, for what is left.
            clock.ahead += 2.0
            with suppress(NotAskedError):
                client.report({"hits": 1})
    assert lost[-1] <= 10.0 + 3.0


def test_threads_that_wait_together_lose_the_time_once(place, client, clock):
    everybody = threading.Barrier(8, action=lambda: advance(clock, 3.0))
    with fake_daemon(place.socket, works(get=everybody.wait)), ThreadPoolExecutor(8) as threads:
        assert list(threads.map(client.get, [get_message(KEY)] * 8)) == [Absent(0)] * 8
    assert 3.0 <= client.lost_seconds < 4.0
    assert client.allowance() > 6.0


@pytest.fixture
def heard(monkeypatch):
    """Counts the notices that the client has heard."""
    made, continue_wait = threading.Semaphore(0), breaker.Breaker.continue_wait

    def continue_wait_and_tell(*arguments: object) -> None:
        continue_wait(*arguments)
        made.release()

    monkeypatch.setattr(breaker.Breaker, "continue_wait", continue_wait_and_tell)
    return made


def test_a_silence_while_another_compiles_counts_while_it_lasts_and_is_refunded(place, client, clock, heard):
    silent, may_speak = threading.Event(), threading.Event()

    def behave(talk: Talk) -> None:
        talk.welcome()
        while True:
            talk.read()
            for _ in range(4):
                talk.say(protocol.Wait(1, "other", 1.0, 60.0))
                assert heard.acquire(timeout=PATIENCE)
                advance(clock, 0.25)
            advance(clock, 3.0)
            silent.set()
            assert may_speak.wait(PATIENCE)
            talk.say(protocol.Found("d", 1, 60.0, b"x"))

    with fake_daemon(place.socket, behave), ThreadPoolExecutor(1) as threads:
        found = threads.submit(client.get, get_message(KEY, 60.0))
        assert silent.wait(PATIENCE)
        assert client.allowance() < 8.0
        may_speak.set()
        wait = found.result().wait
    assert client.lost_seconds > 2.0
    client.refund(wait, wait.charged)
    assert client.lost_seconds < 0.1


def test_notices_after_the_time_that_was_asked_for_are_charged(place, client, clock, heard):
    def behave(talk: Talk) -> None:
        talk.welcome()
        talk.read()
        for _ in range(40):
            talk.say(protocol.Wait(1, "other", 1.0, 60.0))
            if not heard.acquire(timeout=PATIENCE):
                return
            advance(clock, 0.5)

    with fake_daemon(place.socket, behave):
        with pytest.raises(UnavailableError):
            client.get(get_message(KEY))
        # The client hears nothing more, and the daemon must not wait for that.
        heard.release(40)
    # All but the second for the answer, and a first part of the allowance that is not charged.
    assert client.lost_seconds > 5.0


def test_a_thread_without_a_turn_until_its_time_is_up_blames_no_daemon(place, client, clock, monkeypatch):
    with fake_daemon(place.socket, works()):
        assert client.get(get_message(KEY)).lease == 0
        begin = breaker.Breaker.begin

        def begin_late(*arguments: object) -> breaker.Wait:
            wait = begin(*arguments)
            advance(clock, 9.0)
            return wait

        with monkeypatch.context() as patch:
            patch.setattr(breaker.Breaker, "begin", begin_late)
            with pytest.raises(NotAskedError, match="no time was left"):
                client.get(get_message(KEY))
        # The wait was charged; when that is over, the daemon is asked as before.
        advance(clock, 10_000)
        assert client.get(get_message(KEY)).lease == 0


def test_a_program_of_days_asks_again(place, client, clock):
    with fake_daemon(place.socket, works(get=lambda: advance(clock, 3.0))):
        first = gets_until_not_asked(client)
        clock.ahead += 100_000
        client.report({"hits": 1})
        assert gets_until_not_asked(client) == first


def test_an_answer_that_has_saved_as_much_as_it_took_costs_nothing(place, client, clock):
    def behave(talk: Talk) -> None:
        talk.welcome()
        while True:
            talk.read()
            advance(clock, 3.0)
            talk.say(protocol.Found("d", 1, 1.0, b"x"))

    with fake_daemon(place.socket, behave):
        for _ in range(20):
            wait = client.get(get_message(KEY)).wait
            client.refund(wait, wait.charged)
    assert client.lost_seconds < 1e-6


def test_after_slow_answers_a_slow_answer_in_the_background_changes_nothing(place, client, clock):
    with fake_daemon(place.socket, works(status=lambda: advance(clock, 1.0), get=lambda: advance(clock, 6.0))):
        client.fetch(KEY)
        clock.ahead += 1000
        # Reports arrive there all the same: nobody waits for them.
        client.report({"hits": 1})
        with pytest.raises(NotAskedError):
            client.get(get_message(KEY))


def test_a_daemon_that_was_only_slow_and_is_gone_when_it_is_tried_again_is_a_failure(place, client, clock):
    with fake_daemon(place.socket, works(get=lambda: advance(clock, 6.0))):
        client.fetch(KEY)
    clock.ahead += 1000
    with pytest.raises(NobodyThereError):
        client.report({"hits": 1})
    clock.ahead += 1000
    with pytest.raises(NotAskedError, match="tried again"):
        client.report({"hits": 1})


def test_trying_again_in_the_background_leaves_no_connections_behind(place, client, clock):
    """A program may run for days beside a daemon that is slow now and then."""
    with fake_daemon(place.socket, works(get=lambda: advance(clock, 3.0))):
        before = sockets()
        for _ in range(10):
            gets_until_not_asked(client)
            clock.ahead += 1000
            client.report({"hits": 1})
        # Two connections at most, of which this process has both ends.
        assert until(lambda: sockets() <= before + 4)


def test_answers_within_a_hundredth_of_a_second_are_asked_for_however_much_they_add_up_to(client):
    for _ in range(10_000):
        client.charge(0.009)
    assert client.allowance() == 10.0


def test_a_very_slow_answer_in_the_background_is_a_sign_for_the_foreground(place, client, clock):
    def behave(talk: Talk) -> None:
        talk.welcome()
        while True:
            talk.read()
            advance(clock, 3.0)
            talk.say(protocol.Prediction([], {}, {}, [], [], [], None))

    with fake_daemon(place.socket, behave):
        client.predict(protocol.Predict("train.py", ""))
        with pytest.raises(NotAskedError):
            client.get(get_message(KEY))
    assert client.lost_seconds == 0.0


def test_every_wait_of_the_foreground_is_charged(place, client, clock):
    def behave(talk: Talk) -> None:
        talk.welcome()
        while True:
            talk.read()
            advance(clock, 1.0)
            talk.say(protocol.Done())

    with fake_daemon(place.socket, behave):
        client.announce(protocol.Announce("d", "cpu", "0", "", []))
        assert 1.0 <= client.lost_seconds < 2.0


def test_a_note_to_a_daemon_that_does_not_read_is_not_waited_for(place, client, clock):
    may_read = threading.Event()

    def behave(talk: Talk) -> None:
        talk.welcome()
        may_read.wait(30)

    with fake_daemon(place.socket, behave):
        before = sockets()
        with client.loading(KEY, KEY):
            assert until(lambda: sockets() == before + 2)
        # On a busy machine the greeting may count.
        lost = client.lost_seconds
        # More than a socket takes.
        for number in range(20_000):
            client.release(f"{number:064}", 1)
        # The client has closed its end.
        assert sockets() == before + 1
        may_read.set()
    assert client.lost_seconds == lost


def test_a_daemon_that_takes_its_time_to_start_is_not_slow(place, client, clock):
    def behave(talk: Talk) -> None:
        advance(clock, 6.0)
        works()(talk)

    with fake_daemon(place.socket, behave):
        assert client.fetch(KEY).lease == 0
        assert client.get(get_message(KEY)).lease == 0


def test_a_slow_answer_in_the_background_is_a_sign_of_trouble(place, client, clock):
    with fake_daemon(place.socket, works(get=lambda: advance(clock, 6.0))):
        client.fetch(KEY)
        with pytest.raises(NotAskedError):
            client.get(get_message(KEY))


def test_the_hello_has_only_the_time_that_connecting_left(place, client, clock, monkeypatch):
    """The kernel's queue of connections is full, and then the daemon says nothing."""
    hellos = []

    def hello(_: connection.Connection, message: protocol.Hello, expected: type, timeout: float) -> None:
        hellos.append(timeout)
        raise ConnectionLostError("no answer")

    with crowded(place.socket) as listener:

        def sleep(_: float) -> None:
            clock.ahead += 0.75
            listener.accept()[0].close()

        monkeypatch.setattr(connection, "pause", sleep)
        monkeypatch.setattr(connection.Connection, "demand", hello)
        with pytest.raises(ConnectionLostError):
            client.get(get_message(KEY))
    # One wait may use up seven eighths of ten seconds, and connecting has taken some of that.
    assert 7.5 < hellos[0] <= 8.0
    assert client.lost_seconds >= 0.75


@contextmanager
def crowded(path: Path) -> Iterator[socket.socket]:
    """A socket that listens, and whose queue is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(path))
        listener.listen(1)
        with suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                waiting.setblocking(False)
                waiting.connect(str(path))
        yield listener
