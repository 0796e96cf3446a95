"""A reader's own trouble (no memory, an end while loading) quarantines no entry."""

from __future__ import annotations

import os
import signal
import socket

import pytest
from support.caching import compiled, request
from support.conversation import talking
from support.places import TESTS, digest, until

from xcache.wire import envelope, protocol

PATHS = [str(TESTS)]

PROGRAM = """
import os, sys, resource
sys.path[:0] = {paths!r}
from support.caching import request, compiled
from support.places import until
from xcache.cache import Cache
from xcache.config import config
cache = Cache(config.load(), "on", "test")
cache.get_or_compile(compiled, lambda: request("other"))   # a connection is there
assert until(lambda: cache.statistics().stores == 1)
{before}
out = cache.get_or_compile(compiled, request)
{after}
print(out.kind, cache.statistics())
"""


def test_a_program_without_free_descriptors_does_not_set_a_healthy_entry_aside(place):
    place.start_daemon()
    with talking(place) as talk:
        assert talk.put(digest(b"a"), envelope.seal(digest(b"a"), os.urandom(200_000))) == protocol.Stored(True)
    before = """
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    os.close(held.pop())
"""
    done = place.run(PROGRAM.format(paths=PATHS, before=before, after="[os.close(h) for h in held]"))
    assert done.returncode == 0, done.stderr
    assert place.query("SELECT reason FROM quarantined") == []


def test_a_program_without_memory_does_not_set_a_healthy_entry_aside(place):
    place.start_daemon()
    with talking(place) as talk:
        assert talk.put(digest(b"a"), envelope.seal(digest(b"a"), bytes(600_000_000))) == protocol.Stored(True)
    before = """
size = int(open('/proc/self/statm').read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (size + 200_000_000, -1))
"""
    done = place.run(PROGRAM.format(paths=PATHS, before=before, after=""))
    assert done.returncode == 0, done.stderr
    assert place.query("SELECT reason FROM quarantined") == []


def test_a_program_without_memory_to_load_does_not_complain(place, caches):
    def load(raw):
        raise MemoryError

    caches().get_or_compile(compiled, request)
    assert until(lambda: place.query("SELECT count(*) FROM entries") == [(1,)])
    cache = caches()
    assert cache.get_or_compile(compiled, lambda: request(load=load)).kind == "miss"
    assert cache.statistics().errors == {"load failed": 1}
    assert place.query("SELECT count(*) FROM quarantined") == [(0,)]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.execv(sys.executable, [sys.executable, '-c', ''])", 0),
    ],
    ids=["exit", "_exit", "SIGTERM", "exec"],
)
def test_a_program_that_ends_in_whichever_way_while_a_thread_loads_is_no_strike(place, end, code):
    place.start_daemon()
    with talking(place) as talk:
        talk.put(digest(b"a"), envelope.seal(digest(b"a"), b"executable" * 10))
    source = f"""
import os, signal, sys, time, threading
sys.path[:0] = {PATHS!r}
from support.caching import request, compiled
from xcache.cache import Cache
from xcache.config import config
cache = Cache(config.load(), "on", "test")
begun = threading.Event()
def load(raw):
    begun.set()
    time.sleep(30)
threading.Thread(target=lambda: cache.get_or_compile(compiled, lambda: request(load=load)), daemon=True).start()
assert begun.wait(10)
{end}
"""
    for _ in range(2):
        done = place.run(source)
        assert done.returncode == code, done.stderr
    with talking(place) as talk:
        # Both have left, and what that means has been written.
        assert until(lambda: talk.status()["connections"] == 1)
    assert (place.query("SELECT count FROM strikes"), place.query("SELECT reason FROM quarantined")) == ([], [])


@pytest.mark.parametrize("kind", [RuntimeError, BaseException])
def test_a_library_that_guards_sockets_meets_no_exception_on_a_thread(place, caches, monkeypatch, kind):
    """pytest-socket raises a RuntimeError for every new socket, and pytest.fail() no Exception at all."""

    class BlockedError(kind):
        """A test tried to use a socket."""

    def guarded(*arguments, **named):
        raise BlockedError

    cache = caches()
    monkeypatch.setattr(socket, "socket", guarded)
    cache.warm_up()
    assert cache.get_or_compile(compiled, request).kind == "miss"
    # pytest would take an exception on the thread that stores and reports for a failure.
    cache.close()
    assert cache.statistics().stores == 0


@pytest.mark.parametrize(("error", "warnings"), [(RecursionError, 0), (ValueError, 1)])
def test_a_program_near_its_recursion_limit_is_not_warned(caches, caplog, error, warnings):
    cache = caches()

    def fail():
        raise error

    assert cache.get_or_compile(compiled, fail).kind == "uncacheable"
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == warnings
