"""An exception of the program's signal handler reaches the program from anywhere in xcache, and does no harm."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time

import pytest
from support.caching import Loadable, compiled, request
from support.conversation import talking
from support.leasing import take
from support.peers import fake_daemon
from support.places import digest, until

from xcache.client import connection
from xcache.client.connection import Connection
from xcache.signals import reraise_if_the_programs
from xcache.wire import protocol


class UsersError(TimeoutError):
    """An exception of a kind that xcache's own waits raise."""


def raising(number, frame):
    raise UsersError("the user's own")


class Object:
    """A handler as some write it."""

    def __call__(self, number, frame):
        raising(number, frame)

    def method(self, number, frame):
        raising(number, frame)


def plain(number, frame):
    raising(number, frame)


@contextlib.contextmanager
def alarm(handler=raising):
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def kept(place):
    return place.query("SELECT (SELECT count(*) FROM entries), (SELECT count(*) FROM quarantined)")


def test_one_leaves_a_wait_for_anothers_compile(place, caches):
    cache = caches()
    with talking(place) as holder, alarm():
        take(holder, digest(b"a"), 600.0)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(UsersError) as raised:
            cache.get_or_compile(compiled, request)
    assert (raised.value.__cause__, raised.value.__context__) == (None, None)
    # The daemon did nothing wrong: it is asked at once.
    assert cache.statistics().errors == {}
    assert cache.get_or_compile(compiled, lambda: request("b")).kind == "miss"
    assert cache.statistics().errors == {}


def test_one_while_loading_sets_nothing_aside(place, caches):
    caches().get_or_compile(compiled, request)
    assert until(lambda: kept(place) == [(1, 0)])

    def load(raw):
        signal.raise_signal(signal.SIGALRM)
        return Loadable(raw)

    with alarm(), pytest.raises(UsersError):
        caches().get_or_compile(compiled, lambda: request(load=load))
    assert kept(place) == [(1, 0)]
    assert place.query("SELECT count(*) FROM strikes") == [(0,)]


def test_one_while_a_daemon_is_silent_leaves_at_once(place, caches):
    def behave(talk):
        talk.welcome()
        talk.until_the_end()

    place.stop()
    with fake_daemon(place.socket, behave), alarm():
        cache = caches(timeout=20.0, autostart=False)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(UsersError):
            cache.get_or_compile(compiled, request)
        assert cache.statistics().lost_seconds < 10


def test_one_while_the_key_is_made_is_the_programs(caches):
    def asked():
        signal.raise_signal(signal.SIGALRM)
        return request()

    with alarm(), pytest.raises(UsersError):
        caches().get_or_compile(compiled, asked)


@pytest.mark.parametrize("call", ["send", "recvmsg"])
def test_one_that_says_would_block_is_not_taken_for_the_sockets(place, call):
    """A full pipe of the program's raises the same exception as a socket."""

    def full(number, frame):
        raise BlockingIOError("the user's own")

    class Interrupted:
        """A socket; after this call a signal comes."""

        def __init__(self, real):
            self._real = real

        def __getattr__(self, name):
            real = getattr(self._real, name)
            if name != call:
                return real

            def called(*arguments):
                result = real(*arguments)
                os.kill(os.getpid(), signal.SIGALRM)
                return result

            return called

    place.start_daemon()
    connection = Connection(place.socket, 5.0, "test")
    with contextlib.closing(connection), alarm(full):
        connection._socket = Interrupted(connection._socket)
        with pytest.raises(BlockingIOError, match="the user's own"):
            connection.ask(protocol.AskStatus(), 5.0)


@pytest.mark.parametrize(
    "handler",
    [plain, Object(), Object().method, functools.partial(functools.partial(lambda x, n, f: raising(n, f), 1))],
    ids=["function", "object", "method", "partial"],
)
def test_handlers_of_all_kinds_are_known(handler):
    with alarm(handler):
        try:
            signal.raise_signal(signal.SIGALRM)
        except UsersError as error:
            with pytest.raises(UsersError):
                reraise_if_the_programs(error)


def test_an_error_that_no_handler_raised_is_ours():
    with alarm():
        try:
            raise TimeoutError
        except TimeoutError as error:
            reraise_if_the_programs(error)
    assert protocol.VERSION


def test_a_compile_in_a_handler_does_not_count_as_a_wait_of_the_interrupted_request(caches, monkeypatch):
    cache = caches()
    here, now, wait = threading.get_ident(), time.clock_gettime, connection._wait
    hours, outcomes = [], []

    def compiles_for_an_hour():
        hours.append(3600.0)
        return compiled()

    def handled(ready, deadline):
        """Run the handler in the middle of this thread's first request."""
        if threading.get_ident() == here and not outcomes:
            outcomes.append("under way")
            outcomes[0] = cache.get_or_compile(compiles_for_an_hour, lambda: request("b")).kind
        wait(ready, deadline)

    monkeypatch.setattr(time, "clock_gettime", lambda kind: now(kind) + sum(hours) * (threading.get_ident() == here))
    monkeypatch.setattr(connection, "_wait", handled)
    assert cache.get_or_compile(compiled, lambda: request("a")).kind == "miss"
    assert (outcomes, hours) == (["miss"], [3600.0])
    assert cache.get_or_compile(compiled, lambda: request("c")).kind == "miss"
    # The request has not timed out, and the hour is not charged to the allowance.
    assert cache.statistics().errors == {}
    assert cache.statistics().lost_seconds < 3600.0


@pytest.mark.once
def test_one_while_the_plugin_imports_xcache_comes_out_at_the_next_compile(place):
    """jax swallows every exception that leaves a plugin."""
    program = """
import signal, sys
import jax

class Alarm:
    def find_spec(self, name, path=None, target=None):
        if name == "xcache.cache":
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGALRM)

def too_late(number, frame):
    raise TimeoutError("the user's own")

signal.signal(signal.SIGALRM, too_late)
sys.meta_path.insert(0, Alarm())
try:
    jax.jit(lambda x: x + 1)(1)
except TimeoutError as error:
    print(error)
print(jax.jit(lambda x: x + 1)(1))
"""
    ran = place.run(program, XCACHE="1")
    assert (ran.stdout, ran.stderr) == ("the user's own\n2\n", "")
