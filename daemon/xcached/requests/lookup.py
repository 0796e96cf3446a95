"""Finds stored entries and aliases for a client: by writers it trusts, and neither quarantined nor stale."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import partial

from xcache.wire import protocol
from xcache.wire.hashing import is_digest
from xcache.wire.ledger import with_detail
from xcache.wire.ownership import is_signer
from xcached.caller import Caller, Reply
from xcached.requests.process_ends import ProcessEnds
from xcached.requests.strikes import Strikes
from xcached.requests.trust import ROOT, Trust
from xcached.store.entries import EntryKey
from xcached.store.quarantine import Quarantine
from xcached.store.reader import AliasRow, Hit, Traces
from xcached.store.store import Store
from xcached.store.writer import WriterThread
from xcached.toolchains.toolchains import Toolchains

# The columns of an entry of the same program that the client compares with its own request.
_COMPARED = "key, options_component, flags_component, platform_component, toolchain_component"


class Lookup:
    """Reads the store on the serving thread."""

    def __init__(
        self,
        store: Store,
        trust: Trust,
        quarantine: Quarantine,
        strikes: Strikes,
        endings: ProcessEnds,
        toolchains: Toolchains,
        writer: WriterThread,
    ) -> None:
        self._store = store
        self._trust = trust
        self._quarantine = quarantine
        self._strikes = strikes
        self._endings = endings
        self._toolchains = toolchains
        self._writer = writer

    def find(self, caller: Caller, wanted: protocol.Get) -> Reply | Traces:
        """Return an entry, or a mark that there can be none, by a writer the client trusts; else what the store has."""
        if caller.process.began_after is None:
            caller.process.began_after = self._store.reader.newest_number()
        hits = [hit for hit in self.readable(caller, wanted.key) if hit.digest != wanted.unusable]
        if hits and self._toolchains.is_stale(hits[0].toolchain, caller.uid):
            # The program runs on a toolchain that is gone: it compiles, and nobody needs to wait for the result.
            return Reply(protocol.Missing(0, "stale"))
        for hit in hits:
            reply = self.hand_over(caller, wanted.key, hit)
            if reply is not None:
                return reply
        reader = self._store.reader
        traces = reader.traces_of(wanted.key, wanted.program_digest, wanted.module_name)
        if traces.of_mark:
            reason = reader.why_not(wanted.key, lambda writer: self._trust.reads(caller.uid, writer))
            if reason is not None:
                return Reply(protocol.NotCacheable(reason))
        return traces

    def found(self, caller: Caller, wanted: protocol.Get) -> Reply | None:
        """Return what ``find`` answers; None if that is no answer."""
        found = self.find(caller, wanted)
        return found if isinstance(found, Reply) else None

    def why_not_here(self, caller: Caller, key: str) -> str | None:
        """Return why the client would get no entry from here, None if it would, and "" if there is no reason.

        Nothing is counted or set aside, as ``find`` does.
        """
        hits = self.readable(caller, key)
        if hits and self._toolchains.is_stale(hits[0].toolchain, caller.uid):
            return "stale"
        if any(hit.is_sound and self._has_content(hit) for hit in hits):
            return None
        reader = self._store.reader
        traces = reader.traces_of(key, "", "")
        if traces.of_mark and reader.why_not(key, lambda writer: self._trust.reads(caller.uid, writer)) is not None:
            return "not cacheable"
        cause, _ = self.why_missing(caller, protocol.Get(key, 0.0, "", ""), traces)
        return "" if cause in ("new", "other program") else cause

    def _has_content(self, hit: Hit) -> bool:
        return hit.inline_bytes is not None or self._store.files.path(hit.digest).exists()

    def why_missing(self, caller: Caller, wanted: protocol.Get, traces: Traces) -> tuple[str, list[str] | None]:
        """Return the cause of a miss, and what is known of the newest entry of the program, or else of the name.

        What was stored after the process began explains nothing: the program is new to the store, and so are these.
        """
        if not any(traces):
            return "new", None
        reader, key, program, name = self._store.reader, wanted.key, wanted.program_digest, wanted.module_name
        hits = reader.find(key) if traces.of_key else []
        if any(hit.digest == wanted.unusable for hit in hits):
            return "unusable", None
        writers = self._trust.writers(
            caller.uid,
            lambda: {
                *reader.writers("compile_times", key=key),
                *reader.writers("entries", program=program),
                *reader.writers("entries", module_name=name),
            },
        )
        if any(self._trust.reads(caller.uid, hit.writer_uid) for hit in hits):
            # It is barred for this reader, or was just found to be damaged.
            return "set aside", None
        same_program = nearest = None
        newest = caller.process.began_after or 0
        if traces.of_program:
            same_program = nearest = reader.newest_entry(_COMPARED, traces.of_program, writers, newest, program=program)
        if nearest is None and traces.of_name:
            nearest = reader.newest_entry("key", traces.of_name, writers, newest, module_name=name)
        cause = (traces.of_end and reader.why_gone(key, writers)) or (self._not_trusted(hits) if hits else "")
        if not cause and same_program is None:
            cause = "new" if nearest is None else "other program"
        elif not cause and same_program is not None and self._toolchains.is_stale(same_program[-1], caller.uid):
            cause = "stale"
        return cause, nearest

    def _not_trusted(self, hits: Iterable[Hit]) -> str:
        signers = self._trust.signers
        signed = (hit.writer_uid for hit in hits if is_signer(hit.writer_uid))
        why = next((why for uid in signed if signers and (why := signers.why_not(uid))), "")
        return with_detail("not trusted", why) if why else "not trusted"

    def expected_seconds(self, caller: Caller, wanted: protocol.Get) -> float | None:
        """Return the seconds of the last compile, as reported by writers the client trusts."""
        reader, key, program = self._store.reader, wanted.key, wanted.program_digest
        writers = self._trust.writers(
            caller.uid, lambda: {*reader.writers("compile_times", key=key), *reader.writers("entries", program=program)}
        )
        return reader.expected_seconds(key, program, writers)

    def to_load_ahead(self, caller: Caller, key: str) -> Hit | None:
        """Return the entry the client would get, unless it must not be loaded ahead."""
        # A suspected entry is loaded only on request, so that a second crash is clearly its doing.
        if self._strikes.suspects(key, caller.uid):
            return None
        hit = next(iter(self.readable(caller, key)), None)
        return hit if hit and hit.is_sound and not self._toolchains.is_stale(hit.toolchain, caller.uid) else None

    def alias(self, caller: Caller, structure: str) -> protocol.Alias | None:
        """Return the alias of a structure, unless the client could get no entry of its program."""
        row = self._best_alias(caller, structure)
        found = row and self._store.reader.alias(row.rowid)
        return found if found and self._has_entry(caller, found.program) else None

    def structures(self, caller: Caller) -> bytes | None:
        """Return the first bytes of all structures whose alias the client may read; None if there are too many."""
        reader = self._store.reader
        writers = self._trust.writers(caller.uid, lambda: reader.writers("aliases"))
        found = reader.structures(writers, protocol.MAX_STRUCTURES + 1)
        if len(found) > protocol.MAX_STRUCTURES:
            return None
        return b"".join(map(protocol.beginning, filter(is_digest, found)))

    def aliases_of(self, caller: Caller, programs: Iterable[str], most: int) -> Iterator[protocol.Alias]:
        """Yield the newest aliases, up to ``most`` each, of programs of which the client can get entries."""
        reader = self._store.reader
        for program in programs:
            writers = self._trust.writers(caller.uid, partial(reader.writers, "aliases", program=program))
            rows = (
                row
                for row in reader.alias_rows_of(program, writers)
                if row.writer_uid == caller.uid or self._best_alias(caller, row.structure) == row
            )
            for row in itertools.islice(rows, most):
                if (found := reader.alias(row.rowid)) is not None:
                    yield found

    def _best_alias(self, caller: Caller, structure: str) -> AliasRow | None:
        """Return the alias to use of a structure.

        A client's own hides all others, because they may be wrong ones that it has replaced.
        """
        rows = self._store.reader.alias_rows(structure)
        readable = [row for row in rows if self._trust.reads(caller.uid, row.writer_uid)]
        return min(readable, key=partial(_rank, caller), default=None)

    def _has_entry(self, caller: Caller, program: str) -> bool:
        reader = self._store.reader
        writers = self._trust.writers(caller.uid, partial(reader.writers, "entries", program=program))
        toolchains = reader.toolchains_of(program, writers)
        return not all(self._toolchains.is_stale(toolchain, caller.uid) for toolchain in toolchains)

    def hand_over(self, caller: Caller, key: str, hit: Hit, *, ahead: bool = False) -> Reply | None:
        """Return the answer with the entry; None, and the entry is quarantined, if it is damaged.

        ``ahead``: the client has not asked for it. It is used only when the client begins to load it.
        """
        entry = EntryKey(key, hit.writer_uid)
        place = payload = None
        wrong, lost = "" if hit.is_sound else "its row is damaged", False
        if not wrong and hit.inline_bytes is None:
            place = self._store.files.open(hit.digest)
            lost = place is None
            wrong = "its file is gone" if lost else ""
        if wrong:
            work = partial(self._quarantine.set_aside_if_same, entry, hit.digest, wrong, lost=lost)
            self._writer.note(work, caller.uid)
            return None
        if hit.inline_bytes is not None and (payload := self._store.reader.content(hit.digest)) is None:
            # The writer thread has removed it at this moment.
            return None
        if not ahead:
            self.note_use(entry)
        # Watch from now on: the process may end as soon as it loads this.
        self._endings.watch(caller.process)
        caller.process.give(key, hit.digest, hit.writer_uid if ahead else None)
        if place is None:
            return Reply(hit.answer(payload))
        return Reply(hit.answer(None)._replace(offset=place.offset), (place.descriptor,))

    def note_use(self, entry: EntryKey) -> None:
        """Note a use of an entry."""
        self._writer.note_use(entry, self._store.time_of_use())

    def readable(self, caller: Caller, key: str) -> list[Hit]:
        """Return the entries the client may have: its own first, then root's."""
        hits = [hit for hit in self._store.reader.find(key) if self._may_have(caller, hit)]
        return sorted(hits, key=partial(_rank, caller))

    def _may_have(self, caller: Caller, hit: Hit) -> bool:
        if self._strikes.bars(hit.digest, caller.uid):
            return False
        return self._trust.reads(caller.uid, hit.writer_uid)


def _rank(caller: Caller, found: Hit | AliasRow) -> tuple[bool, bool]:
    """Rank what several writers have: the client's own comes first, then root's."""
    return found.writer_uid != caller.uid, found.writer_uid != ROOT
