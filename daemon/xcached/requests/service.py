"""Answers requests: calls the handler of each, and releases what a connection held when it ends."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from typing import Any

from xcache.wire import protocol
from xcached.caller import Answer, Caller, Later, Load, Reply
from xcached.requests.leases import Leases
from xcached.requests.lookup import Lookup
from xcached.requests.process_ends import ProcessEnds
from xcached.requests.puts import is_digest
from xcached.requests.strikes import Strikes
from xcached.store.database import is_damage
from xcached.store.intake import Intake
from xcached.store.quarantine import Quarantine
from xcached.store.runs import Runs, is_sound
from xcached.store.store import Store
from xcached.store.writer import WriterThread
from xcached.toolchains.toolchains import Toolchains

Handlers = dict[type[Any], Callable[[Caller, Any], Answer]]

# Seconds to wait for a check of files on a slow file system: after an announcement, and longer when the check decides
# which entries are served, or when the daemon stops.
_CHECK_SECONDS, _DECISIVE_CHECK_SECONDS = 0.2, 2.0


class Service:
    """Answers requests: reads the store at once, and has the writer thread change it."""

    def __init__(
        self,
        store: Store,
        writer: WriterThread,
        intake: Intake,
        quarantine: Quarantine,
        runs: Runs,
        strikes: Strikes,
        endings: ProcessEnds,
        toolchains: Toolchains,
        lookup: Lookup,
        leases: Leases,
        handlers: Handlers,
        welcome: protocol.Welcome,
        damaged: Callable[[Exception], None],
    ) -> None:
        """``handlers`` answer the messages not answered here; ``damaged`` is told of a damaged database."""
        self._store = store
        self._writer = writer
        self._intake = intake
        self._quarantine = quarantine
        self._runs = runs
        self._strikes = strikes
        self._endings = endings
        self._toolchains = toolchains
        self._lookup = lookup
        self._leases = leases
        self.welcome = welcome
        """The answer to Hello."""
        self._damaged = damaged
        self._loop = asyncio.get_running_loop()
        self._handlers: Handlers = handlers | {
            protocol.Announce: self._announce,
            protocol.Remember: self._remember,
            protocol.Get: self._get,
            protocol.Release: self._release,
            protocol.Loading: self._loading,
            protocol.Loaded: self._loaded,
            protocol.Complain: self._complain,
        }

    def handle(self, caller: Caller, message: protocol.Message) -> Answer:
        """Answer a request: now, later, or not at all."""
        handler = self._handlers.get(type(message))
        if handler is None:
            return Reply(protocol.Refused("protocol error", f"{type(message).__name__} is not a request"))
        try:
            return handler(caller, message)
        except sqlite3.DatabaseError as error:
            if is_damage(error):
                self._damaged(error)
            raise

    def leave(self, caller: Caller) -> None:
        """Release what a client held and waited for, after its connection has ended."""
        caller.leave()
        self._leases.leave(caller)
        load, caller.loading = caller.loading, None
        if load is not None:
            now = time.monotonic()
            self._endings.tell(caller.process, lambda ending: self._strikes.judge(load, caller, ending, now))
        if caller.process.connections == 0:
            self._endings.forget(caller.process)

    def busy(self) -> bool:
        """Return whether any lease is held: its waiters would not learn of the end if the daemon left."""
        return len(self._leases) > 0

    def begin_to_leave(self) -> None:
        """Tell waiting clients to compile, and stop the background work."""
        self._leases.close()
        self._endings.close()

    def finish(self, seconds: float) -> bool:
        """Finish all writes and close the store; called after ``begin_to_leave``, on another thread."""
        self._toolchains.close(_DECISIVE_CHECK_SECONDS)
        done = self._intake.close(seconds) and self._writer.stop(seconds)
        if done:
            self._store.close()
        return done

    def _announce(self, caller: Caller, message: protocol.Announce) -> Answer:
        if not is_digest(message.toolchain):
            return Reply(protocol.Refused("protocol error", f"{message.toolchain[:80]!r} is not a digest"))
        look = self._toolchains.announce(message, caller)
        if look is None:
            return Reply(protocol.Refused("protocol error", "the list of files is malformed"))
        if not look.decides:
            return Reply(protocol.Done())
        # A check that decides what is served is worth a longer wait.
        is_stale = self._toolchains.is_stale(message.toolchain, caller.uid)
        answer, done = Later(), Reply(protocol.Done())
        look.done.add_done_callback(lambda _: self._loop.call_soon_threadsafe(answer.give, done))
        self._loop.call_later(_DECISIVE_CHECK_SECONDS if is_stale else _CHECK_SECONDS, answer.give, done)
        return answer

    def _remember(self, caller: Caller, message: protocol.Remember) -> Answer:
        if not is_sound(message):
            return Reply(protocol.Refused("protocol error", "the list of the run is malformed"))
        return self._writer.call(lambda: self._runs.remember(caller.uid, message), caller.uid)

    def _get(self, caller: Caller, message: protocol.Get) -> Answer:
        if not is_digest(message.key):
            # No entry can have such a key, so no lease is needed either.
            return Reply(protocol.Missing(0))
        return self._lookup.find(caller, message) or self._leases.ask(caller, message)

    def _release(self, caller: Caller, message: protocol.Release) -> None:
        self._leases.release(caller, message.key, message.lease)

    def _loading(self, caller: Caller, message: protocol.Loading) -> None:
        self._has_loaded(caller)
        # Count only entries it was given: a client that made them up could keep the writer thread busy.
        if caller.process.was_given(message.key, message.digest):
            caller.loading = Load(message.key, message.digest, time.monotonic(), message.ahead)

    def _loaded(self, caller: Caller, message: protocol.Loaded) -> None:
        self._has_loaded(caller)

    def _has_loaded(self, caller: Caller) -> None:
        """Note that the process survived a load, whether or not it succeeded."""
        load, caller.loading = caller.loading, None
        if load is not None and not load.ahead:
            self._strikes.forgive(load, caller.uid)

    def _complain(self, caller: Caller, message: protocol.Complain) -> Answer:
        # Each reader may complain once of each entry this daemon gave it; another daemon may have given it.
        if not caller.process.take_back(message.key, message.digest):
            return Reply(protocol.Done())
        steps = self._quarantine.complain(message.key, message.digest, caller.uid, message.reason, whole=message.whole)
        return self._writer.call_by_steps(steps, caller.uid)
