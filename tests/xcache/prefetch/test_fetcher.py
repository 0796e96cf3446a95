"""The work of the threads that load ahead: in an order in which the program never waits for the daemon's answer."""

from __future__ import annotations

import pytest

from xcache.client.contents import SealedEntry
from xcache.prefetch.fetcher import Fetcher
from xcache.prefetch.prefetcher import Item
from xcache.request import LoadTarget
from xcache.wire import envelope
from xcache.wire.hashing import digest

KEY = "ab" * 32
SEALED = envelope.seal(KEY, b"executable")
TARGET = LoadTarget(b"options", object(), ())


class Recorder:
    """A client and a loader that note what is asked of them, in order."""

    def __init__(self, *, compile_seconds: float = 30.0, can_tell: bool = True) -> None:
        self.calls: list[str] = []
        self.entry = SealedEntry(digest(SEALED), compile_seconds, SEALED)
        self.can_tell = can_tell
        self.patience = 0.0
        self.fetcher = Fetcher(self, None, _Loads(self), lambda error: self.calls.append(str(error)))

    def fetch(self, key: str) -> SealedEntry:
        self.calls.append("fetch")
        return self.entry

    def begin_loading(self, key: str, name: str) -> bool:
        self.calls.append("tell")
        return self.can_tell

    def end_loading(self) -> None:
        self.calls.append("end")

    def target(self, item: Item, is_over: object) -> LoadTarget:
        self.calls.append("wait for a backend")
        return TARGET

    def loaded(self, target: LoadTarget, raw: bytes) -> str:
        self.calls.append("load")
        return "executable"

    def begin(self, target: LoadTarget, patience: float) -> bool:
        self.calls.append("begin")
        self.patience = patience
        return True

    def run(self, begin: object = None) -> object:
        item = Item(KEY, b"options", (), "cpu", 0.1, ("f", "p", "t"))
        return self.fetcher.load(item, begin or self.begin, lambda: False)


class _Loads:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def must_not_load(self, item: Item) -> bool:
        return False

    def target(self, item: Item, is_over: object) -> LoadTarget:
        return self._recorder.target(item, is_over)

    def __call__(self, target: LoadTarget, raw: bytes) -> object:
        return self._recorder.loaded(target, raw)


def test_from_when_the_program_may_wait_nothing_is_asked_of_the_daemon():
    recorder = Recorder()
    assert recorder.run().executable == "executable"
    assert recorder.calls == ["end", "fetch", "wait for a backend", "tell", "begin", "load"]


def test_an_executable_that_the_program_has_taken_over_is_not_loaded_nor_said_to_be():
    recorder = Recorder()
    assert recorder.run(lambda target, patience: False) is None
    assert recorder.calls == ["end", "fetch", "wait for a backend", "tell", "end"]


def test_nothing_is_loaded_ahead_of_which_the_daemon_could_not_be_told():
    recorder = Recorder(can_tell=False)
    assert recorder.run() is None
    assert recorder.calls == ["end", "fetch", "wait for a backend", "tell"]


@pytest.mark.parametrize(("compiled", "patience"), [(0.01, 1.0), (30.0, 30.0), (9e15, 600.0)])
def test_the_program_waits_as_long_as_compiling_took_whatever_a_writer_says(compiled, patience):
    recorder = Recorder(compile_seconds=compiled)
    recorder.run()
    assert recorder.patience == patience


def test_no_room_is_the_one_thing_that_is_raised(monkeypatch):
    recorder = Recorder()

    def fail(target: LoadTarget, raw: bytes) -> object:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(recorder, "loaded", fail)
    with pytest.raises(MemoryError):
        recorder.run()
