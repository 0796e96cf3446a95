"""A program whose loading ahead tests look at: what it is told, and what it does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from xcache import prefetch
from xcache.entries import Entry
from xcache.prefetch import Foreseen, Item, Loaded, Prefetcher

OPTIONS, DEVICES = b"options", (0,)


def item(key: str, entry: Entry | None = None) -> Item:
    # What has a capital letter takes its time, and what has a digit some.
    seconds = 10.0 if key.isupper() else 0.1 if key.isdigit() else 0.005
    return Item(key, OPTIONS, DEVICES, "cpu", seconds, ("f", "p", "t"), entry)


PROGRAMS: list[Program] = []


class Program:
    """What a prefetcher is told, and what it did."""

    def __init__(self, *runs: str, memory: int = 100) -> None:
        # Each run is a string of one-letter keys.
        self.runs = runs
        self.questions: list[str | None] = []
        self.loads: list[str] = []
        self.soon: list[str] = []
        self.dropped = 0
        self.entries = False
        self.beginning = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.prefetcher = Prefetcher(self, memory, self._drop)
        PROGRAMS.append(self)

    def predict(self, key: str | None) -> Foreseen:
        self.questions.append(key)
        found = self.runs[0] if key is None else next((run.split(key)[1] for run in self.runs if key in run), "")
        entries = [Entry(f"entry {key}", 1.0, key.encode(), b"") if self.entries else None for key in found]
        return Foreseen(list(map(item, found, entries)), self.beginning)

    def load(self, wanted: Item, soon: Sequence[Item], is_over: Callable[[], bool]) -> Loaded | None:
        self.loads.append(wanted.key)
        self.soon.append("".join(other.key for other in soon))
        assert self.may_go_on.wait(20)
        return None if wanted.key == "!" else Loaded(f"executable {wanted.key}", None, 0.1, 1)

    def pause(self) -> None:
        """Nobody is told."""

    def _drop(self, count: int) -> None:
        self.dropped += count

    def take(self, key: str, options: bytes = OPTIONS, devices: tuple[int, ...] = DEVICES) -> object:
        loaded = self.prefetcher.take(key, options, devices)
        return None if loaded is None else loaded.executable


class SlowlyTold(Program):
    """One whose predictions come when it may be told."""

    def __init__(self, *runs: str) -> None:
        self.asked, self.may_be_told = threading.Event(), threading.Event()
        super().__init__(*runs)

    def predict(self, key: str | None) -> Foreseen:
        self.asked.set()
        assert self.may_be_told.wait(20)
        return super().predict(key)


@pytest.fixture(autouse=True)
def two_processors(monkeypatch):
    monkeypatch.setattr(prefetch, "_threads_to_spare", lambda: 1)
    yield
    # Whose threads would be met by the next test.
    while PROGRAMS:
        program = PROGRAMS.pop()
        program.may_go_on.set()
        assert program.prefetcher.finish(20)
