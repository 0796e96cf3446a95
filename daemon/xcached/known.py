"""Which keys there may be something under: most of what is asked for in vain is answered without asking SQLite.

A program asks for thousands of keys that nobody has stored. Each would be a search in an index that no cache of pages
holds once the store is large; two bits in memory say the same for all but one in a hundred.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable

# For each key, so that of those that are not there one in a hundred seems to be.
_BITS = 16
_LEAST = 2**16
# Larger by so much where there turn out to be more than there is room for.
_GROWTH = 8


class KnownKeys:
    """A set that may take a key for one of its own, and never one of its own for a stranger.

    It learns what is stored step by step; until it knows all of it, there may be anything. ``note`` may be called by
    any thread, the rest by one.
    """

    def __init__(self, read: Callable[[str, int], list[str]]) -> None:
        """``read`` gives so many of the keys behind another, in their order."""
        self._read = read
        self._noted: deque[str] = deque()
        self.complete: bool
        self._last: str
        self._mask: int
        self._taken: int
        self._most: int
        self._begin(_LEAST)

    def note(self, keys: Iterable[str]) -> None:
        """These were stored just now: after they are, and before anybody is told so."""
        self._noted.extend(keys)

    def may_hold(self, key: str) -> bool:
        """Whether there may be something under a key, which has to be a digest."""
        self._take_noted()
        if not self.complete:
            return True
        first, second = self._places(key)
        bits = self._bits
        return bool(bits[first >> 3] >> (first & 7) & 1 and bits[second >> 3] >> (second & 7) & 1)

    def learn(self, count: int) -> None:
        """Read the next keys; all of them anew where more came than there is room for."""
        self._take_noted()
        if self._taken > self._most:
            # Of what came since it was complete, as much has gone.
            self._begin((self._mask + 1) * (1 if self.complete else _GROWTH))
        if self.complete:
            return
        keys = self._read(self._last, count)
        for key in keys:
            self._take(key)
        if len(keys) == count:
            self._last = keys[-1]
        elif self._taken > self._most // 2:
            # It would soon be too small.
            self._begin(2 * (self._mask + 1))
        else:
            self.complete = True

    def _begin(self, bits: int) -> None:
        self.complete = False
        self._last = ""
        self._bits = bytearray(bits // 8)
        self._mask = bits - 1
        self._taken, self._most = 0, bits // _BITS

    def _take_noted(self) -> None:
        while self._noted:
            self._take(self._noted.popleft())

    def _take(self, key: str) -> None:
        new = False
        # Who may write the database can have put there what is no digest, and what nobody will ask for.
        with contextlib.suppress(ValueError):
            for place in self._places(key):
                bit = 1 << (place & 7)
                new |= not self._bits[place >> 3] & bit
                self._bits[place >> 3] |= bit
        self._taken += new

    def _places(self, key: str) -> tuple[int, int]:
        # They are digests: any of their digits are as good as any others.
        return int(key[:8], 16) & self._mask, int(key[8:16], 16) & self._mask
