"""Look up, else compile and store: one compile for all who ask, whatever becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from support.caching import Asking, Gate, Loadable, compiled, fail_once, raising, refuse, request, waiting
from support.dying import die_while_loading
from support.peers import Talk, fake_daemon
from support.places import digest, until
from support.program_files import program_text

from xcache.cache import Cache
from xcache.wire import protocol
from xcache.wire.protocol import InstalledFile


def test_a_toolchain_is_announced_until_the_daemon_has_heard_of_it(place):
    answers = [protocol.Done(), protocol.Refused("store error", "not now")]

    def behave(talk: Talk) -> None:
        talk.welcome()
        while True:
            asked = talk.read()
            if isinstance(asked, protocol.Announce):
                talk.say(answers.pop())
            elif isinstance(asked, protocol.Get):
                talk.say(protocol.Missing(0))
            else:
                talk.say(protocol.Stored(True) if isinstance(asked, protocol.Put) else protocol.Done())

    library = InstalledFile("/usr/lib/library.so", 1, 2, 3, digest(b"library"))
    with fake_daemon(place.socket, behave) as daemon:
        cache = Cache(place.config(), "on", "test")
        for name in "abc":
            assert cache.get_or_compile(compiled, lambda name=name: request(name, toolchain_files=lambda: [library]))
        cache.close()
    assert [type(asked) for asked in daemon.heard].count(protocol.Announce) == 2


def test_after_a_failure_the_background_announces_and_stores_once_the_daemon_may_be_asked_again(place, caches):
    cache = caches(timeout=1.0)
    fail_once(place, cache.client)
    library = InstalledFile("/usr/lib/library.so", 1, 2, 3, digest(b"library"))
    asked = request(toolchain_files=lambda: [library])
    assert cache.get_or_compile(compiled, lambda: asked).kind == "miss"
    assert until(lambda: place.query("SELECT count(*) FROM entries") == [(1,)])
    assert place.query("SELECT count(*) FROM toolchains") == [(1,)]


def test_one_compiles_and_the_others_wait_for_it(place, caches):
    gate = Gate()
    first = Asking(caches(), gate)
    assert gate.begun.wait(20)
    others = [Asking(caches(), pytest.fail) for _ in range(3)]
    assert until(lambda: waiting(place) == 3)
    gate.open.set()
    assert first.end().kind == "miss"
    assert [other.end().kind for other in others] == ["hit"] * 3
    assert others[0].outcome.executable.raw == b"executable"
    assert others[0].cache.statistics().wait_seconds > 0


def test_threads_of_one_process_too(place, caches):
    cache, gate = caches(), Gate()
    first = Asking(cache, gate)
    assert gate.begun.wait(20)
    others = [Asking(cache, pytest.fail) for _ in range(3)]
    assert until(lambda: waiting(place) == 3)
    gate.open.set()
    assert [each.end().kind for each in (first, *others)] == ["miss"] + ["hit"] * 3


@pytest.mark.parametrize("error", [ValueError("no such instruction"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_is_the_holders_alone_and_the_next_one_tries(place, caches, error):
    gate = Gate(raising(error))
    first = Asking(caches(), gate)
    assert gate.begun.wait(20)
    second = Asking(caches())
    assert until(lambda: waiting(place) == 1)
    gate.open.set()
    with pytest.raises(type(error)) as caught:
        first.end()
    # Nothing of the cache's hangs on it.
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None
    assert second.end().kind == "miss"


def test_each_program_compiles_an_executable_that_cannot_be_serialized(place, caches):
    gate = Gate()
    first = Asking(caches(), gate, request(serialize=refuse))
    assert gate.begun.wait(20)
    second = Asking(caches(), compiled, request(serialize=refuse))
    assert until(lambda: waiting(place) == 1)
    gate.open.set()
    # The first program may have run it before it could be serialized, so the second makes sure.
    assert first.end().kind == second.end().kind == "miss"
    assert until(lambda: Asking(caches(), compiled, request(serialize=refuse)).end().kind == "uncacheable")
    assert second.cache.statistics().uncacheable == {"not serializable": 1}
    assert place.query("SELECT reason FROM not_cacheable") == [("not serializable",)]


def test_the_next_program_serializes_first_where_the_last_was_too_late(place, caches):
    """XLA:CPU changes some executables when they run, and who knows which."""
    has_run = threading.Event()

    def serialize(executable: Loadable) -> bytes:
        if has_run.is_set():
            raise RuntimeError("UNIMPLEMENTED: `LessThan` is not serializable.")
        return executable.raw

    cache = caches()
    has_run.set()
    assert cache.get_or_compile(compiled, lambda: request(serialize=serialize)).kind == "miss"
    assert until(lambda: place.query("SELECT reason FROM not_cacheable") == [(protocol.SERIALIZE_FIRST,)])
    has_run.clear()
    cache = caches()
    assert cache.get_or_compile(compiled, lambda: request(serialize=serialize)).kind == "miss"
    has_run.set()
    cache.close()
    assert cache.statistics().uncacheable == {}
    assert caches().get_or_compile(pytest.fail, request).kind == "hit"
    assert place.query("SELECT reason FROM not_cacheable") == []


def test_other_trouble_in_serializing_first_leaves_no_mark(place, caches):
    """Another try behind the program's back would come too late, and say so."""

    def serialize(executable: Loadable) -> bytes:
        raise MemoryError

    cache = caches()
    assert cache.get_or_compile(compiled, lambda: request(serialize=serialize, serialize_first=lambda: True))
    cache.close()
    assert cache.statistics().errors == {"MemoryError": 1}
    assert place.query("SELECT reason FROM not_cacheable") == []


def test_an_entry_that_was_set_aside_is_compiled_without_a_warning(place, caches, caplog):
    """The compiler makes the same bytes again; the daemon has warned when the programs crashed."""
    first = caches()
    first.get_or_compile(compiled, request)
    first.close()
    for _ in range(2):
        die_while_loading(place, key=request().key.digest)
    cache = caches()
    assert cache.get_or_compile(compiled, request).kind == "miss"
    cache.close()
    statistics = cache.statistics()
    assert (statistics.misses, statistics.uncacheable, statistics.errors) == (0, {"set aside": 1}, {})
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_failure_to_serialize_lets_the_next_one_try(place, caches, caplog):
    def fail(executable: Loadable) -> bytes:
        raise RuntimeError("out of something")

    gate = Gate()
    first = Asking(caches(), gate, request(serialize=fail))
    assert gate.begun.wait(20)
    second = Asking(caches())
    assert until(lambda: waiting(place) == 1)
    gate.open.set()
    assert first.end().kind == second.end().kind == "miss"
    assert first.cache.statistics().errors == {"RuntimeError": 1}
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "out of something (RuntimeError); compiling without the cache"
    ]


def test_a_cache_that_is_closed_lets_the_next_one_try(place, caches):
    """A process may end while one of its threads compiles."""
    leaving, gate = caches(), Gate()
    first = Asking(leaving, gate)
    assert gate.begun.wait(20)
    second = Asking(caches())
    assert until(lambda: waiting(place) == 1)
    leaving.close()
    assert second.end().kind == "miss"
    gate.open.set()
    assert first.end().kind == "miss"


def test_within_a_job_nobody_waits_and_everybody_stores(place, caches):
    gate = Gate()
    first = Asking(caches(), gate, request(may_wait=False))
    assert gate.begun.wait(20)
    assert Asking(caches(), compiled, request(may_wait=False)).end().kind == "miss"
    gate.open.set()
    assert first.end().kind == "miss"
    assert until(lambda: Asking(caches(), compiled, request(may_wait=False)).end().kind == "hit")


def test_a_read_only_program_waits_for_nobody_and_holds_up_nobody(place, caches):
    gate = Gate()
    reading = Asking(caches("readonly"), gate)
    assert gate.begun.wait(20)
    writing = Gate()
    second = Asking(caches(), writing)
    assert writing.begun.wait(20)
    assert Asking(caches("readonly")).end().kind == "miss"
    gate.open.set()
    writing.open.set()
    assert reading.end().kind == second.end().kind == "miss"


def test_the_wait_has_its_own_bound(place, caches):
    gate = Gate()
    first = Asking(caches(), gate)
    assert gate.begun.wait(20)
    cache = caches(max_wait=0.5)
    assert Asking(cache).end().kind == "miss"
    gate.open.set()
    first.end()


def test_a_daemon_that_is_killed_while_one_waits(place, caches):
    gate = Gate()
    first = Asking(caches(), gate)
    assert gate.begun.wait(20)
    second = Asking(caches())
    assert until(lambda: waiting(place) == 1)
    os.kill(place.daemon_pid(), signal.SIGKILL)
    assert second.end().kind == "miss"
    gate.open.set()
    assert first.end().kind == "miss"


def test_a_daemon_that_is_stopped_while_one_waits_costs_a_timeout(place, caches):
    gate = Gate()
    first = Asking(caches(timeout=1), gate)
    assert gate.begun.wait(20)
    waits = caches(timeout=1)
    second = Asking(waits)
    assert until(lambda: waiting(place) == 1)
    pid = place.daemon_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        assert second.end().kind == "miss"
        assert 0 < waits.statistics().lost_seconds < 10
        gate.open.set()
        assert first.end().kind == "miss"
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_child_that_outlives_its_parent_does_not_hold_on_to_its_lease(place, caches):
    """The parent is killed in the middle of a compile; its child has no part in its connections."""
    child = subprocess.Popen(
        [sys.executable, "-c", program_text("fork_while_holding_a_lease")],
        env=place.with_support,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert child.stdout.readline() == b"holding\n"
        assert Asking(caches()).end().kind == "miss"
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def test_a_compile_within_its_own_compile_does_not_wait_for_itself(place, caches):
    cache = caches(max_wait=8.0)

    def outer():
        cache.get_or_compile(compiled, request)
        return compiled()

    cache.get_or_compile(outer, request)
    assert cache.statistics().wait_seconds == 0
