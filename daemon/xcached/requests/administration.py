"""The requests about the store and the daemon as a whole: report or reset counts, collect garbage, sync, stop."""

from __future__ import annotations

from collections.abc import Callable, Generator

from xcache.wire import commands, protocol
from xcached.caller import Answer, Caller, Handlers, Reply
from xcached.requests.trust import NOT_PERMITTED, Trust
from xcached.requests.watchers import Watchers
from xcached.store.evictor import Evictor, Tally
from xcached.store.store import Store
from xcached.store.writer import WriterThread

_COUNTERS = frozenset(
    {"requests", "hits", "misses", "bytes_read", "compile_seconds", "load_seconds", "saved_seconds", "wait_seconds"}
)
# More than one program has reasons and kinds.
_MOST_COUNTS = 200
_GROUPS = ("uncacheable:", "errors:", "lowerings:", "calls:", "causes:")


class Administration:
    """Answers requests about the whole store; only an administrator may reset counts, collect garbage or stop."""

    def __init__(
        self,
        store: Store,
        evictor: Evictor,
        writer: WriterThread,
        trust: Trust,
        watchers: Watchers,
        stop: Callable[[str], None],
    ) -> None:
        self._store = store
        self._evictor = evictor
        self._writer = writer
        self._trust = trust
        self._watchers = watchers
        self._stop = stop
        self.handlers: Handlers = {
            protocol.Report: self._report,
            commands.CollectGarbage: self._collect_garbage,
            commands.Sync: self._sync,
            commands.ZeroStatistics: self._zero_statistics,
            commands.Stop: self._stop_daemon,
        }

    def _report(self, caller: Caller, message: protocol.Report) -> Answer:
        if len(message.counts) > _MOST_COUNTS:
            return Reply(protocol.Refused("protocol error", f"{len(message.counts)} counts are no program's"))
        counts = {
            name: amount
            for name, amount in message.counts.items()
            if name in _COUNTERS or (name.startswith(_GROUPS) and len(name) < 200 and name.isprintable())
        }
        self._writer.note_counts(counts)
        self._watchers.note_counts(caller, counts)
        return Reply(protocol.Done())

    def _collect_garbage(self, caller: Caller, message: commands.CollectGarbage) -> Answer:
        def collect() -> Generator[None, None, protocol.Message]:
            tally, shortage = Tally(), self._evictor.shortage
            self._evictor.end_grace()
            while (freed := self._evictor.evict_some()) is not None:
                tally.add(freed)
                yield
            shortage.trim_all()
            for count in self._store.sweep_by_steps():
                tally.files += count
                yield
            free = shortage.free_page_bytes()
            while shortage.give_back():
                yield
            # Other jobs in between may have left more free pages.
            given_back = max(0, free - shortage.free_page_bytes())
            return commands.Collected(tally.entries, tally.bytes, tally.files, dict(tally.reasons), given_back)

        if not self._trust.administers(caller.uid):
            return Reply(NOT_PERMITTED)
        return self._writer.call_by_steps(collect(), caller.uid)

    def _sync(self, caller: Caller, message: commands.Sync) -> Answer:
        return self._writer.call_by_steps(self._writer.catch_up(), caller.uid, in_order=True)

    def _zero_statistics(self, caller: Caller, message: commands.ZeroStatistics) -> Answer:
        def zero() -> protocol.Message:
            with self._store.transaction():
                self._store.statistics.zero()
            return protocol.Done()

        return self._writer.call(zero, caller.uid) if self._trust.administers(caller.uid) else Reply(NOT_PERMITTED)

    def _stop_daemon(self, caller: Caller, message: commands.Stop) -> Answer:
        if not self._trust.administers(caller.uid):
            return Reply(NOT_PERMITTED)
        self._stop(f"asked by process {caller.pid} ({caller.program!r}): {message.reason[:200]!r}")
        return Reply(protocol.Done())
