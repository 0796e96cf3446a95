"""The evictions that keep a store within its limits. Belongs to the writer thread.

Everything here runs in small steps, so that no request waits long for the writer thread.
"""

from __future__ import annotations

import itertools
import logging
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from xcache.errors import RefusedError
from xcached.store.candidates import EVICTED_AT_ONCE, Candidates, EntryAtUse
from xcached.store.database import is_full
from xcached.store.disk import ENOUGH_TO_JUDGE_BYTES
from xcached.store.entries import EntryKey
from xcached.store.eviction import Excess, choose
from xcached.store.limits import Limits
from xcached.store.pins import Pins
from xcached.store.shortage import Shortage
from xcached.store.store import Store

logger = logging.getLogger("xcached")

# Entries evicted in one rehearsal; more go only after a limit was lowered by a lot.
_MOST_REHEARSED = 2048
# Bytes of an entry's row and index entries, for an entry of any size.
_ROW_BYTES = 1600
# Tolerated difference between the pages a rehearsal computed and those that came free.
_PAGES_TOLERANCE_BYTES = 256 * 1024
# A plan for the disk may turn out to free a little less than was computed; then the rest is planned again.
_ADMISSION_ATTEMPTS = 3


class Freed(NamedTuple):
    """One step's evictions: entries, the bytes of their contents, the files among them, and the reason."""

    entries: int
    bytes: int
    files: int
    reason: str


class ExceededLimit(NamedTuple):
    """An exceeded limit: the reason, the user whose entries have to go (None: anybody's), and by how much."""

    reason: str
    uid: int | None
    excess: Excess
    # Nobody else has more than a fair share, and this user has it in pinned entries.
    is_pinned: bool = False


class Batch(NamedTuple):
    """The entries to evict next, and why; and the newcomers among them, with their order of use."""

    reason: str
    going: list[EntryAtUse]
    newcomers: dict[EntryKey, int]


class Plan(NamedTuple):
    """The entries to evict now, and the newcomers to evict later."""

    going: list[Batch]
    newcomers: dict[EntryKey, int]
    # Whether every limit is kept then.
    suffices: bool


class Evictor:
    """Keeps a store within its limits."""

    def __init__(
        self,
        store: Store,
        stale: Callable[[], Collection[tuple[str, int]]] = frozenset,
        trim_other_data: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Each of ``trim_other_data`` cuts one kind of data that is not entries down to its share of the store.

        ``stale()`` returns each stale toolchain with a writer whose entries of it are stale.
        """
        self._store = store
        self._db = store.database.writing
        self._candidates = Candidates(self._db, stale)
        self.shortage = Shortage(store, trim_other_data)
        self.pins = Pins(store)
        # Entries used from this order on are newcomers.
        self._new_from = store.uses.order + 1
        # Newcomers to evict after the next end_grace(), and those whose time has come.
        self._newcomers_for_later: dict[EntryKey, int] = {}
        self._newcomers_due: dict[EntryKey, int] = {}
        # Remaining parts of a plan; other jobs run in between.
        self._planned: deque[Batch] = deque()

    def set_limits(self, limits: Limits) -> None:
        """Change the store's limits."""
        self._store.set_limits(limits)
        self.shortage.set_min_free(limits.min_free)

    @property
    def newcomers_must_go(self) -> bool:
        """Whether some newcomers have to go later."""
        return bool(self._newcomers_for_later)

    def end_grace(self) -> None:
        """Let the newcomers so far be evicted; entries put from now on stay until the next call."""
        self._new_from = self._store.uses.order + 1
        self._newcomers_due |= self._newcomers_for_later
        self._newcomers_for_later.clear()

    def evict_some(self) -> Freed | None:
        """Evict some entries if a limit is exceeded; None if none is, or nothing may go."""
        if (freed := self._go_on()) is not None:
            return freed
        self.shortage.cut_down_other_data()
        lacking = self.shortage.lacking()
        self._let_pins_lapse(lacking)
        if (batch := self._next(lacking)) is not None:
            if self._store.uses.order < self._new_from:
                return self._evict([one.entry for one in batch.going], batch.reason)
            plan = self._plan(batch, lacking)
            self._newcomers_for_later |= plan.newcomers
            self._planned.extend(part for batch in plan.going for part in _in_parts(batch))
            if (freed := self._go_on()) is not None:
                return freed
        self._newcomers_due.clear()
        max_age = self._store.limits.max_age
        if max_age and (old := self._candidates.unused_since(self._store.age_clock.now(max_age) - max_age)):
            return self._evict(old, "age")
        return None

    def _let_pins_lapse(self, lacking: int) -> None:
        """Unpin what a user has beyond a fair share, if others below theirs would have to make the room instead."""
        for too_much in self._exceeded_limits(lacking):
            if too_much.is_pinned and too_much.uid is not None:
                count = self.pins.lapse(too_much.uid, too_much.excess)
                logger.info("%d pins of user %d beyond a fair share lapse", count, too_much.uid)

    def _go_on(self) -> Freed | None:
        """Carry out the next part of a plan; None when none is left."""
        if self._planned and next(self._exceeded_limits(self.shortage.lacking()), None) is None:
            # Another removal has solved it meanwhile.
            self._planned.clear()
        while self._planned:
            part = self._planned.popleft()
            if going := [one.entry for one in part.going if self._may_still_go(one)]:
                return self._evict(going, part.reason)
        return None

    def _may_still_go(self, one: EntryAtUse) -> bool:
        """Return whether an entry may go: unpinned, and neither replaced nor used since it was chosen."""
        sql = "SELECT 1 FROM entries WHERE key = ? AND writer_uid = ? AND used_order = ? AND pinned = 0"
        return self._db.execute(sql, (*one.entry, one.used_order)).fetchone() is not None

    def _next(self, lacking: int, coming: Collection[EntryKey] = (), most: int = EVICTED_AT_ONCE) -> Batch | None:
        """Choose the entries to evict next, newcomers included; ``coming`` is spared when the disk is short.

        The disk lacks ``lacking`` bytes.
        """
        for too_much in self._exceeded_limits(lacking):
            spared = coming if too_much.reason == "disk" else ()
            candidates = self._candidates.of(
                too_much.uid,
                self._newcomers_due,
                # A quota is kept with the user's own entries.
                only_theirs=too_much.reason == "quota",
                # One newcomer may cost many others.
                without_end=self._store.uses.order >= self._new_from,
            )
            candidates = (one for one in candidates if one.subject.entry not in spared)
            chosen = choose(itertools.islice(candidates, most), too_much.excess)
            # Evict newcomers that are due first: with their programs they may free more than was computed.
            due = [one for one in chosen if self._newcomers_due.get(one.entry) == one.used_order]
            if going := due or chosen:
                new = {one.entry: one.used_order for one in going if one.used_order >= self._new_from}
                return Batch(too_much.reason, going, new)
        return None

    def _plan(self, batch: Batch, lacking: int) -> Plan:
        try:
            return self._rehearse(lacking)
        except sqlite3.Error as error:
            if not is_full(error):
                raise
        # Nothing can be rehearsed on a full disk, so the old entries go as they were chosen.
        old = [one for one in batch.going if one.entry not in batch.newcomers]
        return Plan([batch._replace(going=old)] if old else [], batch.newcomers, suffices=False)

    def _rehearse(
        self, lacking: int, put: Callable[[], object] | None = None, coming: Collection[EntryKey] = ()
    ) -> Plan:
        """Decide what to evict, newcomers included, before removing anything: no entry goes for one that cannot stay.

        Evictions are tried out in a transaction that is undone. A newcomer that would have to go is taken out first,
        and the rest is tried again without it. ``put`` writes the rows of the entries ``coming``. The disk lacked
        ``lacking`` bytes at the start; what comes free is computed, because an undone transaction frees nothing.
        """
        newcomers: dict[EntryKey, int] = {}
        while True:
            going: list[Batch] = []
            more, batch, suffices = _MOST_REHEARSED, None, False
            with self._store.rehearsal():
                if put is not None:
                    put()
                pages_before = self.shortage.free_page_bytes()
                files = self._remove_in_rehearsal(list(newcomers))
                while more > 0:
                    left = lacking - files - (self.shortage.free_page_bytes() - pages_before)
                    if (batch := self._next(left, coming, more)) is None or batch.newcomers:
                        suffices = batch is None and left <= 0
                        break
                    files += self._remove_in_rehearsal([one.entry for one in batch.going])
                    going.append(batch)
                    more -= len(batch.going)
            if batch is None or not batch.newcomers:
                return Plan(going, newcomers, suffices)
            newcomers |= batch.newcomers

    def _remove_in_rehearsal(self, entries: Sequence[EntryKey]) -> int:
        """Within a rehearsal: remove entries; return how many bytes of files that would free."""
        sizes: dict[str, int] = {}
        for entry in entries:
            sizes |= self._db.execute(
                "SELECT digest, blobs.stored_size FROM entries JOIN blobs ON blobs.digest = entries.blob"
                " WHERE key = :key AND writer_uid = :uid AND content IS NULL UNION ALL"
                " SELECT blobs.digest, blobs.stored_size FROM entries JOIN programs"
                " ON programs.digest = program AND programs.writer_uid = entries.writer_uid"
                " JOIN blobs ON blobs.digest = programs.blob"
                " WHERE key = :key AND entries.writer_uid = :uid AND content IS NULL",
                {"key": entry.key, "uid": entry.writer_uid},
            ).fetchall()
        return sum(sizes.get(digest, 0) for digest in set(self._store.remove(entries)))

    def admit(self, coming: Mapping[EntryKey, int], write: Callable[[], object]) -> None:
        """Make room on the disk for entries of these sizes about to be written; unsettled copies do not count yet.

        Raise RefusedError and evict nothing if that cannot make room enough, or if one of them would have to go.
        ``write`` writes their rows.
        """
        limits, sizes = self._store.limits, Counter[int]()
        for entry, size in coming.items():
            sizes[entry.writer_uid] += size
        pinned = self.pins.protected(sizes, limits)
        together = sizes.total()
        _require_fit(together, limits.max_size, pinned.bytes, "the store", "too large", "store full")
        for uid, size in sizes.items():
            _require_fit(size, limits.user_quota, self.pins.of(uid).bytes, "one user's entries", "quota", "quota")
        if limits.max_entries and pinned.entries + len(coming) > limits.max_entries:
            told = f"{len(coming)} more than {pinned.entries} pinned ones are more than max_entries allows"
            raise RefusedError("store full", told)
        self._make_room_on_disk(coming.keys(), together, write)
        self.shortage.writes(together)

    def is_short_of(self, size: int) -> bool:
        """Return whether entries have to go before this many bytes can be written."""
        return self.shortage.lacking(size) > 0

    def _make_room_on_disk(self, coming: Collection[EntryKey], needed: int, write: Callable[[], object]) -> None:
        if self.shortage.lacking(needed) <= 0:
            self.shortage.give_back_for_file(needed)
            return
        self.shortage.cut_down_other_data(needed)
        if self.shortage.checkpoint_is_blocked:
            raise RefusedError(
                "store busy", "another process has kept a read transaction on the database open for too long"
            )
        lacking = self.shortage.lacking(needed)
        gone = Tally()
        # Space that other programs filled is regained in the background, not while a client waits.
        for _ in range(_ADMISSION_ATTEMPTS):
            if not 0 < lacking <= needed + ENOUGH_TO_JUDGE_BYTES or self.shortage.evictions_are_useless:
                break
            self._let_pins_lapse(lacking)
            plan = self._rehearse(lacking, write, coming)
            if not plan.suffices or plan.newcomers:
                break
            # In one turn: other users' writes must not take the space in between.
            for part in (part for found in plan.going for part in _in_parts(found)):
                if self.shortage.lacking(needed) > 0:
                    gone.add(self._evict([one.entry for one in part.going], part.reason, keeps_pages=True))
            self.shortage.give_back_for_file(needed)
            lacking = self.shortage.lacking(needed) - _PAGES_TOLERANCE_BYTES
        if gone.entries:
            logger.info("evicted %s for a put", gone)
        if lacking > 0:
            raise RefusedError("disk full", f"{needed} bytes more would leave less free than min_free demands")

    def _exceeded_limits(self, lacking: int) -> Iterator[ExceededLimit]:
        """Yield every exceeded limit; the one that takes the fewest evictions comes first."""
        limits = self._store.limits
        if limits.user_quota:
            for uid in list(self._store.grown):
                theirs, entries = self._taken_by(uid)
                surplus = Excess(theirs - limits.user_quota, entries - limits.most_entries_of_one_user())
                if surplus:
                    yield ExceededLimit("quota", uid, surplus)
                else:
                    self._store.grown.discard(uid)
        totals = self._store.totals_now()
        # In a shared store each user's other data has limits of its own, so no entry is evicted for it.
        counted = totals["bytes"] + totals["text_bytes"] + (0 if self._store.shared else totals["other_bytes"])
        if limits.max_size and (excess := counted - limits.max_size) > 0:
            yield self._whose_entries_go("size", "bytes", excess)
        if (most := limits.most_entries()) and (excess := totals["entries"] - most) > 0:
            yield self._whose_entries_go("count", "entries", excess)
        if lacking > 0 and not self.shortage.evictions_are_useless:
            yield self._whose_entries_go("disk", "bytes", min(lacking, ENOUGH_TO_JUDGE_BYTES), _ROW_BYTES)

    def _whose_entries_go(self, reason: str, what: str, excess: int, row: int = 0) -> ExceededLimit:
        """In a shared store, the user who has the most makes room, down to a fair share.

        If the store has one user, or everything is pinned, the limit names no user. Each entry counts for ``row`` bytes
        more.
        """
        uid, over = None, excess
        if self._store.shared:
            sql = f"SELECT uid, {what} + entries * ? FROM users ORDER BY 2 DESC"  # noqa: S608 - a name of our own
            rows = self._db.execute(sql, (row,)).fetchall()
            fair_share = sum(amount for _, amount in rows) // max(1, len(rows))
            # Users who just put something pay before others, so that nobody's entry goes for one that cannot stay.
            sql = "SELECT DISTINCT writer_uid FROM entries WHERE pinned = 0 AND used_order >= ?"
            recent_writers = {uid for (uid,) in self._db.execute(sql, (self._new_from,))}
            rows.sort(key=lambda row: not (row[0] in recent_writers and row[1] > fair_share))
            pinned = {uid: getattr(theirs, what) + theirs.entries * row for uid, theirs in self.pins.by_user().items()}
            able = ((uid, amount) for uid, amount in rows if amount > pinned.get(uid, 0))
            uid, amount = next(able, (None, 0))
            if amount <= fair_share:
                holders = ((uid, amount) for uid, amount in rows if amount > fair_share and uid in pinned)
                if (holder := next(holders, None)) is not None:
                    return ExceededLimit(
                        reason, holder[0], Excess(**{what: min(excess, holder[1] - fair_share)}), is_pinned=True
                    )
            if uid is not None:
                over = min(excess, max(1, amount - fair_share))
        return ExceededLimit(reason, uid, Excess(**{what: over}))

    def _evict(self, chosen: Sequence[EntryKey], reason: str, *, keeps_pages: bool = False) -> Freed:
        """Evict entries; ``keeps_pages``: leave the freed pages in the database, where the coming entry needs them."""
        before, free_before = self._store.totals_now(), self.shortage.available_bytes() if reason == "disk" else 0
        cause = "too old" if reason == "age" else f"evicted: {reason}"
        files = self._store.let_go(chosen, cause, "evictions")
        for entry in chosen:
            self._newcomers_due.pop(entry, None)
        if reason == "disk":
            self._store.files.deleted.empty_all()
        after = self._store.totals_now()
        freed = Freed(before["entries"] - after["entries"], before["bytes"] - after["bytes"], files, reason)
        if reason == "disk":
            self.shortage.note(freed.bytes, self.shortage.available_bytes() - free_before)
            if not keeps_pages:
                self.shortage.give_back()
        return freed

    def _taken_by(self, uid: int) -> tuple[int, int]:
        """Return the bytes and the number of a user's entries."""
        row = self._db.execute("SELECT bytes, entries FROM users WHERE uid = ?", (uid,)).fetchone()
        return row or (0, 0)


def _require_fit(size: int, limit: int, pinned: int, whose: str, too_large: str, full: str) -> None:
    if limit and size > limit:
        raise RefusedError(too_large, f"{size} bytes are more than {whose} may hold")
    if limit and size + pinned > limit:
        raise RefusedError(full, f"{size} bytes do not fit beside {pinned} pinned bytes")


def _in_parts(batch: Batch) -> Iterator[Batch]:
    for at in range(0, len(batch.going), EVICTED_AT_ONCE):
        yield batch._replace(going=batch.going[at : at + EVICTED_AT_ONCE])


class Tally:
    """The sum of several steps."""

    def __init__(self) -> None:
        self.entries = self.bytes = self.files = 0
        self.reasons: Counter[str] = Counter()

    def add(self, freed: Freed) -> None:
        """Add one step."""
        self.entries += freed.entries
        self.bytes += freed.bytes
        self.files += freed.files
        self.reasons[freed.reason] += freed.entries

    def __str__(self) -> str:
        """Return a line for the log."""
        why = ", ".join(f"{count} by {reason}" for reason, count in sorted(self.reasons.items()))
        entries = "1 entry" if self.entries == 1 else f"{self.entries} entries"
        return f"{entries}, {self.bytes} bytes ({why})"
