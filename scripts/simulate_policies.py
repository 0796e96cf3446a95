"""Policies, and the cache that replays requests under one of them."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from simulate_traces import Request

from xcached import eviction
from xcached.eviction import Candidate, Excess, Usage


class Known:
    """What is known of a key when it is stored or used."""

    __slots__ = ("before", "decayed", "here", "order", "seconds", "size", "usage", "uses")

    def __init__(self) -> None:
        self.here = False
        # Since it is here.
        self.uses = 0
        # The order of the last use, and of the one before it.
        self.order = self.before = 0
        # Ever, and since it is here, in the way of the daemon.
        self.usage = self.decayed = Usage()
        self.size = 0
        self.seconds = 0.0


Worth = Callable[[Known, float], float]


def _value(known: Known) -> float:
    return eviction.saved_for_each_byte(known.seconds, known.size)


# Each says what a key is worth now, given the floor (the worth of the last that went): who is worth least goes first.
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
    """What a policy achieved."""

    saved: float
    hits: int
    evictions: int


class Cache:
    """As much of the daemon's store as decides what is evicted, under any policy."""

    def __init__(self, capacity: int, worth: Worth) -> None:
        self._capacity = capacity
        self._worth = worth
        self._known: dict[str, Known] = {}
        # What is worth least comes first; what is not up to date any more is passed over.
        self._order: list[tuple[float, int, str]] = []
        self._held = self._entries = 0
        self._floor = self._now = 0.0
        self.evictions = 0

    def ask(self, request: Request, order: int, seconds: float) -> bool:
        """Whether it is there; where it is not, it is from now on. ``seconds``: what the compile seemed to take."""
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
    """Ask for everything in turn. ``noise``: how far compile times are spread by what else the machine does."""
    cache = Cache(capacity, worth)
    chance = random.Random("noise")
    saved, hits = 0.0, 0
    for order, request in enumerate(requests, start=1):
        if cache.ask(request, order, request.seconds * (chance.lognormvariate(0, noise) if noise else 1.0)):
            hits += 1
            saved += request.seconds
    return Outcome(saved, hits, cache.evictions)
