"""What was sent, what was acknowledged, and what may therefore be found."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from places import digest

from xcache import protocol


class Known(NamedTuple):
    """What is known of one key: the digests it may have (None: nothing there), and when it was stored and used."""

    may_be: frozenset[str | None]
    stored_after: float
    used_until: float


_NEVER = Known(frozenset([None]), 0.0, 0.0)


class Ledger:
    """Kept by those who load a daemon. A key has one owner at a time, or is always given the same content.

    Between saying and hearing, an operation may have happened or not; so may one whose answer never came.
    """

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.evicted = 0
        self._newly_evicted: list[tuple[str, Known, int]] = []
        self._known: dict[str, Known] = {}
        self._contents: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def begins_to_put(self, key: str, content: bytes) -> Known:
        """A Put is about to be said; what was known before."""
        with self._lock:
            name = digest(content)
            self._contents[name] = content
            before = self._known.get(key, _NEVER)
            now = time.monotonic()
            # One that is there stays as old as it was, unless this one takes its place.
            stored = before.stored_after if None not in before.may_be else now
            self._known[key] = Known(before.may_be | {name}, stored, now)
            return before

    def has_put(self, key: str, content: bytes, answer: protocol.Message, before: Known, began: float) -> None:
        """An answer to a Put was heard."""
        with self._lock:
            now = time.monotonic()
            if answer == protocol.Stored(True):
                self._known[key] = Known(frozenset([digest(content)]), began, now)
            elif answer == protocol.Stored(False):
                # One that was not there before was put by somebody else meanwhile, who gave it the same content.
                stayed = before.may_be - {None} or frozenset([digest(content)])
                self._known[key] = self._known[key]._replace(may_be=stayed)

    def begins_to_remove(self, key: str) -> None:
        """A Remove is about to be said."""
        with self._lock:
            before = self._known.get(key, _NEVER)
            self._known[key] = before._replace(may_be=before.may_be | {None})

    def has_removed(self, key: str) -> None:
        """A Removed was heard."""
        with self._lock:
            self._known[key] = _NEVER

    def found(self, key: str, content: bytes | None, *, evicting: bool = False) -> str | None:
        """Something was found, or nothing: what is wrong with that, if anything is; from here on it is what is known.

        With ``evicting``, what is missing may have been evicted; whether that was lawful is asked later.
        """
        with self._lock:
            before = self._known.get(key, _NEVER)
            name = None if content is None else digest(content)
            if name is None and None not in before.may_be and evicting:
                self.evicted += 1
                largest = max(len(self._contents[name]) for name in before.may_be if name is not None)
                self._newly_evicted.append((key, before, largest))
                self._known[key] = _NEVER
                return None
            if name in before.may_be and (content is None or self._contents[name] == content):
                self._known[key] = before._replace(may_be=frozenset([name]), used_until=time.monotonic())
                return None
            if name is None:
                return f"{key[:12]} was acknowledged and is gone"
            whose = "another put of it" if name in self._contents else "nobody's"
            return f"{key[:12]} has content which is {whose}: {name[:12]}"

    def all(self) -> dict[str, Known]:
        """What is known of every key that was ever spoken of."""
        with self._lock:
            return dict(self._known)

    def take_evicted(self) -> list[tuple[str, Known, int]]:
        """What was found to be missing since this was last asked: as it was known before, and its size at most."""
        with self._lock:
            taken, self._newly_evicted = self._newly_evicted, []
            return taken
