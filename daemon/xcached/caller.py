"""The types shared by the sessions and the service: the client of a request, and its answer now or later."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias

from xcache.wire import protocol

# Entries remembered per process: more than a prediction hands out, and more than a program loads at once.
_MOST_GIVEN = 600


class Process:
    """A client process and the entries it was given: a complaint or a crash counts for no others."""

    def __init__(self, pid: int, uid: int = 0) -> None:
        self.pid = pid
        self.uid = uid
        self.connections = 0
        self.since = time.monotonic()
        # The run that it records and has not ended.
        self.run = ""
        # The number of the newest entry that was there when the process first asked for one.
        self.began_after: int | None = None
        # As the process has reported them.
        self.hits = self.misses = 0
        # Seconds of waits for remote stores that brought nothing since the last that did, and of its compiles.
        self.waited_in_vain = self.compiled = 0.0
        # Digests of the entries it was loading when it ended, so that each counts once for all its connections.
        self.ended_in: set[str] = set()
        # The entries it was given, oldest first; with the writer while the first use is still to be counted, else None.
        self._given: dict[tuple[str, str], int | None] = {}

    def give(self, key: str, digest: str, unused_of: int | None = None) -> None:
        """Note that the process was given an entry; the oldest notes are dropped.

        ``unused_of``: the entry's writer, if the process did not ask for the entry and may never load it.
        """
        self._given.pop((key, digest), None)
        self._given[key, digest] = unused_of
        if len(self._given) > _MOST_GIVEN:
            del self._given[next(iter(self._given))]

    def was_given(self, key: str, digest: str) -> bool:
        """Return whether the process was given this entry and has not complained of it since."""
        return (key, digest) in self._given

    def use(self, key: str, digest: str) -> int | None:
        """Return the writer of an entry that the process now uses for the first time, unasked; None for any other."""
        writer = self._given.get((key, digest))
        if writer is not None:
            self._given[key, digest] = None
        return writer

    def take_back(self, key: str, digest: str) -> bool:
        """Forget that the process was given this entry; return whether it was: each may be complained of once."""
        was_given = self.was_given(key, digest)
        self._given.pop((key, digest), None)
        return was_given


class Load(NamedTuple):
    """A load in progress: begun at ``since`` (monotonic), perhaps ``ahead`` of the program's request."""

    key: str
    digest: str
    since: float
    ahead: bool


class Caller:
    """A connected client: its process as the kernel reports it, its program as it says, and its load in progress."""

    def __init__(self, pid: int, uid: int, process: Process | None = None) -> None:
        self.pid = pid
        self.uid = uid
        self.process = process or Process(pid, uid)
        self.process.connections += 1
        self.program = ""
        self.loading: Load | None = None
        # Memory files that the client fills with the large contents of its next put.
        self.files: list[int] = []
        self.has_left = False
        """Whether its connection has ended; any thread may ask."""
        self.at_end: list[Callable[[Caller], object]] = []
        """Functions that release what the client held, called when its connection has ended."""

    def take_files(self) -> list[int]:
        """Return the memory files made for the next put; the caller has to close them."""
        mine, self.files = self.files, []
        return mine

    def leave(self) -> None:
        """Note that the connection ended."""
        self.has_left = True
        self.process.connections -= 1
        for release in self.at_end:
            release(self)


class Reply(NamedTuple):
    """An answer, and the descriptors to send with it."""

    message: protocol.Message
    descriptors: tuple[int, ...] = ()


class Later:
    """A promised answer, possibly with notices before it; the session connects ``say`` and ``give``."""

    def __init__(self) -> None:
        self._said: protocol.Message | None = None
        self._say: Callable[[protocol.Message], object] | None = None
        self._give: Callable[[Reply | Work], None] | None = None

    def connect(self, say: Callable[[protocol.Message], object], give: Callable[[Reply | Work], None]) -> None:
        """Set the functions that send notices and the answer; the latest notice is sent at once."""
        self._say, self._give = say, give
        if self._said is not None:
            say(self._said)

    def say(self, message: protocol.Message) -> None:
        """Send a notice before the answer."""
        self._said = message
        if self._say is not None:
            self._say(message)

    def give(self, reply: Reply | Work) -> None:
        """Send the answer, or have it made in the user's turns; only the first one counts."""
        give, self._give = self._give, None
        if give is not None:
            give(reply)


class Stream:
    """Notices without an end; nobody waits for them, so the daemon may leave. The session sets ``say``."""

    def __init__(self, first: protocol.Message) -> None:
        self.first = first
        self.say: Callable[[protocol.Message], bool] = lambda _: False
        """Sends a notice, and returns whether it did: not if the client is slow to read the earlier ones."""


Work: TypeAlias = Generator[None, None, "Answer"]
Answer: TypeAlias = Reply | Work | Later | Stream | Future[protocol.Message] | Future[Reply] | None
"""The answer to a request, of one of six kinds:

* a ``Reply``, if the serving thread knows the answer at once, after a few look-ups;
* a ``Work``, a generator, if the serving thread has more to do for it: it yields after each look-up, and returns the
  answer. It goes on in the turns of its user, who is charged for the time, and ends with the connection;
* a ``Later``, if the serving thread will know it after something else has happened: notices may precede it, and nobody
  needs it any more when the client has gone;
* a ``Stream``, if the client wants to be told again and again;
* a ``Future``, if another thread resolves it: its work goes on, and is charged to its user, when the client has gone;
* None, if the message takes no answer.
"""

Handlers = dict[type[Any], Callable[[Caller, Any], Answer]]
"""The function that answers each class of requests."""


def duplicates(descriptors: Iterable[int]) -> list[int]:
    """Duplicate all descriptors, or none if one fails."""
    copies: list[int] = []
    try:
        for descriptor in descriptors:
            copies.append(os.dup(descriptor))  # noqa: PERF401 - the copies made before a failure must be closed
    except OSError:
        close_all(copies)
        raise
    return copies


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)
