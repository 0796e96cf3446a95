"""Loading what a program will want before it asks: on threads of their own, while it is still tracing.

What will be wanted is what was wanted last time. The daemon remembers it; the program may differ at any point, takes
over what has not been begun, and says so when it turns out to want something else.
"""

import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from xcache import protocol
from xcache.clock import monotonic

logger = logging.getLogger("xcache")

# How long loading may take in all before the program has shown that it is the one which was foreseen.
_ON_TRUST_SECONDS = 1.0
# What is loaded and not wanted for so long was not wanted at all.
_KEEP_SECONDS = 60.0
# A program that wants something else as often as this is another program than it was.
_MOST_SURPRISES = 2
_MOST_PREDICTIONS = 8
_MOST_THREADS = 3
# Seconds to load. Among so many that come next, one that is dear goes before those that are cheap.
_CHEAP, _DEAR, _SOON = 0.01, 0.1, 8


class Item(NamedTuple):
    """Something that will be wanted, and how it was loaded last time."""

    key: str
    options: bytes
    devices: tuple[int, ...]
    platform: str
    seconds: float
    around: tuple[str, str, str]
    """Digests of the flags, platform and toolchain it was made with: nothing else is to be loaded by this process."""
    entry: Any = None
    """What is stored, where that came with the prediction."""

    @property
    def is_cheap(self) -> bool:
        """Whether it is here, and quickly loaded."""
        return self.entry is not None and self.seconds < _CHEAP


class Foreseen(NamedTuple):
    """What will be wanted, and how many other programs are just beginning, and want processors for that as well."""

    items: Sequence[Item] = ()
    beginning: int = 0


class Loaded(NamedTuple):
    """An executable that was loaded ahead, what the entry said of it, and how large it is."""

    executable: Any
    entry: Any
    load_seconds: float
    size: int


class Work(Protocol):
    """What is done on the threads. None of it may raise."""

    def predict(self, key: str | None) -> Foreseen:
        """What will be wanted, by the key that came as a surprise, at first None."""

    def load(self, item: Item, soon: Sequence[Item], is_over: Callable[[], bool]) -> Loaded | None:
        """Load something; ``soon`` is what the same thread will probably load next."""

    def pause(self) -> None:
        """Called on each thread that has loaded something, before it rests, asks or ends."""


class _Place:
    """Where an item stands."""

    def __init__(self, item: Item) -> None:
        self.item = item
        # In which predictions it stands: a bit for each.
        self.foreseen_by = 0
        self.begun = False
        self.done = False
        self.loaded: Loaded | None = None
        self.since = monotonic()


class Prefetcher:
    """Loads ahead of one program. Thread-safe."""

    def __init__(self, work: Work, memory: int, dropped: Callable[[int], None]) -> None:
        """``memory``: bytes that may be held, 0 for no loading ahead; ``dropped`` counts what nobody came for."""
        self._work = work
        self._memory = memory
        self._dropped = dropped
        self._changed = threading.Condition()
        self._places: dict[str, _Place] = {}
        self._asked: set[str] = set()
        self._threads: set[threading.Thread] = set()
        self._surprises = 0
        self._predictions = 0
        # Those that may still be right, and the next one: a bit for each.
        self._standing, self._next_bit = 0, 1
        self._questions: list[str | None] = []
        self._held = 0
        self._trust = _ON_TRUST_SECONDS
        self._most_threads = 0
        self._over = memory == 0 or _threads_to_spare() == 0

    def start(self) -> None:
        """Begin with what the program's name says."""
        self._ask_again(None)

    def take(self, key: str, options: bytes, devices: tuple[int, ...]) -> Any:
        """What was Loaded ahead, if it was for exactly this; waits for what is being loaded at this moment.

        Else the entry, if it is here already, or None.
        """
        with self._changed:
            place = self._places.get(key)
            if place is None:
                if key not in self._asked:
                    self._asked.add(key)
                    self._was_surprised(key)
                return None
            self._asked.add(key)
            self._surprises = 0
            self._is_as_foreseen(place)
            if not place.begun or (place.item.options, place.item.devices) != (options, devices):
                self._forget(place)
                return place.item.entry
            # No longer than loading it here would take: it is loading, and has begun before.
            while not place.done and self._threads:
                self._changed.wait(1.0)
            self._forget(place)
            return place.loaded if place.done else place.item.entry

    def is_over(self) -> bool:
        """Whether nothing more is to be loaded."""
        return self._over

    def finish(self, seconds: float) -> bool:
        """Begin nothing more, and wait until nobody is at work, in XLA or in here; whether nobody is."""
        deadline = monotonic() + seconds
        with self._changed:
            self._over = True
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - monotonic()))
        with self._changed:
            self._places.clear()
        return not any(thread.is_alive() for thread in threads)

    def _is_as_foreseen(self, place: _Place) -> None:
        if self._standing & place.foreseen_by and self._standing & ~place.foreseen_by:
            # It tells one prediction from another.
            self._standing &= place.foreseen_by
            self._places = {
                key: other
                for key, other in self._places.items()
                if other.begun or other is place or other.foreseen_by & place.foreseen_by
            }
        if self._trust != float("inf"):
            self._trust = float("inf")
            self._changed.notify_all()

    def _was_surprised(self, key: str) -> None:
        self._surprises += 1
        # What it had in common with what was foreseen, others may have as well.
        self._trust = min(self._trust, _ON_TRUST_SECONDS)
        if self._surprises >= _MOST_SURPRISES:
            for place in [place for place in self._places.values() if not place.begun]:
                del self._places[place.item.key]
        # At the first surprise, the second, the fourth...
        if self._surprises & (self._surprises - 1) == 0:
            self._ask_again(key)

    def _ask_again(self, key: str | None) -> None:
        with self._changed:
            if self._over or self._predictions >= _MOST_PREDICTIONS:
                return
            self._predictions += 1
            self._questions = [key]
            self._changed.notify_all()
            if not self._threads or len(self._threads) < self._most_threads:
                self._begin_thread()

    def _begin_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="xcache-prefetch", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return
        self._threads.add(thread)

    def _run(self) -> None:
        try:
            while self._go_on():
                pass
        finally:
            self._work.pause()
            with self._changed:
                self._threads.discard(threading.current_thread())
                if self._questions and not self._threads and not self._over:
                    # It was asked when this one had made up its mind to end.
                    self._begin_thread()
                self._changed.notify_all()

    def _go_on(self) -> bool:
        with self._changed:
            if self._over:
                return False
            questions, self._questions = self._questions, []
        for question in questions:
            self._work.pause()
            self._expect(self._work.predict(question))
        place, soon = self._next()
        if place is None:
            self._work.pause()
            return self._rest()
        loaded = self._work.load(place.item, soon, self.is_over)
        with self._changed:
            place.done, place.since = True, monotonic()
            if loaded is None:
                self._places.pop(place.item.key, None)
            elif self._places.get(place.item.key) is place:
                # Else it turned out not to be wanted meanwhile.
                place.loaded = loaded
                self._held += loaded.size
            self._changed.notify_all()
        return True

    def _expect(self, foreseen: Foreseen) -> None:
        with self._changed:
            self._most_threads = min(_MOST_THREADS, _threads_to_spare() - foreseen.beginning)
            room, bit = self._memory, self._next_bit
            wanted: dict[str, _Place] = {}
            for item in foreseen.items:
                if item.key in self._asked:
                    continue
                place = self._places.pop(item.key, None)
                if place is None:
                    room -= 0 if item.entry is None else len(item.entry.sealed)
                    place = _Place(item if room >= 0 else item._replace(entry=None))
                place.foreseen_by |= bit
                wanted[item.key] = place
            if wanted:
                # It is asked again after a surprise: what it says is likelier than what was said before.
                self._places = wanted | self._places
                self._standing |= bit
                self._next_bit <<= 1
            # Whatever was asked for while it was on its way is no surprise if it is in there.
            told = {item.key for item in foreseen.items}
            self._questions = [question for question in self._questions if question not in told]
            for _ in range(min(self._most_threads, len(self._places)) - len(self._threads)):
                self._begin_thread()

    def _next(self) -> tuple[_Place | None, list[Item]]:
        """What to load, and what else may be said to be loaded with it."""
        with self._changed:
            loading = sum(place.begun and not place.done for place in self._places.values())
            if self._over or loading >= self._most_threads or self._held >= self._memory:
                return None, []
            waiting = [place for place in self._places.values() if not place.begun]
            place = next((place for place in waiting if place.item.seconds <= self._trust), None)
            if place is None:
                return None, []
            if place.item.seconds < _CHEAP:
                # What is cheap the program can do itself; what is dear it would have to wait for.
                trusted = itertools.takewhile(lambda place: place.item.seconds <= self._trust, waiting[:_SOON])
                place = next((place for place in trusted if place.item.seconds >= _DEAR), place)
            place.begun = True
            self._trust -= place.item.seconds
            if not place.item.is_cheap:
                return place, []
            like_it = (other.item for other in waiting if other is not place and other.item.is_cheap)
            return place, list(itertools.islice(like_it, protocol.MAX_LOADING - 1))

    def _rest(self) -> bool:
        """Wait until there is something to do, and let go of what nobody came for; whether there is any left."""
        with self._changed:
            now = monotonic()
            late = [place for place in self._places.values() if now - place.since >= _KEEP_SECONDS]
            for place in late:
                if place.done or (not place.begun and self._most_threads < 1):
                    self._forget(place)
                elif not place.begun:
                    place.item = place.item._replace(entry=None)
            if any(place.done for place in late):
                self._dropped(sum(place.done for place in late))
            # It may have become so since it was last looked at, and nobody would say so again.
            if self._over or self._questions or not self._places:
                return bool(self._questions) and not self._over
            self._changed.wait(_KEEP_SECONDS / 4)
            return True

    def _forget(self, place: _Place) -> None:
        was_full = self._held >= self._memory
        self._places.pop(place.item.key, None)
        if place.loaded is not None:
            self._held -= place.loaded.size
        # Nobody is woken for nothing while the program is busy.
        if was_full or not self._places:
            self._changed.notify_all()


def _threads_to_spare() -> int:
    """How many processors there are beside that of the program's own thread."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return count - 1
