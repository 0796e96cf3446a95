"""The eviction policy, as pure functions over plain rows: the worth of an entry, and the choice of entries to evict.

``scripts/simulate`` replays requests through these functions; docs/eviction.md has the results.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

Subject = TypeVar("Subject")

# Overhead of an entry beside its bytes: rows, indexes, and the unused end of a file's last block.
_OVERHEAD_BYTES = 4096
# Cost of a hit (docs/eviction.md): a few milliseconds for any entry, and time in proportion to its bytes.
_LOOKUP_SECONDS = 0.004
_LOAD_BYTES_PER_SECOND = 140e6
# An entry that loads no faster than it compiles keeps this share of its compile time, so that use still ranks it.
_LEAST_SHARE = 0.01
# Requests per stored entry after which a past use counts half.
_HALF_LIFE_REQUESTS_PER_ENTRY = 4.0
# Stands in for zero, which has no logarithm.
_LEAST = 1e-300


class Candidate(NamedTuple, Generic[Subject]):
    """An entry that could be evicted, and what that frees: its bytes, and the program with its last entry."""

    subject: Subject
    size: int
    program: str = ""
    program_size: int = 0
    sharers: int = 1


def saved_for_each_byte(seconds: float, size: int) -> float:
    """Return the seconds a hit saves per stored byte: the compile time, less the time to find and load the entry."""
    saved = max(seconds - _LOOKUP_SECONDS - size / _LOAD_BYTES_PER_SECOND, seconds * _LEAST_SHARE)
    return saved / (size + _OVERHEAD_BYTES)


class Usage(NamedTuple):
    """An entry's uses, decayed up to ``time`` in the store's own time (in half-lives)."""

    uses: float = 0.0
    time: float = 0.0


def time_passed(entries: int, uses: int = 1) -> float:
    """Return how many half-lives ``uses`` advance the store's own time."""
    return uses / (max(entries, 1) * _HALF_LIFE_REQUESTS_PER_ENTRY)


def used(before: Usage, now: float, times: int = 1) -> Usage:
    """Return an entry's usage after it was stored or used now."""
    return Usage(times + before.uses * 2.0 ** min(before.time - now, 0.0), now)


def worth(usage: Usage, seconds: float, size: int) -> float:
    """Return an entry's rank for eviction: the entry with the least goes first.

    The rank is the logarithm of the seconds per byte the entry is expected to save. All entries decay at the same rate,
    so adding the time of the last use keeps their order without an update, and an index can hold it.
    """
    return math.log2(max(usage.uses * saved_for_each_byte(seconds, size), _LEAST)) + usage.time


class Excess(NamedTuple):
    """The bytes and entries by which a limit is exceeded."""

    bytes: int = 0
    entries: int = 0

    def __bool__(self) -> bool:
        """Return whether anything exceeds the limit."""
        return self.bytes > 0 or self.entries > 0


def choose(candidates: Iterable[Candidate[Subject]], excess: Excess) -> list[Subject]:
    """Return the entries to evict until the excess is gone; takes no more from ``candidates`` than that needs."""
    chosen: list[Subject] = []
    gone: Counter[str] = Counter()
    size, entries = excess
    if not excess:
        return chosen
    for candidate in candidates:
        chosen.append(candidate.subject)
        gone[candidate.program] += 1
        entries -= 1
        size -= candidate.size
        if gone[candidate.program] == candidate.sharers:
            size -= candidate.program_size
        if size <= 0 and entries <= 0:
            break
    return chosen
