"""A program with a prefetcher, whose predictions and loads a test controls."""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Sequence

from xcache.client.contents import SealedEntry
from xcache.prefetch.prefetcher import Begin, Item, LoadedAhead, Prefetcher
from xcache.request import LoadTarget

CLIENT = types.SimpleNamespace(name="client")
DEVICES = (types.SimpleNamespace(id=0),)
TARGET = LoadTarget(b"options", CLIENT, DEVICES)


def item(key: str, entry: SealedEntry | None = None) -> Item:
    # An upper-case key takes long to load, and a digit some time.
    seconds = 10.0 if key.isupper() else 0.1 if key.isdigit() else 0.005
    return Item(key, TARGET.options, TARGET.device_ids, "cpu", seconds, ("f", "p", "t"), entry)


PROGRAMS: list[Program] = []


class _Kept(str):
    """A text that can be seen to be dropped: it stands for an executable, or for an entry."""


class Program:
    """Gives a prefetcher its predictions, and notes what it did."""

    def __init__(self, run: str, *, memory: int = 100) -> None:
        # A string of one-letter keys.
        self.run = run
        self.asked = 0
        self.fetches: list[str] = []
        self.loads: list[str] = []
        self.dropped = 0
        # The executables, and the entries that came with the prediction, that somebody keeps.
        self.kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self.entries = False
        self.clients = [CLIENT]
        self.patience = 20.0
        # Waits for a backend, and for XLA.
        self.may_begin, self.may_go_on = threading.Event(), threading.Event()
        self.may_begin.set()
        self.may_go_on.set()
        # The keys of what was loaded in vain; not the executables, which nobody else may keep.
        self.unused: list[str] = []
        self.prefetcher = Prefetcher(self, memory, self._drop, lambda key, _: self.unused.append(key))
        PROGRAMS.append(self)

    def predict(self) -> Sequence[Item]:
        self.asked += 1
        entries = [
            SealedEntry(self._new(f"entry {key}"), 1.0, key.encode()) if self.entries else None for key in self.run
        ]
        return list(map(item, self.run, entries))

    def load(self, wanted: Item, begin: Begin, is_over: Callable[[], bool]) -> LoadedAhead | None:
        self.fetches.append(wanted.key)
        while not (self.may_begin.wait(0.01) or is_over()):
            pass
        if not begin(LoadTarget(wanted.options, self.clients[-1], DEVICES), self.patience):
            return None
        self.loads.append(wanted.key)
        assert self.may_go_on.wait(20)
        if wanted.key == "*":
            raise MemoryError
        return None if wanted.key == "!" else LoadedAhead(self._new(f"executable {wanted.key}"), None, 0.0, 0.1, 1)

    def is_current(self, client: object) -> bool:
        return any(client is each for each in self.clients)

    def end_loading(self) -> None:
        """Do nothing."""

    def _new(self, text: str) -> _Kept:
        made = _Kept(text)
        self.kept.add(made)
        return made

    def _drop(self, count: int) -> None:
        self.dropped += count

    def take(self, key: str, target: LoadTarget = TARGET) -> object:
        found = self.prefetcher.take(key, target)
        return found.executable if isinstance(found, LoadedAhead) else found and found.digest

    def is_done(self, *keys: str) -> bool:
        """Return whether these are loaded and held."""
        return set(self.kept) >= {f"executable {key}" for key in keys}

    def is_over(self) -> bool:
        """Return whether no thread loads, and nothing is kept."""
        return not self.kept and not loading()


def loading() -> list[threading.Thread]:
    """Return the threads that load ahead."""
    return [thread for thread in threading.enumerate() if thread.name == "xcache-prefetch"]


class SlowlyTold(Program):
    """A program whose prediction comes when the test allows it."""

    def __init__(self, run: str) -> None:
        self.is_asked, self.may_be_told = threading.Event(), threading.Event()
        super().__init__(run)

    def predict(self) -> Sequence[Item]:
        self.is_asked.set()
        assert self.may_be_told.wait(20)
        return super().predict()
