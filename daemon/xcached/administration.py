"""What each request about the store and the daemon means: remove, clear, pin, collect garbage, count, status, stop."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any

from xcache import protocol
from xcached.caller import Answer, Caller, Reply
from xcached.leases import Leases
from xcached.quarantine import Quarantine
from xcached.records import Records
from xcached.room import Room, Tally
from xcached.settings import Settings
from xcached.store import Entry, Store
from xcached.trust import Trust
from xcached.writer import LongJob, WriterThread

_COUNTERS = frozenset(
    {"requests", "hits", "misses", "bytes_read", "compile_seconds", "load_seconds", "saved_seconds", "wait_seconds"}
)
_GROUPS = ("uncacheable:", "errors:")
_REMOVED_AT_ONCE = 500
# Of the store, where users have no quota: one may have so much of it pinned.
_ONE_USERS_SHARE = 4
_NOT_YOURS = protocol.Refused("not permitted", "only root and the daemon's own account may do this")


class Administration:
    """Answers requests about everything at once. Who does not administer the daemon changes only their own."""

    def __init__(
        self,
        store: Store,
        room: Room,
        settings: Settings,
        version: str,
        writer: WriterThread,
        quarantine: Quarantine,
        leases: Leases,
        records: Records,
        trust: Trust,
        stop: Callable[[str], None],
    ) -> None:
        self._store = store
        self._room = room
        self._settings = settings
        self._version = version
        self._writer = writer
        self._quarantine = quarantine
        self._leases = leases
        self._records = records
        self._trust = trust
        self._stop = stop
        self._started = time.monotonic()
        self.connections = 0
        self.handlers: dict[type[Any], Callable[[Caller, Any, Sequence[int]], Answer]] = {
            protocol.Report: self._report,
            protocol.Remove: self._remove,
            protocol.Clear: self._clear,
            protocol.Pin: self._pin,
            protocol.Unpin: self._unpin,
            protocol.CollectGarbage: self._collect_garbage,
            protocol.Sync: self._sync,
            protocol.ZeroStatistics: self._zero_statistics,
            protocol.AskStatus: self._status,
            protocol.Stop: self._stop_daemon,
        }

    def _report(self, caller: Caller, message: protocol.Report, descriptors: Sequence[int]) -> Answer:
        counts = {
            name: amount
            for name, amount in message.counts.items()
            if name in _COUNTERS or (name.startswith(_GROUPS) and len(name) < 200)
        }
        self._writer.note_counts(counts)
        return Reply(protocol.Done())

    def _remove(self, caller: Caller, message: protocol.Remove, descriptors: Sequence[int]) -> Answer:
        def remove() -> protocol.Message:
            under = [entry for key in message.keys for entry in self._store.entries_under(key)]
            done = removed(self._store, [entry for entry in under if self._may_change(caller, entry)])
            if message.reason:
                self._records.invalidated(message.reason, done)
            return done

        return self._writer.call(remove)

    def _clear(self, caller: Caller, message: protocol.Clear, descriptors: Sequence[int]) -> Answer:
        uid = None if self._trust.administers(caller.uid) else caller.uid

        def clear() -> protocol.Message:
            # First what makes room on a full disk.
            gone = removed(self._store, self._store.entries_of(uid))
            with self._store.transaction():
                self._store.forget_marks(uid)
            self._quarantine.clear(uid)
            return gone

        return self._writer.call(clear)

    def _pin(self, caller: Caller, message: protocol.Pin, descriptors: Sequence[int]) -> Answer:
        def pin() -> protocol.Message:
            entries = self._changeable(caller, message.keys)
            return protocol.Pinned(len(entries), *self._room.pin(entries, share))

        limited = self._trust.shared and not self._trust.administers(caller.uid)
        share = self._settings.now.max_size // _ONE_USERS_SHARE if limited else 0
        return self._writer.call(pin)

    def _unpin(self, caller: Caller, message: protocol.Unpin, descriptors: Sequence[int]) -> Answer:
        def unpin() -> protocol.Message:
            entries = self._changeable(caller, message.keys)
            return protocol.Pinned(len(entries), *self._room.unpin(entries))

        return self._writer.call(unpin)

    def _changeable(self, caller: Caller, keys: Sequence[str]) -> list[Entry]:
        """The entries under these keys that this user may change."""
        under = [entry for key in keys for entry in self._store.entries_under(key) if self._store.has(entry)]
        return [entry for entry in under if self._may_change(caller, entry)]

    def _collect_garbage(self, caller: Caller, message: protocol.CollectGarbage, descriptors: Sequence[int]) -> Answer:
        def collect() -> Generator[None, None, protocol.Message]:
            tally = Tally()
            self._room.begin()
            while (freed := self._room.step()) is not None:
                tally.add(freed)
                yield
            self._quarantine.sweep()
            for count in self._store.sweep_by_steps():
                tally.files += count
                yield
            free = self._room.free_pages()
            while self._room.give_back():
                yield
            # Others may have come in between, and left more of them.
            given_back = max(0, free - self._room.free_pages())
            return protocol.Collected(tally.entries, tally.bytes, tally.files, dict(tally.reasons), given_back)

        if not self._trust.administers(caller.uid):
            return Reply(_NOT_YOURS)
        done: Future[protocol.Message] = Future()
        self._writer.submit(LongJob(collect(), done))
        return done

    def _sync(self, caller: Caller, message: protocol.Sync, descriptors: Sequence[int]) -> Answer:
        # The writer writes what it holds back before it comes to this.
        return self._writer.call(self._writer.catch_up)

    def _zero_statistics(self, caller: Caller, message: protocol.ZeroStatistics, descriptors: Sequence[int]) -> Answer:
        def zero() -> protocol.Message:
            with self._store.transaction():
                self._store.zero_statistics()
            return protocol.Done()

        return self._writer.call(zero) if self._trust.administers(caller.uid) else Reply(_NOT_YOURS)

    def _status(self, caller: Caller, message: protocol.AskStatus, descriptors: Sequence[int]) -> Answer:
        totals = self._store.reading.totals()
        settings = self._settings.now
        free, to_stay_free = self._room.disk
        facts: dict[str, protocol.Scalar] = {
            "pid": os.getpid(),
            "version": self._version,
            "uptime_seconds": round(time.monotonic() - self._started, 3),
            "connections": self.connections,
            "entries": totals["entries"],
            "bytes": totals["bytes"],
            "max_size": settings.max_size,
            "max_entries": settings.max_entries,
            "max_age": settings.max_age,
            "free": free,
            "to_stay_free": to_stay_free,
            "configuration_problem": self._settings.problem,
            "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        mine = self._leases.compiles(lambda uid: uid == caller.uid or self._trust.administers(caller.uid))
        return Reply(protocol.Status(facts, mine))

    def _stop_daemon(self, caller: Caller, message: protocol.Stop, descriptors: Sequence[int]) -> Answer:
        if not self._trust.administers(caller.uid):
            return Reply(_NOT_YOURS)
        self._stop(f"asked by process {caller.pid} ({caller.program!r}): {message.reason[:200]!r}")
        return Reply(protocol.Done())

    def _may_change(self, caller: Caller, entry: Entry) -> bool:
        return entry.writer_uid == caller.uid or self._trust.administers(caller.uid)


def removed(store: Store, entries: Sequence[Entry]) -> protocol.Removed:
    """Remove entries, and say what came free."""
    before = store.totals_now()
    # In steps, so that clearing a large store does not keep others waiting for one long transaction.
    for start in range(0, len(entries), _REMOVED_AT_ONCE):
        store.let_go(entries[start : start + _REMOVED_AT_ONCE])
    after = store.totals_now()
    return protocol.Removed(before["entries"] - after["entries"], before["bytes"] - after["bytes"])
