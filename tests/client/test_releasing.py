"""A lease is given back without a wait, whatever the daemon is at; and what a daemon in trouble may cost in all."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from conversation import talking
from peers import fake_daemon
from places import digest, get_message, until
from test_cache import Asking, Gate, caches, compiled, request  # noqa: F401

from xcache import protocol
from xcache.cache import Cache
from xcache.client import Client
from xcache.clock import monotonic
from xcache.errors import NotAskedError, RefusedError, UnavailableError


def test_a_lease_is_given_back_while_the_breaker_is_open(place, caches):  # noqa: F811
    daemon = place.daemon_pid()
    cache = caches(timeout=1.0)
    gate = Gate(lambda: 1 / 0)
    first = Asking(cache, gate, request("a"))
    assert gate.begun.wait(20)
    # Another connection, as another thread would leave it: this one is lost, and the lease stays with the first.
    cache._client._put_back(cache._client._connect(monotonic() + 5))
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


def test_giving_a_lease_back_costs_no_second_timeout(place, caches):  # noqa: F811
    daemon = place.daemon_pid()
    cache = caches(timeout=1.0)
    raised = []

    def compile_now():
        os.kill(daemon, signal.SIGSTOP)
        other = threading.Thread(target=lambda: cache.get_or_compile(compiled, lambda: request("b")))
        other.start()
        other.join()
        time.sleep(1.2)
        raised.append(time.monotonic())
        raise ZeroDivisionError

    try:
        with pytest.raises(ZeroDivisionError):
            cache.get_or_compile(compile_now, request)
        assert time.monotonic() - raised[0] < 0.5
    finally:
        os.kill(daemon, signal.SIGCONT)


def test_slow_answers_to_complaints_use_up_the_allowance(place):
    def behave(talk):
        talk.welcome()
        while True:
            message = talk.read()
            if isinstance(message, protocol.Get):
                talk.say(protocol.Found(digest(b"x"), 7, 1.0, b"damaged"))
                continue
            time.sleep(0.8 if isinstance(message, protocol.Complain) else 0)
            talk.say(protocol.Done())

    with fake_daemon(place.socket, behave):
        cache = Cache(place.config(timeout=1.0), "readonly", "test")
        start = time.monotonic()
        for number in range(5):
            cache.get_or_compile(compiled, lambda number=number: request(str(number)))
        took = time.monotonic() - start
        cache.close()
    assert took < 3, took


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
    """As soon as one comes free, where no other is to be had."""
    place.start_daemon()
    client = Client(place.config(timeout=5.0), "test")
    leases: list[tuple[str, int]] = []
    client.get(get_message(digest(b"a"), 60.0), leases)
    with client.loading("nothing", "of that"):
        client._breaker.failed()
        client.release(*leases[0])
        with talking(place) as other:
            assert other.status()["connections"] == 2
            assert isinstance(other.ask(get_message(digest(b"a"), 60.0)), protocol.Wait)
    with talking(place) as other:
        assert other.ask(get_message(digest(b"a"), 60.0)).lease
    client.close()


def test_of_several_loads_in_a_row_one_word_is_said(place):
    """A note takes a program that is busy longer than many a load."""
    notes: list[protocol.Message] = []

    def behave(talk):
        talk.welcome()
        while True:
            notes.append(talk.read())

    with fake_daemon(place.socket, behave):
        client = Client(place.config(timeout=5.0), "test")
        client._put_back(client._connect(monotonic() + 5))
        client.begin_loading("a", "A", [("b", "B"), ("c", "C")])
        client.begin_loading("b", "B", [("c", "C"), ("d", "D")])
        client.begin_loading("c", "other")
        client.end_loading()
        client.close()
        assert until(lambda: len(notes) == 3)
    assert notes == [
        protocol.Loading({"a": "A", "b": "B", "c": "C"}),
        protocol.Loading({"c": "other"}),
        protocol.Loading({}),
    ]
