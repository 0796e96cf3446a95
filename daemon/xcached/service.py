"""What each request about an executable means: get, put, lease, load, complain."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from xcache import framing, protocol
from xcached.administration import Administration
from xcached.caller import Answer, Caller, Later, Load, Reply, close_all
from xcached.database import is_damage
from xcached.foresight import Foresight
from xcached.leases import Leases
from xcached.lookup import Lookup
from xcached.quarantine import Quarantine
from xcached.records import Records
from xcached.room import Room
from xcached.runs import Runs, is_sound
from xcached.settings import Settings
from xcached.store import Source, Store, Writer
from xcached.toolchains import Toolchains
from xcached.trace import Trace
from xcached.trust import Trust
from xcached.writer import PutJob, WriterThread

logger = logging.getLogger("xcached")

_DIGITS = frozenset("0123456789abcdef")
_LARGEST = 2**53
# The keys that are stored are learnt in so many steps that nobody has to wait for one.
_LEARNT_AT_ONCE, _LEARN_EVERY, _LOOK_AGAIN = 500, 0.001, 1.0
# Where a file system does not answer, nobody waits for it longer: no program, and not who stops the daemon.
_FIRST_LOOK, _LAST_LOOK = 0.2, 2.0


class Service:
    """Answers requests from the store; reads at once, changes on the writer's thread."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        trust: Trust,
        version: str,
        stop: Callable[[str], None],
        begin_anew: Callable[[str], None],
    ) -> None:
        """``begin_anew`` has the daemon leave and start again, with a fresh store for a damaged one."""
        self._store = store
        self._settings = settings
        self._version = version
        self._begin_anew = begin_anew
        self._loop = asyncio.get_running_loop()
        self.trust = trust
        room = Room(store, settings.now.max_entries, settings.now.min_free)
        settings.when_changed(lambda new: room.limit(new.max_entries, new.min_free))
        self._trace = Trace(settings.now.trace)
        self._writer = WriterThread(store, self._damaged_behind, room, self._trace)
        self._quarantine = Quarantine(store, settings.now.dir / "quarantine", self._may_judge)
        self._writer.call(self._quarantine.sweep)
        records = Records(store)
        self._runs = Runs(store)
        self._toolchains = Toolchains(records, self._writer, grace=lambda: settings.now.stale_grace)
        room.stale = lambda: self._toolchains.stale
        self._lookup = Lookup(store, trust, self._quarantine, self._toolchains, self._writer)
        self._foresight = Foresight(self._runs, self._lookup, self._trace)
        self._leases = Leases(
            trusts=self.trust.reads,
            look_up=self._lookup.find,
            expected=self._lookup.expected_seconds,
            call_later=self._loop.call_later,
        )
        self.administration = Administration(
            store, room, settings, version, self._writer, self._quarantine, self._leases, records, trust, stop
        )
        self._learning: asyncio.TimerHandle | None = None
        self._learn_keys()
        self._handlers: dict[type[Any], Callable[[Caller, Any, Sequence[int]], Answer]] = (
            self.administration.handlers
            | {
                protocol.Announce: self._announce,
                protocol.Predict: self._predict,
                protocol.Remember: self._remember,
                protocol.Get: self._get,
                protocol.Put: self._put,
                protocol.Release: self._release,
                protocol.Loading: self._loading,
                protocol.Complain: self._complain,
                protocol.MarkNotCacheable: self._mark_not_cacheable,
            }
        )

    def handle(self, caller: Caller, message: protocol.Message, descriptors: Sequence[int]) -> Answer:
        """Answer a request, now, later or not at all; descriptors that are not passed on are the caller's to close."""
        handler = self._handlers.get(type(message))
        if handler is None:
            return Reply(protocol.Refused("protocol error", f"{type(message).__name__} is not a request"))
        try:
            return handler(caller, message, descriptors)
        except sqlite3.DatabaseError as error:
            if is_damage(error):
                self._damaged(error)
            raise

    def welcome(self) -> protocol.Welcome:
        """The answer to Hello."""
        return protocol.Welcome(
            protocol.VERSION, self._version, os.getpid(), protocol.path_text(self._settings.now.dir)
        )

    def leave(self, caller: Caller) -> None:
        """A connection has ended, and with it what the client held and waited for."""
        caller.leave()
        self._leases.leave(caller)
        # A process may say on several connections that it loads the same, and ends once.
        loads = [load for load in caller.loading.values() if caller.process.ends_in(load.digest, caller.began)]
        if loads:
            who = f"{caller.program} (process {caller.pid})"
            now = time.monotonic()
            self._writer.call(lambda: self._quarantine.strike(loads, now, caller.uid, who))

    def busy(self) -> bool:
        """Whether somebody compiles for others, who would not know of it if the daemon left."""
        return len(self._leases) > 0

    def begin_to_leave(self) -> None:
        """The daemon leaves: who waits for a compile does it, and nothing more is learnt."""
        self._leases.send_everybody_away()
        if self._learning is not None:
            self._learning.cancel()

    def finish(self, seconds: float) -> bool:
        """Write what is still to be written, and close the store; on a thread of its own, after ``begin_to_leave``."""
        self._toolchains.close(_LAST_LOOK)
        done = self._writer.stop(seconds)
        if done:
            self._store.close()
        return done

    def _learn_keys(self) -> None:
        patience = _LEARN_EVERY
        try:
            self._store.known.learn(_LEARNT_AT_ONCE)
        except sqlite3.Error as error:
            if is_damage(error):
                self._damaged(error)
                return
            # Somebody else holds the database; who asks meanwhile has it asked for each key.
            patience = _LOOK_AGAIN
        if self._store.known.complete:
            patience = _LOOK_AGAIN
        self._learning = self._loop.call_later(patience, self._learn_keys)

    def _announce(self, caller: Caller, message: protocol.Announce, descriptors: Sequence[int]) -> Answer:
        if not _is_digest(message.toolchain):
            return Reply(protocol.Refused("protocol error", f"{message.toolchain[:80]!r} is not a digest"))
        look = self._toolchains.announce(message, caller)
        if look is None:
            return Reply(protocol.Refused("protocol error", "files that cannot be"))
        if not look.decides:
            return Reply(protocol.Done())
        answer = Later()
        waited = self._loop.create_future()
        look.done.add_done_callback(lambda _: self._loop.call_soon_threadsafe(_finish, waited))
        # Where it decides what is served, it is worth more of a wait.
        patience = _LAST_LOOK if message.toolchain in self._toolchains.stale else _FIRST_LOOK
        self._loop.call_later(patience, _finish, waited)
        waited.add_done_callback(lambda _: answer.give(Reply(protocol.Done())))
        return answer

    def _predict(self, caller: Caller, message: protocol.Predict, descriptors: Sequence[int]) -> Answer:
        return self._foresight.predict(caller, message)

    def _remember(self, caller: Caller, message: protocol.Remember, descriptors: Sequence[int]) -> Answer:
        if not is_sound(message):
            return Reply(protocol.Refused("protocol error", "a run that cannot be"))
        return self._writer.call(lambda: self._runs.remember(caller.uid, message))

    def _get(self, caller: Caller, message: protocol.Get, descriptors: Sequence[int]) -> Answer:
        if not _is_digest(message.key):
            # Nothing can be stored under it, and nobody has to remember who asked.
            return Reply(protocol.Missing(0))
        found = self._lookup.find(caller, message)
        if found is not None and isinstance(found.message, framing.Packed):
            self._trace.note_hit(message.key, found.message.message)
        elif found is None:
            self._trace.note("get", message.key, 0, 0.0, hit=False)
        return found or self._leases.ask(caller, message)

    def _put(self, caller: Caller, message: protocol.Put, descriptors: Sequence[int]) -> Answer:
        refused = self._why_refused(caller, message, descriptors)
        if refused is not None:
            self._leases.disappoint(message.key, caller.uid)
            return Reply(refused)
        together = message.stored_size + message.program_stored_size
        self._trace.note("put", message.key, together, message.compile_seconds, hit=False)
        copies = _duplicates(descriptors)
        of_executable = copies.pop(0) if message.payload is None else None
        of_program = copies.pop(0) if message.program is None else None
        executable = Source(message.digest, message.stored_size, message.payload, of_executable)
        program = Source(message.program_stored_digest, message.program_stored_size, message.program, of_program)
        done: Future[protocol.Message] = Future()
        self._settle_when(done, message.key, caller.uid)
        self._writer.submit(PutJob(message, executable, program, Writer(caller.uid, caller.pid, caller.program), done))
        return done

    def _settle_when(self, done: Future[protocol.Message], key: str, writer: int) -> None:
        """Have those who wait told when something was written, or could not be."""
        done.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._has_put, key, writer, done.result()))

    def _has_put(self, key: str, writer: int, answer: protocol.Message) -> None:
        if isinstance(answer, protocol.Refused):
            self._leases.disappoint(key, writer)
        else:
            self._leases.settle(key, writer)

    def _why_refused(
        self, caller: Caller, message: protocol.Put, descriptors: Sequence[int]
    ) -> protocol.Refused | None:
        named = (message.key, message.digest, message.program_digest, message.program_stored_digest)
        for digest in (*named, *message.components.values()):
            if not _is_digest(digest):
                return protocol.Refused("protocol error", f"{digest[:80]!r} is not a digest")
        if missing := [name for name in protocol.DESCRIBED_COMPONENTS if name not in message.components]:
            return protocol.Refused("protocol error", f"the key has no {missing[0]}")
        sizes = (message.raw_size, message.stored_size, message.program_raw_size, message.program_stored_size)
        if not all(0 <= size <= _LARGEST for size in sizes) or not 0 <= message.compile_seconds <= _LARGEST:
            return protocol.Refused("protocol error", "a size or a time that cannot be")
        if len(descriptors) != message.wants_descriptors:
            came = f"{len(descriptors)} descriptors came, not {message.wants_descriptors}"
            return protocol.Refused("protocol error", came)
        largest = max(message.stored_size, message.program_stored_size)
        if largest > self._settings.now.max_payload:
            return protocol.Refused(
                "too large", f"{largest} bytes are above the limit of {self._settings.now.max_payload}"
            )
        if (message.digest, caller.uid) in self._quarantine.barred:
            return protocol.Refused("set aside", "processes that loaded exactly these bytes have ended")
        return None

    def _release(self, caller: Caller, message: protocol.Release, descriptors: Sequence[int]) -> None:
        self._leases.release(caller, message.key, message.lease)

    def _loading(self, caller: Caller, message: protocol.Loading, descriptors: Sequence[int]) -> None:
        # Of several, nobody knows which were loaded; what has a strike is loaded by itself.
        alone = [load.key for load in caller.loading.values() if load.alone]
        loaded = [key for key in alone if (key, caller.uid) in self._quarantine.struck]
        if loaded:
            self._writer.call(lambda: self._quarantine.forgive(loaded, caller.uid))
        now, is_alone = time.monotonic(), len(message.entries) == 1
        caller.loading = {
            key: Load(key, digest, now, is_alone)
            for key, digest in itertools.islice(message.entries.items(), protocol.MAX_LOADING)
            # Of nothing else: who invents what they load could keep the writer busy with it.
            if caller.process.was_given(key, digest)
        }

    def _complain(self, caller: Caller, message: protocol.Complain, descriptors: Sequence[int]) -> Answer:
        caller.loading.pop(message.key, None)
        given = caller.process.take_back(message.key, message.digest)
        if given is None:
            # Somebody was heard about it before, or the daemon is another one: who asks again can complain again.
            return Reply(protocol.Done())
        key, uid, reason = message.key, caller.uid, message.reason
        return self._writer.call(lambda: self._quarantine.complain(key, given, uid, reason))

    def _mark_not_cacheable(
        self, caller: Caller, message: protocol.MarkNotCacheable, descriptors: Sequence[int]
    ) -> Answer:
        def mark() -> None:
            with self._store.transaction():
                self._store.mark_not_cacheable(message, caller.uid)

        if not _is_digest(message.key):
            return Reply(protocol.Refused("protocol error", f"{message.key[:80]!r} is not a digest"))
        done = self._writer.call(mark)
        self._settle_when(done, message.key, caller.uid)
        return done

    def _may_judge(self, reader: int, writer: int) -> bool:
        """Whether a reader's word is enough to set aside what a writer wrote."""
        return reader == writer or self.trust.administers(reader)

    def _damaged_behind(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._damaged, error)

    def _damaged(self, error: Exception) -> None:
        self._store.database.note_damage()
        self._begin_anew(f"the database is damaged: {error}")


def _finish(waited: asyncio.Future[None]) -> None:
    if not waited.done():
        waited.set_result(None)


def _duplicates(descriptors: Sequence[int]) -> list[int]:
    """Descriptors of the same files, or none of them."""
    copies: list[int] = []
    try:
        for descriptor in descriptors:
            copies.append(os.dup(descriptor))  # noqa: PERF401 - what was copied before a failure has to be known
    except OSError:
        close_all(copies)
        raise
    return copies


def _is_digest(text: str) -> bool:
    return len(text) == 64 and _DIGITS.issuperset(text)
