"""What each request about an executable means: get, put, lease, load, complain."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from xcache import protocol
from xcache.errors import ProtocolError
from xcached.administration import Administration
from xcached.caller import Answer, Caller, Later, Load, Reply, close_all
from xcached.database import is_damage
from xcached.leases import Leases
from xcached.quarantine import Quarantine
from xcached.records import Records
from xcached.room import Room
from xcached.runs import Runs, is_sound, nothing
from xcached.settings import Settings
from xcached.store import Entry, Hit, Source, Store, Writer
from xcached.toolchains import Toolchains
from xcached.trace import Trace
from xcached.trust import ROOT, Trust
from xcached.writer import CallJob, PutJob, WriterThread

logger = logging.getLogger("xcached")

_DIGITS = frozenset("0123456789abcdef")
_LARGEST = 2**53
# Of what is foreseen, so much is handed over before it is asked for, if the list of it leaves room for that in a frame.
_PREDICTED_BYTES, _PREDICTED_IN_FILES = protocol.MAX_FRAME // 2, 16 * 1024 * 1024
_LOOKED_AT_AHEAD = 500
# What is added to the list for each that is handed over, its key among the payloads or files included.
_LONGEST_TOLD = 220
# The keys that are stored are learnt in so many steps that nobody has to wait for one.
_LEARNT_AT_ONCE, _LEARN_EVERY, _LOOK_AGAIN = 500, 0.001, 1.0
# Where a file system does not answer, programs do not wait for it, nor does who stops the daemon.
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
        self._leases = Leases(
            trusts=self.trust.reads,
            look_up=self._look_up,
            expected=self._expected,
            call_later=self._loop.call_later,
        )
        self._call(lambda _: _done(self._quarantine.sweep))
        records = Records(store)
        self._runs = Runs(store)
        self._toolchains = Toolchains(records, self._writer, grace=lambda: settings.now.stale_grace)
        room.stale = lambda: self._toolchains.stale
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
        self._leases.leave(caller)
        # A process may say on several connections that it loads the same, and ends once.
        loads = [load for load in caller.loading.values() if caller.process.ends_in(load.digest, caller.began)]
        if loads:
            who = f"{caller.program} (process {caller.pid})"
            now = time.monotonic()
            self._call(lambda _: _done(lambda: self._quarantine.strike(loads, now, caller.uid, who)))

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
        answer = Later()
        looked = self._toolchains.announce(message, caller)
        waited = self._loop.create_future()
        looked.add_done_callback(lambda _: self._loop.call_soon_threadsafe(_finish, waited))
        # Where it decides what is served, it is worth waiting for.
        patience = _LAST_LOOK if message.toolchain in self._toolchains.stale else _FIRST_LOOK
        self._loop.call_later(patience, _finish, waited)
        waited.add_done_callback(lambda _: answer.give(Reply(looked.result() if looked.done() else protocol.Done())))
        return answer

    def _predict(self, caller: Caller, message: protocol.Predict, descriptors: Sequence[int]) -> Answer:
        found = self._runs.predict(caller.uid, message)
        try:
            listed = len(protocol.encode(0, found)) + _LOOKED_AT_AHEAD * _LONGEST_TOLD
        except ProtocolError:
            # Whoever remembered it made the most of every field.
            return Reply(nothing())
        handed: list[int] = []
        try:
            items = _behind(message.key, found.items)[:_LOOKED_AT_AHEAD]
            for item, hit in self._foreseen(caller, items, min(_PREDICTED_BYTES, protocol.MAX_FRAME - listed)):
                key = str(item["key"])
                reply = self._found(caller, key, hit)
                if reply is None or hit.answer is None:
                    continue
                told = hit.answer.message
                self._trace.note("get", key, told.stored_size, told.compile_seconds, hit=True)
                item |= {name: getattr(told, name) for name in ("digest", "compile_seconds", "stored_size")}
                if hit.is_inline:
                    found.payloads[key] = told.payload
                else:
                    found.files.append(key)
                    handed += reply.descriptors
        except OSError as error:
            logger.warning("no more is handed over ahead: %s", error)
        except BaseException:
            close_all(handed)
            raise
        return Reply(found, tuple(handed))

    def _remember(self, caller: Caller, message: protocol.Remember, descriptors: Sequence[int]) -> Answer:
        if not is_sound(message):
            return Reply(protocol.Refused("protocol error", "a run that cannot be"))
        return self._call(lambda _: _done(lambda: self._runs.remember(caller.uid, message)))

    def _expected(self, caller: Caller, wanted: protocol.Get) -> float | None:
        """How long it took to compile this, by the word of those whom the caller trusts."""
        trusts = (lambda writer: self.trust.reads(caller.uid, writer)) if self.trust.shared else None
        return self._store.expected_seconds(wanted.key, wanted.program_digest, trusts)

    def _get(self, caller: Caller, message: protocol.Get, descriptors: Sequence[int]) -> Answer:
        if not _is_digest(message.key):
            # Nothing can be stored under it, and nobody has to remember who asked.
            return Reply(protocol.Missing(0))
        found = self._look_up(caller, message)
        if found is not None and isinstance(found.message, protocol.Packed):
            told = found.message.message
            self._trace.note("get", message.key, told.stored_size, told.compile_seconds, hit=True)
        elif found is None:
            self._trace.note("get", message.key, 0, 0.0, hit=False)
        return found or self._leases.ask(caller, message)

    def _look_up(self, caller: Caller, message: protocol.Get) -> Reply | None:
        """What is stored, by whoever the caller trusts, or known not to be storable."""
        if not self._store.known.may_hold(message.key):
            return None
        hits = self._in_order(caller, self._store.find(message.key))
        if hits and hits[0].toolchain in self._toolchains.stale:
            # Who still runs on what is no longer installed compiles, and nobody waits for that.
            return Reply(protocol.Missing(0))
        for hit in hits:
            reply = self._found(caller, message.key, hit)
            if reply is not None:
                return reply
        reason = self._store.why_not(message.key, lambda writer: self.trust.reads(caller.uid, writer))
        return None if reason is None else Reply(protocol.NotCacheable(reason))

    def _in_order(self, caller: Caller, hits: list[Hit]) -> list[Hit]:
        """What a caller may have: one's own first, then root's."""
        hits = [hit for hit in hits if self._may_have(caller, hit)]
        return sorted(hits, key=lambda hit: (hit.writer_uid != caller.uid, hit.writer_uid != ROOT))

    def _foreseen(
        self, caller: Caller, items: Sequence[dict[str, protocol.Scalar]], room_inline: int
    ) -> Iterator[tuple[dict[str, protocol.Scalar], Hit]]:
        """What a program is handed before it asks, as far as there is room."""
        room, files = {True: room_inline, False: _PREDICTED_IN_FILES}, protocol.MAX_PREDICTED_FILES
        for item in items:
            key = str(item["key"])
            # What has a strike is asked for, and loaded by itself: so it is known what a second one is due to.
            if (key, caller.uid) in self._quarantine.struck:
                continue
            hit = next(iter(self._in_order(caller, self._store.find(key))), None)
            if hit is None or hit.answer is None or hit.toolchain in self._toolchains.stale:
                continue
            told = hit.answer.message
            room[hit.is_inline] -= len(told.payload) if hit.is_inline else max(told.stored_size, 0)
            files -= not hit.is_inline
            if room[hit.is_inline] >= 0 and (hit.is_inline or files >= 0):
                yield item, hit
            elif room[True] < 0 and (room[False] < 0 or files < 0):
                return

    def _may_have(self, caller: Caller, hit: Hit) -> bool:
        if (hit.digest, caller.uid) in self._quarantine.barred:
            return False
        return self.trust.reads(caller.uid, hit.writer_uid)

    def _found(self, caller: Caller, key: str, hit: Hit) -> Reply | None:
        entry = Entry(key, hit.writer_uid)
        descriptor = None
        wrong = "" if hit.answer else "its row is damaged"
        if not wrong and not hit.is_inline:
            descriptor = self._store.files.open(hit.digest)
            wrong = "its file is gone" if descriptor is None else ""
        if hit.answer is None or wrong:
            self._call(lambda _: _done(lambda: self._quarantine.set_aside(entry, wrong)))
            return None
        self._writer.note_use(entry, time.time())
        caller.process.give(key, hit.digest)
        return Reply(hit.answer, () if descriptor is None else (descriptor,))

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
            self._call(lambda _: _done(lambda: self._quarantine.forgive(loaded, caller.uid)))
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
        return self._call(lambda _: _done(lambda: self._quarantine.complain(key, given, uid, reason)))

    def _mark_not_cacheable(
        self, caller: Caller, message: protocol.MarkNotCacheable, descriptors: Sequence[int]
    ) -> Answer:
        def mark(store: Store) -> protocol.Message:
            with store.transaction():
                store.mark_not_cacheable(message, caller.uid)
            return protocol.Done()

        if not _is_digest(message.key):
            return Reply(protocol.Refused("protocol error", f"{message.key[:80]!r} is not a digest"))
        done = self._call(mark)
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

    def _call(self, call: Callable[[Store], protocol.Message]) -> Future[protocol.Message]:
        done: Future[protocol.Message] = Future()
        self._writer.submit(CallJob(call, done))
        return done


def _behind(key: str | None, items: list[dict[str, protocol.Scalar]]) -> list[dict[str, protocol.Scalar]]:
    """What is wanted after a key."""
    place = next((place for place, item in enumerate(items) if item["key"] == key), -1)
    return items[place + 1 :]


def _done(work: Callable[[], object]) -> protocol.Message:
    work()
    return protocol.Done()


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
