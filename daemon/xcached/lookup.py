"""What is stored, for those who may have it: not what they do not trust, what is set aside, or out of date."""

from __future__ import annotations

import time
from functools import partial

from xcache import protocol
from xcached.caller import Caller, Reply
from xcached.quarantine import Quarantine
from xcached.reading import Hit
from xcached.store import Entry, Store
from xcached.toolchains import Toolchains
from xcached.trust import ROOT, Trust
from xcached.writer import WriterThread


class Lookup:
    """Reads the store on the thread that serves."""

    def __init__(
        self,
        store: Store,
        trust: Trust,
        quarantine: Quarantine,
        toolchains: Toolchains,
        writer: WriterThread,
    ) -> None:
        self._store = store
        self._trust = trust
        self._quarantine = quarantine
        self._toolchains = toolchains
        self._writer = writer

    def find(self, caller: Caller, wanted: protocol.Get) -> Reply | None:
        """What is stored, by whoever the caller trusts, or known not to be storable."""
        if not self._store.known.may_hold(wanted.key):
            return None
        hits = self._in_order(caller, wanted.key)
        if hits and hits[0].toolchain in self._toolchains.stale:
            # Who still runs on what is no longer installed compiles, and nobody waits for that.
            return Reply(protocol.Missing(0))
        for hit in hits:
            reply = self.hand_over(caller, wanted.key, hit)
            if reply is not None:
                return reply
        reason = self._store.reading.why_not(wanted.key, lambda writer: self._trust.reads(caller.uid, writer))
        return None if reason is None else Reply(protocol.NotCacheable(reason))

    def expected_seconds(self, caller: Caller, wanted: protocol.Get) -> float | None:
        """How long it took to compile this, by the word of those whom the caller trusts."""
        trusts = (lambda writer: self._trust.reads(caller.uid, writer)) if self._trust.shared else None
        return self._store.reading.expected_seconds(wanted.key, wanted.program_digest, trusts)

    def best(self, caller: Caller, key: str) -> Hit | None:
        """What a caller would get, if it can be loaded without a second thought."""
        # What has a strike is asked for, and loaded by itself: so it is known what a second one is due to.
        if (key, caller.uid) in self._quarantine.struck:
            return None
        hit = next(iter(self._in_order(caller, key)), None)
        return None if hit is None or hit.answer is None or hit.toolchain in self._toolchains.stale else hit

    def hand_over(self, caller: Caller, key: str, hit: Hit) -> Reply | None:
        """The answer; an entry that is found to be damaged is set aside."""
        entry = Entry(key, hit.writer_uid)
        descriptor = None
        wrong = "" if hit.answer else "its row is damaged"
        if not wrong and not hit.is_inline:
            descriptor = self._store.files.open(hit.digest)
            wrong = "its file is gone" if descriptor is None else ""
        if hit.answer is None or wrong:
            self._writer.call(partial(self._quarantine.set_aside, entry, wrong))
            return None
        self._writer.note_use(entry, time.time())
        caller.process.give(key, hit.digest)
        return Reply(hit.answer, () if descriptor is None else (descriptor,))

    def _in_order(self, caller: Caller, key: str) -> list[Hit]:
        """What a caller may have: one's own first, then root's."""
        hits = [hit for hit in self._store.reading.find(key) if self._may_have(caller, hit)]
        return sorted(hits, key=lambda hit: (hit.writer_uid != caller.uid, hit.writer_uid != ROOT))

    def _may_have(self, caller: Caller, hit: Hit) -> bool:
        if (hit.digest, caller.uid) in self._quarantine.barred:
            return False
        return self._trust.reads(caller.uid, hit.writer_uid)
