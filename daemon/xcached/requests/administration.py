"""The requests about the store and the daemon: remove, clear, pin, collect garbage, count, status, stop."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from xcache._version import __version__
from xcache.wire import protocol
from xcached.caller import Answer, Caller, Reply
from xcached.host.reload import LiveSettings
from xcached.requests.leases import Leases
from xcached.requests.strikes import Strikes
from xcached.requests.trust import Trust
from xcached.store.aliases import AliasRows
from xcached.store.evictor import Evictor, Tally
from xcached.store.listing import entries_by
from xcached.store.pins import Share
from xcached.store.quarantine import Quarantine
from xcached.store.runs import Runs
from xcached.store.store import Entry, Store
from xcached.store.writer import WriterThread
from xcached.toolchains.rows import ToolchainRows

_COUNTERS = frozenset(
    {"requests", "hits", "misses", "bytes_read", "compile_seconds", "load_seconds", "saved_seconds", "wait_seconds"}
)
_GROUPS = ("uncacheable:", "errors:", "lowerings:")
# Few enough that other users' jobs do not wait long.
_REMOVED_PER_STEP = 100
# One user may pin at most this fraction (1/n) of the store's bytes and entries.
_PIN_DIVISOR = 4
_NOT_PERMITTED = protocol.Refused("not permitted", "only root and the daemon's own account may do this")


class Administration:
    """Answers requests about the whole store. A user who is no administrator changes only their own entries."""

    def __init__(
        self,
        store: Store,
        evictor: Evictor,
        settings: LiveSettings,
        writer: WriterThread,
        quarantine: Quarantine,
        strikes: Strikes,
        runs: Runs,
        aliases: AliasRows,
        leases: Leases,
        rows: ToolchainRows,
        trust: Trust,
        stop: Callable[[str], None],
        connections: Callable[[], int],
    ) -> None:
        self._store = store
        self._evictor = evictor
        self._settings = settings
        self._writer = writer
        self._quarantine = quarantine
        self._strikes = strikes
        self._runs = runs
        self._aliases = aliases
        self._leases = leases
        self._rows = rows
        self._trust = trust
        self._stop = stop
        self._started = time.monotonic()
        self._connections = connections
        self.handlers: dict[type[Any], Callable[[Caller, Any], Answer]] = {
            protocol.Report: self._report,
            protocol.Remove: self._remove,
            protocol.Clear: self._clear,
            protocol.Pin: self._pin,
            protocol.Unpin: self._unpin,
            protocol.AskEntries: self._list,
            protocol.CollectGarbage: self._collect_garbage,
            protocol.Sync: self._sync,
            protocol.ZeroStatistics: self._zero_statistics,
            protocol.AskStatus: self._status,
            protocol.Stop: self._stop_daemon,
        }

    def _report(self, caller: Caller, message: protocol.Report) -> Answer:
        counts = {
            name: amount
            for name, amount in message.counts.items()
            if name in _COUNTERS or (name.startswith(_GROUPS) and len(name) < 200)
        }
        self._writer.note_counts(counts)
        return Reply(protocol.Done())

    def _remove(self, caller: Caller, message: protocol.Remove) -> Answer:
        def remove() -> Generator[None, None, protocol.Message]:
            done = protocol.Removed(0, 0)
            for start in range(0, len(message.keys), _REMOVED_PER_STEP):
                keys = message.keys[start : start + _REMOVED_PER_STEP]
                under = [entry for key in keys for entry in self._store.entries_under(key)]
                mine = [entry for entry in under if self._may_change(caller, entry)]
                done = _added(done, removed(self._store, mine))
                yield
            if message.reason and done.entries:
                self._rows.invalidated(message.reason, done, caller.uid)
            return done

        return self._writer.call_by_steps(remove(), caller.uid, in_order=True)

    def _clear(self, caller: Caller, message: protocol.Clear) -> Answer:
        uid = None if self._trust.administers(caller.uid) else caller.uid

        def clear() -> Generator[None, None, protocol.Message]:
            # Entries first, since removing them makes room on a full disk.
            entries, gone = self._store.entries_of(uid), protocol.Removed(0, 0)
            for start in range(0, len(entries), _REMOVED_PER_STEP):
                gone = _added(gone, removed(self._store, entries[start : start + _REMOVED_PER_STEP]))
                yield
            with self._store.transaction():
                self._store.forget_marks(uid)
            self._quarantine.clear(uid)
            self._runs.clear(uid)
            self._aliases.clear(uid)
            return gone

        done = self._writer.call_by_steps(clear(), caller.uid, in_order=True)
        self._strikes.clear(uid)
        return done

    def _pin(self, caller: Caller, message: protocol.Pin) -> Answer:
        def pin() -> protocol.Message:
            entries = self._changeable(caller, message.keys)
            return self._pinned(caller, len(entries), self._evictor.pins.pin(entries, share))

        limited = self._trust.shared and not self._trust.administers(caller.uid)
        now = self._settings.now
        entries = max(1, now.max_entries // _PIN_DIVISOR) if now.max_entries else 0
        share = Share(entries, now.max_size // _PIN_DIVISOR) if limited else Share()
        return self._writer.call(pin, caller.uid)

    def _unpin(self, caller: Caller, message: protocol.Unpin) -> Answer:
        def unpin() -> protocol.Message:
            entries = self._changeable(caller, message.keys)
            return self._pinned(caller, len(entries), self._evictor.pins.unpin(entries))

        return self._writer.call(unpin, caller.uid)

    def _pinned(self, caller: Caller, entries: int, changed: int) -> protocol.Pinned:
        """Return what changed, and what is pinned now: by this user, or by all users for an administrator."""
        pins = self._evictor.pins
        now = pins.of_all() if self._trust.administers(caller.uid) else pins.of(caller.uid)
        return protocol.Pinned(changed, entries - changed, *now)

    def _changeable(self, caller: Caller, keys: Sequence[str]) -> list[Entry]:
        """Return the entries under these keys that this user may change."""
        under = [entry for key in keys for entry in self._store.entries_under(key) if self._store.has(entry)]
        return [entry for entry in under if self._may_change(caller, entry)]

    def _list(self, caller: Caller, message: protocol.AskEntries) -> Answer:
        """List the user's own entries, or all entries for an administrator."""
        uid = None if self._trust.administers(caller.uid) else caller.uid
        return self._writer.call(lambda: entries_by(self._store, uid, message), caller.uid)

    def _collect_garbage(self, caller: Caller, message: protocol.CollectGarbage) -> Answer:
        def collect() -> Generator[None, None, protocol.Message]:
            tally = Tally()
            self._evictor.end_grace()
            while (freed := self._evictor.evict_some()) is not None:
                tally.add(freed)
                yield
            self._quarantine.sweep()
            self._runs.sweep()
            for count in self._store.sweep_by_steps():
                tally.files += count
                yield
            free = self._evictor.on_disk.free_pages()
            while self._evictor.on_disk.give_back():
                yield
            # Other jobs in between may have left more free pages.
            given_back = max(0, free - self._evictor.on_disk.free_pages())
            return protocol.Collected(tally.entries, tally.bytes, tally.files, dict(tally.reasons), given_back)

        if not self._trust.administers(caller.uid):
            return Reply(_NOT_PERMITTED)
        return self._writer.call_by_steps(collect(), caller.uid)

    def _sync(self, caller: Caller, message: protocol.Sync) -> Answer:
        return self._writer.call_by_steps(self._writer.catch_up(), caller.uid, in_order=True)

    def _zero_statistics(self, caller: Caller, message: protocol.ZeroStatistics) -> Answer:
        def zero() -> protocol.Message:
            with self._store.transaction():
                self._store.zero_statistics()
            return protocol.Done()

        return self._writer.call(zero, caller.uid) if self._trust.administers(caller.uid) else Reply(_NOT_PERMITTED)

    def _status(self, caller: Caller, message: protocol.AskStatus) -> Answer:
        totals = self._store.reader.totals()
        settings = self._settings.now
        free, to_stay_free = self._evictor.on_disk.seen
        facts: dict[str, protocol.Scalar] = {
            "pid": os.getpid(),
            "version": __version__,
            "uptime_seconds": round(time.monotonic() - self._started, 3),
            "connections": self._connections(),
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

    def _stop_daemon(self, caller: Caller, message: protocol.Stop) -> Answer:
        if not self._trust.administers(caller.uid):
            return Reply(_NOT_PERMITTED)
        self._stop(f"asked by process {caller.pid} ({caller.program!r}): {message.reason[:200]!r}")
        return Reply(protocol.Done())

    def _may_change(self, caller: Caller, entry: Entry) -> bool:
        return entry.writer_uid == caller.uid or self._trust.administers(caller.uid)


def removed(store: Store, entries: Sequence[Entry]) -> protocol.Removed:
    """Remove entries; return how many entries and bytes that removed."""
    before = store.totals_now()
    store.let_go(entries)
    after = store.totals_now()
    return protocol.Removed(before["entries"] - after["entries"], before["bytes"] - after["bytes"])


def _added(one: protocol.Removed, other: protocol.Removed) -> protocol.Removed:
    return protocol.Removed(one.entries + other.entries, one.bytes + other.bytes)
