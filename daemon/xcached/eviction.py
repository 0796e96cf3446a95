"""What an entry is worth keeping for, and which entries go when room runs out: pure functions over plain rows.

``scripts/simulate`` replays requests through these very functions; docs/eviction.md has what it found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

Entry = TypeVar("Entry")

# What an entry takes beside its bytes: rows, indexes, and the rest of a file's last block.
_BYTES_BESIDE = 4096
# What a hit costs in place of the compile, measured on CPU (docs/eviction.md): finding it, and loading its bytes.
_SECONDS_TO_FIND = 0.002
_BYTES_LOADED_IN_A_SECOND = 40e6
# Where loading takes as long as compiling, an entry is worth next to nothing; which of those goes is told by use.
_LEAST_SHARE = 0.01


class Candidate(NamedTuple, Generic[Entry]):
    """An entry that could go, and what would come free: its bytes, and with the last of its sharers its program."""

    entry: Entry
    size: int
    program: str = ""
    program_size: int = 0
    sharers: int = 1
    worth: float = 0.0


def saved_for_each_byte(seconds: float, size: int) -> float:
    """Seconds that a hit saves for each byte that is kept: of ``seconds`` to compile, loading takes some."""
    saved = max(seconds - _SECONDS_TO_FIND - size / _BYTES_LOADED_IN_A_SECOND, seconds * _LEAST_SHARE)
    return saved / (size + _BYTES_BESIDE)


def worth(floor: float, uses: int, seconds: float, size: int) -> float:
    """What an entry is worth when it is stored or used (GreedyDual-Size-Frequency): who is worth least goes first.

    ``floor`` is the worth of the last that went. It rises with every one, so that who is not used any more falls
    behind, however much they were worth: age is counted in what was evicted, and not by a clock.
    """
    return floor + uses * saved_for_each_byte(seconds, size)


class Excess(NamedTuple):
    """What there is too much of."""

    bytes: int = 0
    entries: int = 0

    def __bool__(self) -> bool:
        return self.bytes > 0 or self.entries > 0


def choose(who_goes_first: Iterable[Candidate[Entry]], excess: Excess) -> list[Candidate[Entry]]:
    """Those to evict until nothing is too much; takes from ``who_goes_first`` no more than it needs."""
    chosen: list[Candidate[Entry]] = []
    gone: Counter[str] = Counter()
    size, entries = excess
    if not excess:
        return chosen
    for candidate in who_goes_first:
        chosen.append(candidate)
        gone[candidate.program] += 1
        entries -= 1
        size -= candidate.size
        if gone[candidate.program] == candidate.sharers:
            size -= candidate.program_size
        if size <= 0 and entries <= 0:
            break
    return chosen
