"""A lease is given back without a wait, whatever the daemon is at; and what a daemon in trouble may cost in all."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from support.caching import Asking, Gate, compiled, fail_once, request
from support.conversation import talking
from support.peers import fake_daemon
from support.places import digest, get_message, until

from xcache.cache import Cache
from xcache.client.client import Client
from xcache.client.contents import HeldLease
from xcache.errors import NotAskedError, RefusedError, UnavailableError
from xcache.wire import protocol

DONE = protocol.Done()


def test_a_lease_is_given_back_while_the_breaker_is_open(place, caches):
    daemon = place.daemon_pid()
    cache = caches(timeout=1.0)
    gate = Gate(lambda: 1 / 0)
    first = Asking(cache, gate, request("a"))
    assert gate.begun.wait(20)
    leave_another_connection(cache.client)
    os.kill(daemon, signal.SIGSTOP)
    try:
        assert cache.get_or_compile(compiled, lambda: request("c")).kind == "miss"
    finally:
        os.kill(daemon, signal.SIGCONT)
    gate.open.set()
    with pytest.raises(ZeroDivisionError):
        first.end()
    with talking(place) as other:
        other.say(get_message(digest(b"a"), 60.0))
        end = time.monotonic() + 4
        while time.monotonic() < end:
            _, answer = other.hear()
            if isinstance(answer, protocol.Missing):
                return
    raise AssertionError(f"still told to wait, though nobody compiles: {answer}")


def leave_another_connection(client: Client) -> None:
    """Open a second connection, as another thread would: this one is lost, and the lease stays with the first."""
    has_begun, may_end = threading.Event(), threading.Event()

    def load() -> None:
        with client.loading("b", "B"):
            has_begun.set()
            assert may_end.wait(20)

    other = threading.Thread(target=load)
    with client.loading("a", "A"):
        other.start()
        assert has_begun.wait(20)
    may_end.set()
    other.join(20)


def test_giving_a_lease_back_costs_no_second_timeout(place, caches):
    daemon = place.daemon_pid()
    cache = caches(timeout=1.0)
    lost = []

    def compile_now():
        os.kill(daemon, signal.SIGSTOP)
        other = threading.Thread(target=lambda: cache.get_or_compile(compiled, lambda: request("b")))
        other.start()
        other.join()
        time.sleep(1.2)
        lost.append(cache.statistics().lost_seconds)
        raise ZeroDivisionError

    try:
        with pytest.raises(ZeroDivisionError):
            cache.get_or_compile(compile_now, request)
        assert cache.statistics().lost_seconds - lost[0] < 0.5
    finally:
        os.kill(daemon, signal.SIGCONT)


def test_slow_refusals_use_up_the_allowance(place):
    def behave(talk):
        talk.welcome()
        while True:
            talk.read()
            time.sleep(0.4)
            talk.say(protocol.Refused("store error", "no"))

    with fake_daemon(place.socket, behave):
        client = Client(place.config(timeout=1.0), "test")
        for _ in range(2):
            with pytest.raises(RefusedError):
                client.get(get_message(digest(b"a"), 0.0))
        with pytest.raises(UnavailableError):
            client.get(get_message(digest(b"a"), 0.0))
        with pytest.raises(NotAskedError):
            client.get(get_message(digest(b"a"), 0.0))
        client.close()


def test_a_lease_is_given_back_though_all_connections_are_in_use(place):
    """The client gives it back over the first connection that comes free, if it can have no other."""
    place.start_daemon()
    client = Client(place.config(timeout=1.0), "test")
    lease = HeldLease()
    client.get(get_message(digest(b"a"), 60.0), lease)
    with client.loading("nothing", "of that"):
        fail_once(place, client)
        client.release(*lease.hand_on())
        with talking(place) as other:
            assert until(lambda: other.status()["connections"] == 2)
            assert isinstance(other.ask(get_message(digest(b"a"), 60.0)), protocol.Wait)
    with talking(place) as other:
        assert other.ask(get_message(digest(b"a"), 60.0)).lease
    client.close()


def test_each_load_is_said_before_it_begins_and_the_end_of_the_last(place):
    notes: list[protocol.Message] = []

    def behave(talk):
        talk.welcome()
        while True:
            notes.append(talk.read())

    with fake_daemon(place.socket, behave):
        client = Client(place.config(timeout=5.0), "test")
        assert client.begin_loading("a", "A")
        assert client.begin_loading("b", "B")
        client.end_loading()
        with client.loading("c", "C"):
            pass
        client.close()
        assert until(lambda: len(notes) == 5)
    assert notes == [
        protocol.Loading("a", "A", ahead=True),
        protocol.Loading("b", "B", ahead=True),
        protocol.Loaded(),
        protocol.Loading("c", "C", ahead=False),
        protocol.Loaded(),
    ]


def test_a_load_is_said_also_where_all_connections_are_in_use(place):
    """Threads that load ahead may use all connections at that moment."""
    said: dict[int, list[protocol.Message]] = {}

    def behave(talk):
        talk.welcome()
        mine = said.setdefault(len(said), [])
        while True:
            mine.append(talk.read())

    with fake_daemon(place.socket, behave):
        client = Client(place.config(timeout=5.0), "test")
        begun, over = threading.Event(), threading.Event()

        def load_ahead():
            client.begin_loading("a", "A")
            begun.set()
            assert over.wait(20)
            client.end_loading()

        beside = threading.Thread(target=load_ahead)
        beside.start()
        assert begun.wait(20)
        with client.loading("b", "B"):
            assert until(lambda: len(said) == 2 and all(said.values()))
            # The connections may be taken up in any order.
            assert {mine[0] for mine in said.values()} == {
                protocol.Loading("a", "A", ahead=True),
                protocol.Loading("b", "B", ahead=False),
            }
        over.set()
        beside.join(20)
        client.close()


def test_a_load_of_the_programs_goes_on_where_the_daemon_cannot_be_told_of_it_and_one_ahead_does_not(place):
    client = Client(place.config(), "test")
    assert not client.begin_loading("a", "A")
    with client.loading("a", "A"):
        pass
    client.end_loading()


def test_the_wait_for_a_late_daemon_at_the_exit_is_counted_as_lost(place):
    def behave(talk):
        talk.welcome()
        while True:
            asked = talk.read()
            if isinstance(asked, protocol.Put):
                time.sleep(0.6)
            talk.say({protocol.Get: protocol.Missing(0), protocol.Put: protocol.Stored(True)}.get(type(asked), DONE))

    with fake_daemon(place.socket, behave):
        cache = Cache(place.config(timeout=5.0), "on", "test")
        assert cache.get_or_compile(compiled, request).kind == "miss"
        before = cache.statistics().lost_seconds
        cache.close()
        assert cache.statistics().lost_seconds > before
