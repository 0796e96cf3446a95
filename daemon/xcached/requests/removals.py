"""The requests that remove entries: some of them, or all that a user may remove."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from xcache.wire import commands, protocol
from xcached.caller import Answer, Caller, Handlers
from xcached.requests.strikes import Strikes
from xcached.requests.trust import Trust
from xcached.store.entries import EntryKey
from xcached.store.store import Store
from xcached.store.writer import WriterThread
from xcached.toolchains.rows import ToolchainRows

# Few enough that other users' jobs do not wait long.
_REMOVED_PER_STEP = 100


class Removals:
    """Has the writer thread remove entries. A user who is no administrator removes only their own."""

    def __init__(
        self,
        store: Store,
        writer: WriterThread,
        trust: Trust,
        rows: ToolchainRows,
        strikes: Strikes,
        clear_other_data: Sequence[Callable[[int | None], None]],
    ) -> None:
        """Each function in ``clear_other_data`` clears one kind of data other than entries, on the writer thread."""
        self._store = store
        self._writer = writer
        self._trust = trust
        self._rows = rows
        self._strikes = strikes
        self._clear_other_data = clear_other_data
        self.handlers: Handlers = {commands.Remove: self._remove, commands.Clear: self._clear}

    def _remove(self, caller: Caller, message: commands.Remove) -> Answer:
        def remove() -> Generator[None, None, protocol.Message]:
            done = commands.Removed(0, 0)
            for start in range(0, len(message.keys), _REMOVED_PER_STEP):
                keys = message.keys[start : start + _REMOVED_PER_STEP]
                under = [entry for key in keys for entry in self._store.entries_under(key)]
                mine = [entry for entry in under if self._trust.may_change(caller.uid, entry.writer_uid)]
                done = _added(done, removed(self._store, mine, "invalidate" if message.reason else "rm"))
                yield
            if message.reason and done.entries:
                self._rows.invalidated(message.reason, done, caller.uid)
            return done

        return self._writer.call_by_steps(remove(), caller.uid, in_order=True)

    def _clear(self, caller: Caller, message: commands.Clear) -> Answer:
        uid = self._trust.visible_to(caller.uid)

        def clear() -> Generator[None, None, protocol.Message]:
            # Entries first, since removing them makes room on a full disk.
            entries, gone = self._store.entries_of(uid), commands.Removed(0, 0)
            for start in range(0, len(entries), _REMOVED_PER_STEP):
                gone = _added(gone, removed(self._store, entries[start : start + _REMOVED_PER_STEP], "clear"))
                yield
            self._store.free(lambda: self._store.forget_marks(uid))
            for clear_data in self._clear_other_data:
                clear_data(uid)
            return gone

        done = self._writer.call_by_steps(clear(), caller.uid, in_order=True)
        self._strikes.clear(uid)
        return done


def removed(store: Store, entries: Sequence[EntryKey], command: str = "rm") -> commands.Removed:
    """Remove entries as a command demands; return how many entries and bytes that removed."""
    before = store.totals_now()
    store.let_go(entries, f"removed: {command}")
    after = store.totals_now()
    return commands.Removed(before["entries"] - after["entries"], before["bytes"] - after["bytes"])


def _added(one: commands.Removed, other: commands.Removed) -> commands.Removed:
    return commands.Removed(one.entries + other.entries, one.bytes + other.bytes)
