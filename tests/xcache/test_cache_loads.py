"""Entries that cannot be loaded, and executables that find no room."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable

import pytest
from support.caching import Asking, Gate, Loadable, compiled, raising, refuse, request, waiting
from support.foreseeing import loading
from support.places import Place, until

from xcache.cache import Cache
from xcache.prefetch import processors
from xcache.prefetch.prefetcher import Item
from xcache.request import LoadTarget, Request


def test_damage_is_set_aside_and_healed_at_once(place, caches):
    caches().get_or_compile(compiled, request)
    assert until(lambda: place.query("SELECT count(*) FROM entries") == [(1,)])
    ((blob,),) = place.query("SELECT blob FROM entries")
    place.execute("UPDATE blobs SET content = ? WHERE digest = ?", b"altered", blob)
    # The first program that finds it compiles for the others.
    gate = Gate()
    first = Asking(caches(), gate)
    assert gate.begun.wait(20)
    second = Asking(caches(), pytest.fail)
    assert until(lambda: waiting(place) == 1)
    gate.open.set()
    assert (first.end().kind, second.end().kind) == ("miss", "hit")
    assert first.cache.statistics().errors == {"damaged entry": 1}
    assert [reason for (reason,) in place.query("SELECT reason FROM quarantined")] == ["its digest differs"]


def unloadable(raw: bytes) -> Loadable:
    raise RuntimeError("INTERNAL: not an executable")


def stored(place, caches) -> str:
    """Have the program's entry stored; its digest."""
    caches().get_or_compile(compiled, request)
    assert until(lambda: place.query("SELECT count(*) FROM entries") == [(1,)])
    ((blob,),) = place.query("SELECT blob FROM entries")
    return str(blob)


def test_an_entry_that_cannot_be_loaded_is_replaced_in_the_same_run(place, caches):
    blob = stored(place, caches)
    cache = caches()

    def load(raw: bytes) -> Loadable:
        return unloadable(raw) if raw == b"executable" else Loadable(raw)

    made = lambda: Loadable(b"fresh" * 10)  # noqa: E731
    assert cache.get_or_compile(made, lambda: request(load=load)).kind == "miss"
    cache.close()
    assert cache.statistics().errors == {"load failed": 1}
    assert place.query("SELECT blob, reason FROM quarantined") == [
        (blob, "jit_a could not be loaded: INTERNAL: not an executable")
    ]
    assert place.query("SELECT blob = ? FROM entries", blob) == [(0,)]
    assert caches().get_or_compile(pytest.fail, lambda: request(load=load)).kind == "hit"


def test_a_program_that_cannot_be_compiled_either_says_nothing_about_the_entry(place, caches):
    """A dump option that is wrong, an FFI target that this program has not registered."""
    blob = stored(place, caches)
    cache = caches()
    with pytest.raises(ValueError, match="no such target"):
        cache.get_or_compile(raising(ValueError("no such target")), lambda: request(load=unloadable))
    cache.close()
    assert place.query("SELECT count(*) FROM quarantined") == [(0,)]
    assert place.query("SELECT blob FROM entries") == [(blob,)]
    assert caches().get_or_compile(pytest.fail, request).kind == "hit"


def test_a_read_only_program_complains_of_nothing(place, caches):
    blob = stored(place, caches)
    cache = caches("readonly")
    assert cache.get_or_compile(compiled, lambda: request(load=unloadable)).kind == "miss"
    place.execute("UPDATE blobs SET content = ? WHERE digest = ?", b"altered", blob)
    assert cache.get_or_compile(compiled, request).kind == "miss"
    cache.close()
    assert place.query("SELECT count(*) FROM quarantined") == [(0,)]
    assert place.query("SELECT blob FROM entries") == [(blob,)]


def test_an_entry_that_one_program_cannot_load_stays_where_its_own_cannot_be_stored(place, caches):
    """It leaves only when something that is kept takes its place."""
    blob = stored(place, caches)
    cache = caches()
    asked = request(load=unloadable, serialize=refuse, serialize_first=lambda: True)
    assert cache.get_or_compile(compiled, lambda: asked).kind == "miss"
    cache.close()
    assert place.query("SELECT blob FROM entries") == [(blob,)]
    assert caches().get_or_compile(pytest.fail, request).kind == "hit"


def test_programs_that_cannot_load_an_entry_compile_once_together(place, caches):
    stored(place, caches)

    def load(raw: bytes) -> Loadable:
        return unloadable(raw) if raw == b"executable" else Loadable(raw)

    gate = Gate(lambda: Loadable(b"fresh" * 10))
    first = Asking(caches(), gate, request(load=load))
    assert gate.begun.wait(20)
    second = Asking(caches(), pytest.fail, request(load=load))
    assert until(lambda: waiting(place) == 1)
    gate.open.set()
    assert (first.end().kind, second.end().kind) == ("miss", "hit")


def test_an_entry_that_finds_no_room_on_the_device_stays(place, caches):
    def fail(raw: bytes) -> Loadable:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    caches().get_or_compile(compiled, request)
    assert until(lambda: place.query("SELECT count(*) FROM entries") == [(1,)])
    assert caches().get_or_compile(compiled, lambda: request(load=fail)).kind == "miss"
    assert caches().get_or_compile(pytest.fail, request).kind == "hit"


def foreseen(
    place: Place, caches: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> tuple[Cache, Request, weakref.WeakSet[Loadable]]:
    """A cache that holds something it has loaded ahead, what would take that, and what it holds."""
    held: weakref.WeakSet[Loadable] = weakref.WeakSet()
    client, device = object(), types.SimpleNamespace(id=0)
    asked = request("ahead", target=LoadTarget(b"options", client, (device,)))

    class Loader:
        prepare = staticmethod(lambda items: None)
        must_not_load = staticmethod(lambda item: False)
        is_current = staticmethod(lambda client: True)

        def target(self, item: Item, is_over: object) -> LoadTarget:
            return asked.target

        def __call__(self, target: LoadTarget, raw: bytes) -> Loadable:
            made = Loadable(raw)
            held.add(made)
            return made

    monkeypatch.setattr(processors, "threads_to_spare", lambda: 1)
    monkeypatch.setattr(processors.Processors, "are_taken", lambda _: False)
    first = caches()
    assert first.get_or_compile(compiled, lambda: asked).kind == "miss"
    first.close()
    cache = caches(loader=Loader())
    cache.warm_up()
    assert until(lambda: held and not loading())
    return cache, asked, held


@pytest.mark.parametrize("kind", ["its own compile", "a load"])
def test_where_there_is_no_room_what_is_held_ahead_goes_and_it_is_tried_once_more(place, caches, monkeypatch, kind):
    cache, asked, held = foreseen(place, caches, monkeypatch)
    tries = []

    def work(raw: bytes = b"executable") -> Loadable:
        tries.append(len(held))
        if tries[-1]:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return Loadable(raw)

    if kind == "a load":
        assert caches().get_or_compile(compiled, lambda: request("b")).kind == "miss"
        outcome = cache.get_or_compile(compiled, lambda: request("b", load=work))
    else:
        outcome = cache.get_or_compile(work, lambda: request("b"))
    assert outcome.executable.raw == b"executable"
    assert outcome.kind == ("hit" if kind == "a load" else "miss")
    assert tries == [1, 0]
    assert cache.get_or_compile(compiled, lambda: asked).kind == "hit"
    assert cache.statistics().prefetched == 0


def test_where_there_is_no_room_and_nothing_is_held_the_programs_own_exception_comes_up(caches):
    tries = []

    def exhausted() -> Loadable:
        tries.append(1)
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        caches().get_or_compile(exhausted, request)
    assert (caught.value.__context__, len(tries)) == (None, 1)
