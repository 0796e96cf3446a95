"""Look up, else compile and store: one compile for all who ask, whatever becomes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from peers import Talk, fake_daemon
from places import Place, digest, until

from xcache import protocol
from xcache.cache import Cache
from xcache.keys import Key
from xcache.keys.toolchain import InstalledFile
from xcache.request import Outcome, Request

COMPONENTS = {name: digest(name.encode()) for name in ("program", "options", "flags", "platform", "toolchain")}


class Loadable:
    """Stands for an executable of jaxlib's."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw


def request(name: str = "a", **changes: object) -> Request:
    made = {
        "key": Key(digest(name.encode()), COMPONENTS),
        "module_name": f"jit_{name}",
        "platform": "cpu",
        "device_kind": "cpu",
        "jaxlib_version": "0.0",
        "program": b"program",
        "details": dict,
        "load": Loadable,
        "serialize": lambda executable: executable.raw,
    }
    return Request(**(made | changes))


def compiled() -> Loadable:
    return Loadable(b"executable")


@pytest.fixture
def caches(place):
    """Makes caches, each as in a process of its own; all are closed with the test."""
    place.start_daemon()
    made: list[Cache] = []

    def cache(mode: str = "on", **settings: object) -> Cache:
        made.append(Cache(place.config(**settings), mode, "test"))
        return made[-1]

    yield cache
    for each in made:
        each.close()


class Asking(threading.Thread):
    """Asks on a thread of its own."""

    def __init__(self, cache: Cache, compile_now: Callable[[], Loadable] = compiled, asked: Request | None = None):
        super().__init__()
        self._cache, self._compile, self._asked = cache, compile_now, asked or request()
        self.outcome: Outcome | None = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._cache.get_or_compile(self._compile, lambda: self._asked)
        except BaseException as error:  # noqa: BLE001 - raised again by who asks
            self.error = error

    def end(self) -> Outcome:
        self.join(20)
        assert not self.is_alive()
        if self.error:
            raise self.error
        return self.outcome


class Gate:
    """A compile that lasts until it is told to end."""

    def __init__(self, ending: Callable[[], Loadable] = compiled) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()
        self._ending = ending

    def __call__(self) -> Loadable:
        self.begun.set()
        assert self.open.wait(20)
        return self._ending()


def waiting(place: Place) -> int:
    """How many wait, by the daemon's word."""
    status = place.run("import sys; from xcache.cli import main; sys.argv[1:] = ['status', '--json']; main()")
    return sum(each["waiting"] for each in json.loads(status.stdout)["compiles"])


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
    assert others[0]._cache.statistics().wait_seconds > 0


def test_threads_of_one_process_too(place, caches):
    cache, gate = caches(), Gate()
    first = Asking(cache, gate)
    assert gate.begun.wait(20)
    others = [Asking(cache, pytest.fail) for _ in range(3)]
    assert until(lambda: waiting(place) == 3)
    gate.open.set()
    assert [each.end().kind for each in (first, *others)] == ["miss"] + ["hit"] * 3


def raising(error: BaseException) -> Callable[[], Loadable]:
    def fail() -> Loadable:
        raise error

    return fail


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


def test_what_cannot_be_serialized_is_compiled_by_each(place, caches):
    def refuse(executable: Loadable) -> bytes:
        raise RuntimeError("UNIMPLEMENTED: not this one")

    gate = Gate()
    first = Asking(caches(), gate, request(serialize=refuse))
    assert gate.begun.wait(20)
    second = Asking(caches(), compiled, request(serialize=refuse))
    assert until(lambda: waiting(place) == 1)
    gate.open.set()
    assert first.end().kind == "miss"
    assert second.end().kind == "uncacheable"


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
    assert first._cache.statistics().errors == {"RuntimeError": 1}
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "out of something (RuntimeError); compiling without the cache"
    ]


def test_a_cache_that_is_closed_lets_the_next_one_try(place, caches):
    """As at the end of a process whose thread was compiling."""
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


def test_who_reads_only_waits_for_nobody_and_holds_up_nobody(place, caches):
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
    second = Asking(caches(timeout=1))
    assert until(lambda: waiting(place) == 1)
    pid = place.daemon_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        start = time.monotonic()
        assert second.end().kind == "miss"
        assert time.monotonic() - start < 10
        gate.open.set()
        assert first.end().kind == "miss"
    finally:
        os.kill(pid, signal.SIGCONT)


def test_damage_is_set_aside_and_healed_at_once(place, caches):
    caches().get_or_compile(compiled, request)
    assert until(lambda: place.query("SELECT count(*) FROM entries") == [(1,)])
    ((blob,),) = place.query("SELECT blob FROM entries")
    place.execute("UPDATE blobs SET content = ? WHERE digest = ?", b"altered", blob)
    # Whoever finds it compiles for the others who do.
    gate = Gate()
    first = Asking(caches(), gate)
    assert gate.begun.wait(20)
    second = Asking(caches(), pytest.fail)
    assert until(lambda: waiting(place) == 1)
    gate.open.set()
    assert (first.end().kind, second.end().kind) == ("miss", "hit")
    assert first._cache.statistics().errors == {"damaged entry": 1}
    assert [reason for (reason,) in place.query("SELECT reason FROM quarantined")] == ["its digest differs"]


def test_what_cannot_be_loaded_is_set_aside(place, caches):
    def fail(raw: bytes) -> Loadable:
        raise RuntimeError("INTERNAL: not an executable")

    caches().get_or_compile(compiled, request)
    assert until(lambda: place.query("SELECT count(*) FROM entries") == [(1,)])
    cache = caches()
    assert cache.get_or_compile(compiled, lambda: request(load=fail)).kind == "miss"
    assert cache.statistics().errors == {"load failed": 1}
    assert place.query("SELECT reason FROM quarantined") == [
        ("jit_a could not be loaded: INTERNAL: not an executable",)
    ]


def test_what_finds_no_room_on_the_device_stays(place, caches):
    def fail(raw: bytes) -> Loadable:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    caches().get_or_compile(compiled, request)
    assert until(lambda: place.query("SELECT count(*) FROM entries") == [(1,)])
    assert caches().get_or_compile(compiled, lambda: request(load=fail)).kind == "miss"
    assert caches().get_or_compile(pytest.fail, request).kind == "hit"


FORKED = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from test_cache import Asking, Gate, compiled, request
from xcache import config
from xcache.cache import Cache
cache = Cache(config.load(), "on", "test")
gate = Gate()
holder = Asking(cache, gate)
assert gate.begun.wait(20)
print("holding", flush=True)
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
os.kill(os.getpid(), 9)
"""


def test_a_child_that_outlives_its_parent_does_not_hold_on_to_its_lease(place, caches):
    """The parent is killed in the middle of a compile; its child has no part in its connections."""
    child = subprocess.Popen(
        [sys.executable, "-c", FORKED, str(Path(__file__).parent)],
        env=place.env | {"PYTHONPATH": place.env["PYTHONPATH"] + ":" + str(Path(__file__).parent.parent)},
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
    took = []

    def outer():
        start = time.monotonic()
        cache.get_or_compile(compiled, request)
        took.append(time.monotonic() - start)
        return compiled()

    cache.get_or_compile(outer, request)
    assert took[0] < 3, took
