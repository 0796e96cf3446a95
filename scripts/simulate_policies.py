"""Policies, and the cache that replays requests under one of them."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from simulate_traces import Request
from xcached import eviction
from xcached.eviction import Candidate, Excess


class Known:
    """What is known of a key when it is stored or used."""

    __slots__ = ("before", "decayed", "here", "order", "remembered", "seconds", "size", "time", "uses", "worth")

    def __init__(self) -> None:
        self.here = False
        # In the cache, and ever.
        self.uses = self.remembered = 0
        # The order of the last use, and of the one before it.
        self.order = self.before = 0
        # In which a use counts half as much one turnover later.
        self.decayed = 0.0
        self.time = 0.0
        self.size = 0
        self.seconds = 0.0
        self.worth = 0.0


Worth = Callable[[Known, float], float]


def _value(known: Known) -> float:
    return eviction.saved_for_each_byte(known.seconds, known.size)


# Each says what a key is worth now, given the floor (the worth of the last that went): who is worth least goes first.
POLICIES: dict[str, Worth] = {
    "LRU": lambda known, floor: known.order,
    "LFU": lambda known, floor: known.uses,
    "LRU-2": lambda known, floor: known.before,
    "GDS": lambda known, floor: floor + _value(known),
    "GDSF": lambda known, floor: eviction.worth(floor, known.uses, known.seconds, known.size),
    "GDSF-sqrt": lambda known, floor: floor + math.sqrt(known.uses) * _value(known),
    "GDSF-cap8": lambda known, floor: floor + min(known.uses, 8) * _value(known),
    "GDSF-ghost": lambda known, floor: floor + known.remembered * _value(known),
    "decay": lambda known, floor: math.log2(known.decayed * _value(known)) + known.time,
}
AGAINST = ("LRU", "LFU")
CHOSEN = "GDSF"


class Outcome(NamedTuple):
    """What a policy achieved."""

    saved: float
    hits: int
    evictions: int


def replay(
    requests: Sequence[Request], capacity: int, worth: Worth, *, noise: float = 0.0, admit: bool = False
) -> Outcome:
    """Ask for everything in turn. ``noise``: how far compile times are spread by what else the machine does.

    With ``admit`` the newest entry never goes at once, whatever it is worth.
    """
    known: dict[str, Known] = {}
    heap: list[tuple[float, int, str]] = []
    chance = random.Random("noise")
    held = count = hits = evictions = 0
    saved = floor = now = 0.0
    for order, request in enumerate(requests, start=1):
        state = known.setdefault(request.key, Known())
        if state.here:
            hits += 1
            saved += request.seconds
        elif request.size > capacity:
            continue
        else:
            state.here = True
            state.uses = 0
            state.size = request.size
            state.seconds = request.seconds * (chance.lognormvariate(0, noise) if noise else 1.0)
            held += request.size
            count += 1
        now += 1 / count
        state.decayed = 1.0 + state.decayed * 2.0 ** (state.time - now)
        state.time = now
        state.uses += 1
        state.remembered += 1
        state.before, state.order = state.order, order
        state.worth = worth(state, floor)
        heapq.heappush(heap, (state.worth, order, request.key))
        if held > capacity:
            aside = []
            # The daemon's own function chooses; what is stale in the heap is passed over on the way.
            def first() -> object:
                while heap:
                    value, used, key = heapq.heappop(heap)
                    if known[key].here and known[key].order == used:
                        if admit and used == order:
                            aside.append((value, used, key))
                            continue
                        yield Candidate(key, known[key].size, worth=value)

            for gone in eviction.choose(first(), Excess(held - capacity)):
                known[gone.entry].here = False
                held -= gone.size
                count -= 1
                evictions += 1
                floor = gone.worth
            for item in aside:
                heapq.heappush(heap, item)
    return Outcome(saved, hits, evictions)
