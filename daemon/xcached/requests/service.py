"""The daemon's service: each request goes to its handler, and what a connection held is released when it ends."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future

from xcache.wire import protocol
from xcached.caller import Answer, Caller, Handlers, Later, Reply, Work
from xcached.requests.fetches import Fetches
from xcached.requests.leases import Leases
from xcached.requests.loads import Loads
from xcached.requests.runs import RunRequests
from xcached.requests.watchers import Watchers
from xcached.store.database import is_damage


class Service:
    """Answers requests, as the sessions and the main function see it."""

    def __init__(
        self,
        handlers: Handlers,
        leases: Leases,
        runs: RunRequests,
        loads: Loads,
        watchers: Watchers,
        fetches: Fetches | None,
        welcome: Callable[[], protocol.Welcome],
        damaged: Callable[[Exception], None],
        finish: Callable[[float], bool],
        observe: Callable[[str, float], None] | None = None,
    ) -> None:
        """``damaged`` is told of a damaged database; ``finish`` is the method of that name.

        ``observe`` gets the name of each request and the seconds until its answer was known.
        """
        self._handlers = handlers
        self._leases = leases
        self._runs = runs
        self._loads = loads
        self._watchers = watchers
        self._fetches = fetches
        self.welcome = welcome
        """Returns the answer to Hello."""
        self._damaged = damaged
        self._observe = observe
        self.finish = finish
        """Finishes all writes within these seconds and closes the store, after ``begin_to_leave``, on another thread;
        returns whether everything was written.
        """

    def handle(self, caller: Caller, message: protocol.Message) -> Answer:
        """Answer a request: now, later, or not at all."""
        handler = self._handlers.get(type(message))
        if handler is None:
            return Reply(protocol.Refused("protocol error", f"{type(message).__name__} is not a request"))
        start = time.monotonic()
        with self._watching():
            answer = handler(caller, message)
        if isinstance(answer, Generator):
            return self._watched(answer, type(message).__name__, start)
        if self._observe is not None:
            self._note_time(type(message).__name__, start, answer)
        return answer

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if is_damage(error):
                self._damaged(error)
            raise

    def _watched(self, work: Work, name: str, start: float) -> Work:
        with self._watching():
            answer = yield from work
        if self._observe is not None:
            self._note_time(name, start, answer)
        return answer

    def _note_time(self, name: str, start: float, answer: Answer) -> None:
        observe = self._observe
        assert observe is not None  # noqa: S101 - the caller has looked
        if isinstance(answer, Future):
            answer.add_done_callback(lambda _: observe(name, time.monotonic() - start))
        elif not isinstance(answer, Later):
            # How long somebody else's compile takes says nothing of the daemon.
            observe(name, time.monotonic() - start)

    def leave(self, caller: Caller) -> None:
        """Release what a client held and waited for, after its connection has ended."""
        caller.leave()
        self._leases.leave(caller)
        # Before the loads, after which the process is watched no more.
        self._runs.leave(caller)
        self._loads.leave(caller)
        self._watchers.leave(caller)
        if self._fetches is not None:
            self._fetches.leave(caller)

    def busy(self) -> bool:
        """Return whether any lease is held: its waiters would not learn of the end if the daemon left."""
        return len(self._leases) > 0

    def begin_to_leave(self) -> None:
        """Tell waiting clients to compile, and stop the background work."""
        if self._fetches is not None:
            self._fetches.close()
        self._leases.close()
        self._loads.close()
        self._watchers.close()
