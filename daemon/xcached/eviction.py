"""What an entry is worth keeping for, and which entries go when room runs out: pure functions over plain rows.

``scripts/simulate`` replays requests through these very functions; docs/eviction.md has what it found.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

Entry = TypeVar("Entry")

# What an entry takes beside its bytes: rows, indexes, and the rest of a file's last block.
_BYTES_BESIDE = 4096
# What a hit costs in place of the compile (docs/eviction.md): some milliseconds for any, and more for many bytes.
_SECONDS_TO_FIND = 0.004
_BYTES_LOADED_IN_A_SECOND = 140e6
# Where loading takes as long as compiling, an entry is worth next to nothing; which of those goes is told by use.
_LEAST_SHARE = 0.01
# Requests for each entry that the store holds until a use counts half.
_HALF_LIFE = 4.0
# Of what has no logarithm.
_LEAST = 1e-300


class Candidate(NamedTuple, Generic[Entry]):
    """An entry that could go, and what would come free: its bytes, and with the last of its sharers its program."""

    entry: Entry
    size: int
    program: str = ""
    program_size: int = 0
    sharers: int = 1


def saved_for_each_byte(seconds: float, size: int) -> float:
    """Seconds that a hit saves for each byte that is kept: of ``seconds`` to compile, loading takes some."""
    saved = max(seconds - _SECONDS_TO_FIND - size / _BYTES_LOADED_IN_A_SECOND, seconds * _LEAST_SHARE)
    return saved / (size + _BYTES_BESIDE)


class Usage(NamedTuple):
    """How much an entry was used, as of a moment of the store's own time: what is past counts ever less."""

    uses: float = 0.0
    time: float = 0.0


def time_passed(entries: int, uses: int = 1) -> float:
    """How far ``uses`` bring the store's own time on: a half-life is a few requests for each entry that it holds."""
    return uses / (max(entries, 1) * _HALF_LIFE)


def used(before: Usage, now: float, times: int = 1) -> Usage:
    """An entry is stored or used at this moment."""
    return Usage(times + before.uses * 2.0 ** min(before.time - now, 0.0), now)


def worth(usage: Usage, seconds: float, size: int) -> float:
    """What an entry is worth: who is worth least goes first.

    It is the logarithm of what it may be expected to save for each byte. As time goes by that halves for all of them
    alike, so that their order stays, and is kept in an index: the time of the last use is added instead.
    """
    return math.log2(max(usage.uses * saved_for_each_byte(seconds, size), _LEAST)) + usage.time


class Excess(NamedTuple):
    """What there is too much of."""

    bytes: int = 0
    entries: int = 0

    def __bool__(self) -> bool:
        """Whether there is."""
        return self.bytes > 0 or self.entries > 0


def choose(who_goes_first: Iterable[Candidate[Entry]], excess: Excess) -> list[Entry]:
    """Those to evict until nothing is too much; takes from ``who_goes_first`` no more than it needs."""
    chosen: list[Entry] = []
    gone: Counter[str] = Counter()
    size, entries = excess
    if not excess:
        return chosen
    for candidate in who_goes_first:
        chosen.append(candidate.entry)
        gone[candidate.program] += 1
        entries -= 1
        size -= candidate.size
        if gone[candidate.program] == candidate.sharers:
            size -= candidate.program_size
        if size <= 0 and entries <= 0:
            break
    return chosen
