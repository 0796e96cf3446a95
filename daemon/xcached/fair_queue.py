"""A fair queue: users share a thread by the time their work takes, however many jobs they queue."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Kind = TypeVar("Kind")
# Users without work whose times are kept.
_MOST_IDLE_USERS = 256


class Turn(NamedTuple, Generic[Item]):
    """A job, and the user charged for it."""

    user: int | None
    item: Item


class FairQueue(Generic[Item]):
    """Jobs of several users. The user charged least goes next; each user's own jobs keep their order.

    A user who comes back after a pause is served soon, but earns no credit for the pause.
    """

    def __init__(self) -> None:
        self._waiting: dict[int | None, deque[Item]] = {}
        # Seconds charged to each user, and the largest charge of a user when served.
        self._spent: dict[int | None, float] = {}
        self._served = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, user: int | None, item: Item) -> None:
        """Queue a job behind the user's own."""
        self._of(user).append(item)

    def add_first(self, user: int | None, item: Item) -> None:
        """Queue a job before the user's own."""
        self._of(user).appendleft(item)

    def take(self) -> Turn[Item] | None:
        """Take the next job, or None."""
        user = self._next_user()
        return None if user is _NOBODY else Turn(user, self._take_of(user))

    def peek(self) -> Item | None:
        """Return the next job without taking it, or None."""
        user = self._next_user()
        return None if user is _NOBODY else self._waiting[user][0]

    def count(self, user: int | None) -> int:
        """Return how many jobs of a user are queued."""
        return len(self._waiting.get(user, ()))

    def take_all_of(self, user: int | None) -> list[Item]:
        """Take all jobs of a user."""
        return list(self._waiting.pop(user, ()))

    def charge(self, user: int | None, seconds: float) -> None:
        """Charge a user for work; negative seconds correct an estimate that was too high."""
        self._spent[user] = max(self._spent.get(user, 0.0), self._served) + seconds
        if len(self._spent) > _MOST_IDLE_USERS + len(self._waiting):
            gone = sorted(self._spent.keys() - self._waiting.keys(), key=lambda user: self._spent[user])
            # Drop those charged least: for the others being forgotten would be a gain.
            for user in gone[: _MOST_IDLE_USERS // 2]:
                del self._spent[user]

    def _of(self, user: int | None) -> deque[Item]:
        items = self._waiting.get(user)
        if items is None:
            items = self._waiting[user] = deque()
            self._spent[user] = max(self._spent.get(user, 0.0), self._served)
        return items

    def _next_user(self) -> int | None:
        if len(self._waiting) < 2:
            return next(iter(self._waiting), _NOBODY)
        return min(self._waiting, key=self._spent.__getitem__)

    def _take_of(self, user: int | None) -> Item:
        # Reinserting the user at the end breaks ties between equal charges in turn.
        items = self._waiting.pop(user)
        item = items.popleft()
        if items:
            self._waiting[user] = items
        self._served = max(self._served, self._spent[user])
        return item


# No user has this number.
_NOBODY = -1


class SharedFairQueue(Generic[Item]):
    """A fair queue that one thread takes from and any thread adds to."""

    def __init__(self) -> None:
        self._line: FairQueue[Item] = FairQueue()
        self._changed = threading.Condition(threading.Lock())
        self._closed = self._woken = False

    def __bool__(self) -> bool:
        return bool(self._line)

    def __len__(self) -> int:
        with self._changed:
            return len(self._line)

    @property
    def closed(self) -> bool:
        """Whether the queue was closed."""
        return self._closed

    @property
    def over(self) -> bool:
        """Whether the queue was closed and is empty."""
        return self._closed and not self._line

    def add(self, user: int | None, item: Item) -> None:
        """Queue a job behind the user's own."""
        with self._changed:
            self._line.add(user, item)
            self._changed.notify()

    def count(self, user: int | None) -> int:
        """Return how many jobs of a user are queued."""
        with self._changed:
            return self._line.count(user)

    def add_first(self, user: int | None, item: Item) -> None:
        """Queue a job before the user's own."""
        with self._changed:
            self._line.add_first(user, item)

    def close(self) -> None:
        """Close the queue; no more jobs may come."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def wait(self, patience: float) -> None:
        """Wait for a job, for close() or wake(), or for ``patience`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._line or self._closed or self._woken, patience)
            self._woken = False

    def wake(self) -> None:
        """Have ``wait`` return."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def take(self) -> Turn[Item] | None:
        """Take the next job, or None."""
        with self._changed:
            return self._line.take()

    def take_if(self, kind: type[Kind]) -> Turn[Kind] | None:
        """Take the next job if it is of this kind."""
        with self._changed:
            turn = self._line.take() if isinstance(self._line.peek(), kind) else None
        return Turn(turn.user, turn.item) if turn is not None and isinstance(turn.item, kind) else None

    def take_all_of(self, user: int | None) -> list[Item]:
        """Take all jobs of a user."""
        with self._changed:
            return self._line.take_all_of(user)

    def charge(self, user: int | None, seconds: float) -> None:
        """Charge a user for work."""
        with self._changed:
            self._line.charge(user, seconds)
