"""What passes between the socket and the service: who asks, and the answer now or later."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import NamedTuple

from xcache import framing, protocol

# More than a prediction hands over, and than a program loads at once.
_MOST_GIVEN = 600


class Given(NamedTuple):
    """What was handed out under a key, and when."""

    digest: str
    at: float


class Process:
    """What the connections of one process have in common: what was handed to it. Only of that it can say anything."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.connections = 0
        self._given: dict[str, Given] = {}
        self._ended_in: dict[str, float] = {}

    def give(self, key: str, digest: str) -> None:
        """An entry is handed out; the oldest are forgotten."""
        self._given.pop(key, None)
        self._given[key] = Given(digest, time.time())
        if len(self._given) > _MOST_GIVEN:
            del self._given[next(iter(self._given))]

    def was_given(self, key: str, digest: str) -> bool:
        """Whether this is what was last handed out under the key."""
        return key in self._given and self._given[key].digest == digest

    def ends_in(self, digest: str, began: float) -> bool:
        """A connection has ended while this was being loaded; whether none that was open beside it ended in it, too."""
        first = self._ended_in.pop(digest, -math.inf) < began
        self._ended_in[digest] = time.monotonic()
        if len(self._ended_in) > _MOST_GIVEN:
            del self._ended_in[next(iter(self._ended_in))]
        return first

    def take_back(self, key: str, digest: str) -> Given | None:
        """What was handed out, if it is this: one complaint for each time."""
        return self._given.pop(key) if self.was_given(key, digest) else None


class Load(NamedTuple):
    """What was begun to be loaded, and when by a clock that does not jump."""

    key: str
    digest: str
    since: float
    alone: bool = True
    """Whether it must be this one that is being loaded, and not one of several."""


class Caller:
    """One connection: what the kernel says of who is there, what they say of themselves, and what they are loading."""

    def __init__(self, pid: int, uid: int, process: Process | None = None) -> None:
        self.pid = pid
        self.uid = uid
        self.began = time.monotonic()
        self.process = process or Process(pid)
        self.process.connections += 1
        self.program = ""
        self.loading: dict[str, Load] = {}
        # How many leases are held.
        self.leases = 0

    def leave(self) -> None:
        """The connection has ended."""
        self.process.connections -= 1


class Reply(NamedTuple):
    """An answer, and descriptors that go with it."""

    message: protocol.Message | framing.Packed
    descriptors: tuple[int, ...] = ()


class Later:
    """An answer that comes later, with word of it before. Whoever has asked connects ``say`` and ``give``."""

    def __init__(self) -> None:
        self._said: protocol.Message | None = None
        self._say: Callable[[protocol.Message], None] | None = None
        self._give: Callable[[Reply], None] | None = None

    def connect(self, say: Callable[[protocol.Message], None], give: Callable[[Reply], None]) -> None:
        """Where the word of it and the answer go; what was said already goes there now."""
        self._say, self._give = say, give
        if self._said is not None:
            say(self._said)

    def say(self, message: protocol.Message) -> None:
        """A word before the answer."""
        self._said = message
        if self._say is not None:
            self._say(message)

    def give(self, reply: Reply) -> None:
        """The answer."""
        if self._give is not None:
            self._give(reply)


# None: a note that has no answer.
Answer = Reply | Later | Future[protocol.Message] | None


def close_all(descriptors: Iterable[int]) -> None:
    """Close what was not handed on, or has been."""
    for descriptor in descriptors:
        os.close(descriptor)
