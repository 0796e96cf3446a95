"""What says nothing about an entry does not set it aside: a program that is poor, or that ends while it loads."""

from __future__ import annotations

import os
from pathlib import Path

from conversation import talking
from places import digest, until
from test_cache import caches, compiled, request  # noqa: F401

from xcache import payload, protocol

TESTS = Path(__file__).parent.parent
PATHS = [str(TESTS / "client"), str(TESTS / "daemon"), str(TESTS)]

PROGRAM = """
import os, sys, resource
sys.path[:0] = {paths!r}
from test_cache import request, compiled
from xcache.cache import Cache
from xcache import config
cache = Cache(config.load(), "on", "test")
cache.get_or_compile(compiled, lambda: request("other"))   # a connection is there
cache._queue.finish(5)
{before}
out = cache.get_or_compile(compiled, request)
{after}
print(out.kind, cache.statistics())
"""


def test_a_program_without_free_descriptors_does_not_set_a_healthy_entry_aside(place):
    place.start_daemon()
    with talking(place) as talk:
        assert talk.put(digest(b"a"), payload.seal(digest(b"a"), os.urandom(200_000))) == protocol.Stored(True)
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
        assert talk.put(digest(b"a"), payload.seal(digest(b"a"), bytes(600_000_000))) == protocol.Stored(True)
    before = """
size = int(open('/proc/self/statm').read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (size + 200_000_000, -1))
"""
    done = place.run(PROGRAM.format(paths=PATHS, before=before, after=""))
    assert done.returncode == 0, done.stderr
    assert place.query("SELECT reason FROM quarantined") == []


def test_who_finds_no_room_to_load_does_not_complain(place, caches):  # noqa: F811
    def load(raw):
        raise MemoryError

    caches().get_or_compile(compiled, request)
    assert until(lambda: place.query("SELECT count(*) FROM entries") == [(1,)])
    cache = caches()
    assert cache.get_or_compile(compiled, lambda: request(load=load)).kind == "miss"
    assert cache.statistics().errors == {"load failed": 1}
    assert place.query("SELECT count(*) FROM quarantined") == [(0,)]


def test_a_program_that_ends_in_good_order_while_a_thread_loads_is_no_strike(place):
    place.start_daemon()
    with talking(place) as talk:
        talk.put(digest(b"a"), payload.seal(digest(b"a"), b"executable" * 10))
    source = f"""
import sys, time, threading
sys.path[:0] = {PATHS!r}
from test_cache import request, compiled
from xcache.cache import Cache
from xcache import config
cache = Cache(config.load(), "on", "test")
begun = threading.Event()
def load(raw):
    begun.set()
    time.sleep(30)
threading.Thread(target=lambda: cache.get_or_compile(compiled, lambda: request(load=load)), daemon=True).start()
assert begun.wait(10)
"""
    for _ in range(2):
        done = place.run(source)
        assert done.returncode == 0, done.stderr
    with talking(place) as talk:
        # Both have left, and what that means has been written.
        assert until(lambda: talk.status()["connections"] == 1)
    assert (place.query("SELECT count FROM strikes"), place.query("SELECT reason FROM quarantined")) == ([], [])
