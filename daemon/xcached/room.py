"""Room for what comes: limits, who goes when one is exceeded, and what is pinned. Belongs to the thread that writes.

Everything here is done in small steps, so that whoever waits for the writer never waits for long.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from xcache import protocol
from xcache.errors import RefusedError
from xcached.database import is_full
from xcached.disk import Disk
from xcached.eviction import Candidate, Excess, choose
from xcached.store import LEAST_ROOM, Entry, Store

_EVICTED_AT_ONCE = 64
_PAGES_AT_ONCE, _FEW_PAGES = 512, 16


class Freed(NamedTuple):
    """What one step made room of: entries, and why they went; bytes of contents, and files among them."""

    entries: int
    bytes: int
    files: int
    reason: str


class Standing(NamedTuple):
    """An entry, and when it was used last, in the order of all uses."""

    entry: Entry
    used_order: int


class Pins(NamedTuple):
    """How many entries somebody has pinned, and what they take."""

    entries: int = 0
    bytes: int = 0


class Room:
    """Keeps a store within its limits. ``max_size``, ``max_age`` and quotas are the store's own."""

    def __init__(self, store: Store, max_entries: int = 0, min_free: str = "0") -> None:
        self._store = store
        self._db = store.database.writing
        self._max_entries = max_entries
        self._disk = Disk(store.directory, min_free)
        self._page_size: int = self._db.execute("PRAGMA page_size").fetchone()[0]
        self._pins: dict[int, Pins] = {}
        # Toolchains that are installed nowhere any more.
        self.stale: Callable[[], Collection[str]] = frozenset
        # What was used before this may go; and whether anything is to go that was not.
        self._new_from = store.used_order + 1
        self.waits = False

    def limit(self, max_entries: int, min_free: str) -> None:
        """How many entries there may be from now on, and what is to be left free on the disk."""
        self._max_entries = max_entries
        self._disk = Disk(self._store.directory, min_free)

    @property
    def disk(self) -> tuple[int, int]:
        """What was free on the disk a while ago, and what is to stay free there; of this anybody may ask."""
        return self._disk.seen

    def begin(self) -> None:
        """What is put from now on stays until this is said again, even if it has to go then: others may wait for it."""
        self._new_from = self._store.used_order + 1
        self.waits = False

    def step(self) -> Freed | None:
        """Evict some entries, if there is too much of anything; None when there is not, or nothing that may go."""
        for reason, uid, excess in self._too_much():
            chosen = choose(self._candidates(uid), excess)
            # What has just come takes its place among them, and not that of somebody who is worth more.
            going = [one.entry for one in chosen if one.used_order < self._new_from]
            self.waits |= len(going) < len(chosen)
            if going:
                return self._evict(going, reason)
        if old := self._too_old():
            return self._evict(old, "age")
        return None

    def give_back(self) -> int:
        """Return some of the database's free pages to the file system; how many bytes more can be had in this way."""
        before = self.free_pages()
        if not before:
            return 0
        # Pages that are moved are written to the journal, which cannot grow on a full disk.
        for count in (_PAGES_AT_ONCE, _FEW_PAGES):
            try:
                # It frees one page a step, and execute() takes only one where a statement has no columns.
                self._db.executescript(f"PRAGMA incremental_vacuum({count})")
                break
            except sqlite3.Error as error:
                if not is_full(error):
                    raise
                self._store.database.make_do()
        if left := self.free_pages():
            # One that was not made to give anything back is not asked without an end.
            return left if left < before else 0
        # Until then they are free in the journal only.
        self._store.database.empty_journal()
        return 0

    def keep_reserve(self) -> None:
        """Have some room that is given up when there is no other."""
        self._disk.writes(self._store.database.reserve.keep())

    def admit(self, put: protocol.Put, uid: int) -> None:
        """Make room on the disk for what is about to be written; RefusedError where there is none to be had."""
        together = put.stored_size + put.program_stored_size
        for limit, pinned, whose in (
            (self._store.max_size, self._pinned().bytes, "the store"),
            (self._store.user_quota, self._pinned(uid).bytes, "one user's entries"),
        ):
            if limit and together > limit:
                raise RefusedError("too large", f"{together} bytes are more than {whose} may hold")
            if limit and together + pinned > limit:
                raise RefusedError("store full", f"{together} bytes do not fit beside the {pinned} that are pinned")
        if self._max_entries and self._pinned().entries >= self._max_entries:
            raise RefusedError("store full", f"all of the {self._max_entries} entries there may be are pinned")
        # What others have filled is made room on behind everybody's back, and not while somebody waits.
        while 0 < (lacking := self._lacking(together)) <= together:
            chosen = choose(self._candidates(None), Excess(lacking))
            if not chosen:
                break
            self._evict([one.entry for one in chosen], "disk")
        if self._lacking(together) > 0:
            raise RefusedError("disk full", f"{together} bytes more would leave less free than min_free asks for")
        self._disk.writes(together)

    def pin(self, entries: Iterable[Entry], share: int) -> Pins:
        """Have entries stay whatever the limits say; a user's may take ``share`` bytes (0: no limit of their own)."""
        with self._store.transaction():
            self._set_pinned(entries, 1)
            for uid in {entry.writer_uid for entry in entries}:
                theirs = self._pinned(uid)
                for limit in (self._store.max_size, self._store.user_quota, share):
                    if limit and theirs.bytes > limit:
                        raise RefusedError("store full", f"at most {limit} bytes may be pinned, not {theirs.bytes}")
            everybodys = self._pinned()
            if self._store.max_size and everybodys.bytes > self._store.max_size:
                raise RefusedError("store full", f"{everybodys.bytes} bytes are more than the store may hold")
            if self._max_entries and everybodys.entries > self._max_entries:
                raise RefusedError("store full", f"at most {self._max_entries} entries may be pinned")
        return everybodys

    def unpin(self, entries: Iterable[Entry]) -> Pins:
        """Have them go as all others do."""
        with self._store.transaction():
            self._set_pinned(entries, 0)
        return self._pinned()

    def _too_much(self) -> Iterator[tuple[str, int | None, Excess]]:
        """What there is too much of: why, whose entries are to go, and how much. What shrinks first is said first."""
        if self._store.user_quota:
            if None in self._store.grown:
                self._store.grown.discard(None)
                self._store.grown.update(uid for (uid,) in self._db.execute("SELECT uid FROM users"))
            for uid in [uid for uid in self._store.grown if uid is not None]:
                if (excess := self._bytes_of(uid) - self._store.user_quota) > 0:
                    yield "quota", uid, Excess(excess)
                else:
                    self._store.grown.discard(uid)
        totals = self._store.totals_now()
        if self._store.max_size and (excess := totals["bytes"] - self._store.max_size) > 0:
            yield "size", None, Excess(excess)
        limits = [self._max_entries, max(1, self._store.max_size // LEAST_ROOM) if self._store.max_size else 0]
        if (most := min(filter(None, limits), default=0)) and (excess := totals["entries"] - most) > 0:
            yield "count", None, Excess(entries=excess)
        if (excess := self._lacking()) > 0:
            yield "disk", None, Excess(excess)

    def _lacking(self, needed: int = 0) -> int:
        """Bytes that are not free on the disk although they should be; pages of the database are as good as free."""
        lacking = self._disk.lacking(needed)
        return lacking - self.free_pages() if lacking > 0 else lacking

    def _evict(self, chosen: Sequence[Entry], reason: str) -> Freed:
        before = self._store.totals_now()
        files = self._store.let_go(chosen, "evictions")
        after = self._store.totals_now()
        if reason == "disk":
            self.give_back()
        return Freed(before["entries"] - after["entries"], before["bytes"] - after["bytes"], files, reason)

    def _candidates(self, uid: int | None) -> Iterator[Candidate[Standing]]:
        """Who goes first, of one user or of all, as an index has them: no more than go at once.

        What nobody can be served any more goes ahead of everything else, however much it is worth, and in no order:
        to sort what an upgrade of jaxlib left would cost as much as there is of it.
        """
        stale = tuple(self.stale())
        marks = ", ".join("?" * len(stale))
        found = 0
        if stale:
            useless = self._rows(f"toolchain_component IN ({marks})", stale, uid, "")
            for found, candidate in enumerate(useless, start=1):  # noqa: B007 - how many there were
                yield candidate
        # Where there may be more of those, the next step has them.
        if found < _EVICTED_AT_ONCE:
            others = f"toolchain_component NOT IN ({marks})" if stale else "1"
            yield from self._rows(others, stale, uid, "ORDER BY entries.worth, entries.used_order")

    def _rows(self, which: str, values: Sequence[str], uid: int | None, sorting: str) -> Iterator[Candidate[Standing]]:
        """A program that others have as well is counted as free with the last of them."""
        more = _EVICTED_AT_ONCE + 1
        cursor = self._db.execute(
            # CROSS JOIN keeps the order of the tables: an index of worth, then two look-ups for each row that is taken.
            "SELECT entries.key, entries.writer_uid, used_order, entries.stored_size, program, blobs.stored_size,"  # noqa: S608
            " (SELECT count(*) FROM (SELECT 1 FROM entries other WHERE other.program = entries.program"
            " AND other.writer_uid = entries.writer_uid LIMIT ?))"
            " FROM entries CROSS JOIN programs"
            " ON programs.digest = entries.program AND programs.writer_uid = entries.writer_uid"
            " CROSS JOIN blobs ON blobs.digest = programs.blob"
            f" WHERE entries.pinned = 0 AND {which} {'' if uid is None else 'AND entries.writer_uid = ?'}"
            f" {sorting} LIMIT ?",
            (more, *values, *(() if uid is None else (uid,)), _EVICTED_AT_ONCE),
        )
        # Row by row, as they are taken; and done with before anything is changed.
        with contextlib.closing(cursor):
            for key, writer, order, size, program, program_size, sharers in cursor:
                standing = Standing(Entry(key, writer), order)
                yield Candidate(standing, size, f"{writer} {program}", program_size, sharers)

    def _too_old(self) -> list[Entry]:
        """Entries that nobody has used for too long."""
        if not self._store.max_age:
            return []
        oldest = self._store.age_clock.now() - self._store.max_age
        cursor = self._db.execute(
            "SELECT key, writer_uid, used_clock FROM entries WHERE pinned = 0 ORDER BY used_order LIMIT ?",
            (_EVICTED_AT_ONCE,),
        )
        with contextlib.closing(cursor):
            return [Entry(*row[:2]) for row in itertools.takewhile(lambda row: row[2] < oldest, cursor)]

    def _set_pinned(self, entries: Iterable[Entry], pinned: int) -> None:
        self._db.executemany(
            "UPDATE entries SET pinned = ? WHERE key = ? AND writer_uid = ?", [(pinned, *entry) for entry in entries]
        )
        self._store.pins_changed = True

    def _pinned(self, uid: int | None = None) -> Pins:
        """What is pinned, by one user or by all."""
        if self._store.pins_changed:
            rows = self._db.execute(
                "SELECT writer_uid, count(*), sum(footprint) FROM entries WHERE pinned = 1 GROUP BY writer_uid"
            )
            self._pins = {user: Pins(*pins) for user, *pins in rows}
            self._store.pins_changed = self._db.in_transaction
        if uid is not None:
            return self._pins.get(uid, Pins())
        return Pins(sum(pins.entries for pins in self._pins.values()), sum(pins.bytes for pins in self._pins.values()))

    def _bytes_of(self, uid: int) -> int:
        row = self._db.execute("SELECT bytes FROM users WHERE uid = ?", (uid,)).fetchone()
        return row[0] if row else 0

    def free_pages(self) -> int:
        """Bytes of the database that hold nothing."""
        count: int = self._db.execute("PRAGMA freelist_count").fetchone()[0]
        return count * self._page_size


class Tally:
    """What several steps freed together."""

    def __init__(self) -> None:
        self.entries = self.bytes = self.files = 0
        self.reasons: Counter[str] = Counter()

    def add(self, freed: Freed) -> None:
        """One more step."""
        self.entries += freed.entries
        self.bytes += freed.bytes
        self.files += freed.files
        self.reasons[freed.reason] += freed.entries

    def __str__(self) -> str:
        """For the log."""
        why = ", ".join(f"{count} by {reason}" for reason, count in sorted(self.reasons.items()))
        return f"{self.entries} entries, {self.bytes} bytes ({why})"
