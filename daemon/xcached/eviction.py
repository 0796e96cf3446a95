"""Which entries go when room runs out: pure functions over plain rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Candidate(NamedTuple):
    """An entry that could go, and the bytes that would come free."""

    key: str
    size: int


def least_recently_used(oldest_first: Iterable[Candidate], excess: int) -> list[str]:
    """Keys to evict until ``excess`` bytes are free; takes from ``oldest_first`` no more than it needs."""
    chosen: list[str] = []
    if excess <= 0:
        return chosen
    for candidate in oldest_first:
        chosen.append(candidate.key)
        excess -= candidate.size
        if excess <= 0:
            break
    return chosen
