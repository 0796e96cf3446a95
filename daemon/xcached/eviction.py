"""Which entries go when room runs out: pure functions over plain rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

Entry = TypeVar("Entry")


class Candidate(NamedTuple, Generic[Entry]):
    """An entry that could go, and what would come free: its bytes, and with the last of its sharers its program."""

    entry: Entry
    size: int
    program: str = ""
    program_size: int = 0
    sharers: int = 1


def least_recently_used(oldest_first: Iterable[Candidate[Entry]], excess: int) -> list[Entry]:
    """Entries to evict until ``excess`` bytes are free; takes from ``oldest_first`` no more than it needs."""
    chosen: list[Entry] = []
    gone: Counter[str] = Counter()
    if excess <= 0:
        return chosen
    for candidate in oldest_first:
        chosen.append(candidate.entry)
        gone[candidate.program] += 1
        excess -= candidate.size
        if gone[candidate.program] == candidate.sharers:
            excess -= candidate.program_size
        if excess <= 0:
            break
    return chosen
