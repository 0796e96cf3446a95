"""Record what was sent and acknowledged, to decide what the store may hold."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from support.places import digest
from xcache.wire import protocol


class Known(NamedTuple):
    """The knowledge of one key: its possible digests (None: no entry), and when it was stored and used."""

    may_be: frozenset[str | None]
    stored_after: float
    used_until: float


_NEVER = Known(frozenset([None]), 0.0, 0.0)


class Ledger:
    """Kept by the clients of a load. A key has one owner at a time, or always the same content.

    Until its answer comes, an operation may have happened or not; one whose answer never came may have, too.
    """

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.evicted = 0
        self._newly_evicted: list[tuple[str, Known, int]] = []
        self._known: dict[str, Known] = {}
        self._contents: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def begins_to_put(self, key: str, content: bytes) -> Known:
        """Note that a Put is about to be sent; return what was known before."""
        with self._lock:
            name = digest(content)
            self._contents[name] = content
            before = self._known.get(key, _NEVER)
            now = time.monotonic()
            # An existing entry keeps its age unless this one replaces it.
            stored = before.stored_after if None not in before.may_be else now
            self._known[key] = Known(before.may_be | {name}, stored, now)
            return before

    def has_put(self, key: str, content: bytes, answer: protocol.Message, before: Known, began: float) -> None:
        """Note the answer to a Put."""
        with self._lock:
            now = time.monotonic()
            if answer == protocol.Stored(True):
                self._known[key] = Known(frozenset([digest(content)]), began, now)
            elif answer == protocol.Stored(False):
                # If it was not there before, another client has put the same content meanwhile.
                stayed = before.may_be - {None} or frozenset([digest(content)])
                self._known[key] = self._known[key]._replace(may_be=stayed)

    def begins_to_remove(self, key: str) -> None:
        """Note that a Remove is about to be sent."""
        with self._lock:
            before = self._known.get(key, _NEVER)
            self._known[key] = before._replace(may_be=before.may_be | {None})

    def has_removed(self, key: str) -> None:
        """Note a Removed."""
        with self._lock:
            self._known[key] = _NEVER

    def found(self, key: str, content: bytes | None, *, evicting: bool = False) -> str | None:
        """Return what is wrong with a content that was found, or None; remember the content if nothing is.

        With ``evicting``, a missing entry may have been evicted; a later check decides whether that was lawful.
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
        """Return what is known of every key ever used."""
        with self._lock:
            return dict(self._known)

    def take_evicted(self) -> list[tuple[str, Known, int]]:
        """Return the entries newly found missing: key, what was known before, and greatest possible size."""
        with self._lock:
            taken, self._newly_evicted = self._newly_evicted, []
            return taken
