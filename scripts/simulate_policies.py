"""Policies, and the cache that replays requests under one of them."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from simulate_traces import Request

from xcached.store import eviction
from xcached.store.eviction import Candidate, Excess, Usage


class Known:
    """The uses, size and compile time of a key, for the policies to judge by."""

    __slots__ = ("before", "decayed", "here", "order", "seconds", "size", "usage", "uses")

    def __init__(self) -> None:
        self.here = False
        # Since the key is in the cache.
        self.uses = 0
        # The order of the last use, and of the one before it.
        self.order = self.before = 0
        # All uses, and those since the key is in the cache, counted as the daemon counts them.
        self.usage = self.decayed = Usage()
        self.size = 0
        self.seconds = 0.0


Worth = Callable[[Known, float], float]


def _value(known: Known) -> float:
    return eviction.saved_for_each_byte(known.seconds, known.size)


# Each returns what a key is worth now, given the floor (the worth of the last key that went); the least goes first.
POLICIES: dict[str, Worth] = {
    "LRU": lambda known, _: known.order,
    "LFU": lambda known, _: known.uses,
    "LRU-2": lambda known, _: known.before,
    "GDS": lambda known, floor: floor + _value(known),
    "GDSF": lambda known, floor: floor + known.uses * _value(known),
    "GDSF-sqrt": lambda known, floor: floor + math.sqrt(known.uses) * _value(known),
    "no memory": lambda known, _: eviction.worth(known.decayed, known.seconds, known.size),
    "xcache": lambda known, _: eviction.worth(known.usage, known.seconds, known.size),
}
FEW = ("LRU", "LFU", "GDSF", "xcache")


class Outcome(NamedTuple):
    """The seconds, hits and evictions of a policy."""

    saved: float
    hits: int
    evictions: int


class Cache:
    """The part of the daemon's store that decides what is evicted, under any policy."""

    def __init__(self, capacity: int, worth: Worth) -> None:
        self._capacity = capacity
        self._worth = worth
        self._known: dict[str, Known] = {}
        # A heap: the key that is worth least comes first; rows that are out of date are passed over.
        self._order: list[tuple[float, int, str]] = []
        self._held = self._entries = 0
        self._floor = self._now = 0.0
        self.evictions = 0

    def ask(self, request: Request, order: int, seconds: float) -> bool:
        """Return whether the key is there, and store it if not. ``seconds``: the time its compile seemed to take."""
        known = self._known.setdefault(request.key, Known())
        hit = known.here
        if not hit:
            if request.size > self._capacity:
                return False
            known.here, known.uses, known.decayed = True, 0, Usage()
            known.size, known.seconds = request.size, seconds
            self._held += request.size
            self._entries += 1
        self._now += eviction.time_passed(self._entries)
        known.usage, known.decayed = (eviction.used(u, self._now) for u in (known.usage, known.decayed))
        known.uses += 1
        known.before, known.order = known.order, order
        heapq.heappush(self._order, (self._worth(known, self._floor), order, request.key))
        self._make_room()
        return hit

    def _make_room(self) -> None:
        for key in eviction.choose(self._candidates(), Excess(self._held - self._capacity)):
            self._known[key].here = False
            self._held -= self._known[key].size
            self._entries -= 1
            self.evictions += 1

    def _candidates(self) -> Iterator[Candidate[str]]:
        while self._order:
            worth, order, key = heapq.heappop(self._order)
            known = self._known[key]
            if known.here and known.order == order:
                self._floor = worth
                yield Candidate(key, known.size)


def replay(requests: Sequence[Request], capacity: int, worth: Worth, noise: float = 0.0) -> Outcome:
    """Replay all requests. ``noise``: how far the machine's other work spreads the compile times."""
    cache = Cache(capacity, worth)
    chance = random.Random("noise")
    saved, hits = 0.0, 0
    for order, request in enumerate(requests, start=1):
        if cache.ask(request, order, request.seconds * (chance.lognormvariate(0, noise) if noise else 1.0)):
            hits += 1
            saved += request.seconds
    return Outcome(saved, hits, cache.evictions)
