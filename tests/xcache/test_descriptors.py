"""Programs that close descriptors that are not theirs, keep the signals' usual effects, or replace threads."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import types

import pytest
from support.peers import Talk, fake_daemon
from support.places import get_message
from support.resources import pipes

from xcache import cache
from xcache.client.connection import Connection
from xcache.client.contents import hand_over
from xcache.client.launcher import Launcher
from xcache.errors import HungUpError, UnavailableError, UnsupportedError
from xcache.wire import protocol

KEY = "ab" * 32


def welcomes(talk: Talk) -> None:
    talk.welcome()
    talk.until_the_end()


def welcomes_and_goes(talk: Talk) -> None:
    talk.welcome()


@contextlib.contextmanager
def usual(number: signal.Signals):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_a_number_that_is_the_programs_by_now_is_neither_used_nor_closed(place):
    with fake_daemon(place.socket, welcomes):
        connection = Connection(place.socket, 5.0, "test")
        number = connection.fileno()
        mine, other = socket.socketpair()
        with mine, other:
            os.close(number)
            os.dup2(mine.fileno(), number)
            with pytest.raises(UnavailableError):
                connection.ask(get_message(KEY), 5.0)
            connection.close()
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.recv(1)
            os.write(number, b"mine")
            assert other.recv(10) == b"mine"
            os.close(number)


def test_the_same_of_a_connection_that_was_not_in_use(place):
    with fake_daemon(place.socket, welcomes), open(os.devnull, "wb") as mine:
        connection = Connection(place.socket, 5.0, "test")
        number = connection.fileno()
        os.dup2(mine.fileno(), number)
        connection.close()
        # It is still the program's, and open.
        assert os.path.sameopenfile(number, mine.fileno())
        os.close(number)


@pytest.mark.parametrize("asked", [True, False])
def test_the_same_of_what_a_daemon_says_while_it_starts(place, monkeypatch, asked):
    monkeypatch.setattr("xcache.client.launcher.daemon_command", lambda: ["/bin/sh", "-c", "true", "sh"])
    launcher, before = Launcher(place.config()), pipes()
    assert launcher.start()
    (number,) = pipes() - before
    reading, writing = os.pipe()
    os.write(writing, b"mine")
    os.dup2(reading, number)
    if asked:
        assert launcher.failure(0.0) is None
    launcher.close()
    assert os.read(number, 10) == b"mine"
    for each in (number, reading, writing):
        os.close(each)


def test_a_daemon_that_has_gone_raises_no_sigpipe(place):
    with usual(signal.SIGPIPE), fake_daemon(place.socket, welcomes_and_goes):
        connection = Connection(place.socket, 5.0, "test")
        # The end of the daemon's side can be read.
        assert select.select([connection], [], [], 20)[0]
        with pytest.raises(HungUpError):
            connection.ask(protocol.AskStatus(), 5.0)
        connection.close()


def test_no_connection_passes_for_the_programs_stdin(place):
    saved = os.dup(0)
    try:
        with fake_daemon(place.socket, welcomes):
            os.close(0)
            connection = Connection(place.socket, 5.0, "test")
            assert connection.fileno() > 2
            connection.close()
    finally:
        os.dup2(saved, 0)
        os.close(saved)


def test_no_file_past_the_programs_limit_raises_sigxfsz(place):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with usual(signal.SIGXFSZ), fake_daemon(place.socket, welcomes):
        connection = Connection(place.socket, 5.0, "test")
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                hand_over(connection, [bytes(101)], 5.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            connection.close()


@pytest.mark.parametrize(("module", "name"), [("gevent.monkey", "saved"), ("eventlet.patcher", "already_patched")])
def test_where_threads_are_greenlets_the_cache_stays_off(place, monkeypatch, module, name):
    patcher = types.ModuleType(module)
    setattr(patcher, name, {})
    monkeypatch.setitem(sys.modules, module, patcher)
    cache.Cache(place.config(), "on", "test").close()
    setattr(patcher, name, {"threading": {}})
    with pytest.raises(UnsupportedError, match=module.partition(".")[0]):
        cache.Cache(place.config(), "on", "test")
