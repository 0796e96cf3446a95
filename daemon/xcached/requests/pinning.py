"""The requests that pin and unpin entries."""

from __future__ import annotations

from collections.abc import Sequence

from xcache.wire import commands, protocol
from xcached.caller import Answer, Caller, Handlers
from xcached.host.reload import LiveSettings
from xcached.requests.trust import Trust
from xcached.store.entries import EntryKey
from xcached.store.pins import Pins, Share
from xcached.store.store import Store
from xcached.store.writer import WriterThread

# One user may pin at most this fraction (1/n) of the store's bytes and entries.
_PIN_DIVISOR = 4


class Pinning:
    """Has the writer thread pin and unpin the entries that a user may change."""

    def __init__(self, store: Store, pins: Pins, settings: LiveSettings, writer: WriterThread, trust: Trust) -> None:
        self._store = store
        self._pins = pins
        self._settings = settings
        self._writer = writer
        self._trust = trust
        self.handlers: Handlers = {commands.Pin: self._pin, commands.Unpin: self._unpin}

    def _pin(self, caller: Caller, message: commands.Pin) -> Answer:
        def pin() -> protocol.Message:
            entries = self._changeable(caller, message.keys)
            return self._pinned(caller, len(entries), self._pins.pin(entries, share))

        limited = self._trust.shared and not self._trust.administers(caller.uid)
        now = self._settings.now
        entries = max(1, now.max_entries // _PIN_DIVISOR) if now.max_entries else 0
        share = Share(entries, now.max_size // _PIN_DIVISOR) if limited else Share()
        return self._writer.call(pin, caller.uid)

    def _unpin(self, caller: Caller, message: commands.Unpin) -> Answer:
        def unpin() -> protocol.Message:
            entries = self._changeable(caller, message.keys)
            return self._pinned(caller, len(entries), self._pins.unpin(entries))

        return self._writer.call(unpin, caller.uid)

    def _pinned(self, caller: Caller, entries: int, changed: int) -> commands.Pinned:
        """Return what changed, and what is pinned now: by this user, or by all users for an administrator."""
        now = self._pins.of_all() if self._trust.administers(caller.uid) else self._pins.of(caller.uid)
        return commands.Pinned(changed, entries - changed, *now)

    def _changeable(self, caller: Caller, keys: Sequence[str]) -> list[EntryKey]:
        """Return the entries under these keys that this user may change."""
        under = [entry for key in keys for entry in self._store.entries_under(key) if self._store.has(entry)]
        return [entry for entry in under if self._trust.may_change(caller.uid, entry.writer_uid)]
