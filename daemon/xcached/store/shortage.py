"""A disk short of space: how much is lacking, and what is cut down before any entry. Belongs to the writer thread."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Sequence

from xcache.errors import RefusedError
from xcached.store.database import is_full
from xcached.store.disk import Disk, Progress
from xcached.store.store import Store

_PAGES_PER_STEP, _FEW_PAGES = 512, 16
# The journal may take at most this fraction (1/n) of the space that must stay free.
_JOURNAL_DIVISOR = 4
# The disk is asked again when the journal has grown by this much.
_JOURNAL_GROWTH_BYTES = 1024**2


class Shortage:
    """Computes how much free space the disk lacks, not counting the journal, which shrinks again."""

    def __init__(self, store: Store, trim_other_data: Sequence[Callable[[], None]] = ()) -> None:
        """Each of ``trim_other_data`` cuts one kind of data that is not entries down to its share of the store."""
        self._store = store
        self._db = store.database.writing
        self._page_size: int = self._db.execute("PRAGMA page_size").fetchone()[0]
        self._trim_other_data = trim_other_data
        # Bytes of data that is not entries, as of the last look.
        self._other_bytes: int = store.totals_now()["other_bytes"]
        self._progress = Progress()
        # Whether another process reads the database in one long transaction, so that the journal only grows.
        self.checkpoint_is_blocked = False
        # The journal's size when the disk was last asked.
        self._journal_bytes = 0
        self.set_min_free(store.limits.min_free)

    def set_min_free(self, min_free: str) -> None:
        """Change how much must stay free."""
        self._disk = Disk(self._store.files.disk, min_free, self._reclaimable)

    @property
    def seen(self) -> tuple[int, int]:
        """The bytes free a while ago, and those that must stay free; any thread may ask."""
        return self._disk.seen

    @property
    def evictions_are_useless(self) -> bool:
        """Whether evictions gain the disk nothing."""
        return self.checkpoint_is_blocked or self._progress.stands_still()

    def lacking(self, needed: int = 0) -> int:
        """Return how many bytes too few are free once ``needed`` more are written; 0 or less if enough are."""
        if self._store.database.sizes()[0] > self._journal_bytes + _JOURNAL_GROWTH_BYTES:
            # It grows by several times what is put.
            self._disk.ask()
        lacking = self._disk.lacking(needed)
        if lacking > 0 and self._store.files.deleted.empty_all():
            # Deleted files that readers hold open go before entries do.
            lacking = self._disk.lacking(needed)
        return lacking

    def writes(self, size: int) -> None:
        """Count bytes that are being written."""
        self._disk.writes(size)

    def available_bytes(self) -> int:
        """Return the bytes that are free or can be had back."""
        return self._disk.ask()

    def note(self, evicted: int, came_free: int) -> None:
        """Add an eviction's bytes, and the bytes that the disk gained."""
        self._progress.note(evicted, came_free)

    def cut_down_other_data(self, needed: int = 0) -> None:
        """On a disk short of space, cut down the data that is not entries before any entry goes.

        Nothing is cut down for ``needed`` bytes that would not fit even if everything went.
        """
        totals = self._store.totals_now()
        # Rows are written twice: to the journal and to the database.
        self._disk.writes(2 * max(0, totals["other_bytes"] - self._other_bytes))
        self._other_bytes = totals["other_bytes"]
        lacking = self.lacking(needed)
        free, to_stay_free = self._disk.seen
        self.checkpoint_is_blocked = False
        if free < to_stay_free or lacking > 0:
            # The space that the journal has taken does not count as lacking, but other programs miss it.
            try:
                self._store.database.shrink_journal(to_stay_free // _JOURNAL_DIVISOR)
            except RefusedError:
                self.checkpoint_is_blocked = True
            lacking = self.lacking(needed)
        if lacking <= 0 or self.checkpoint_is_blocked:
            self._store.bytes_when_disk_ran_short = None
            return
        # Shares are computed from what the store has, not from the free space: other programs may have filled that.
        taken = totals["bytes"] + totals["text_bytes"] + totals["other_bytes"]
        if needed and lacking > taken:
            return
        self._store.bytes_when_disk_ran_short = taken
        self.trim_all()

    def trim_all(self) -> None:
        """Cut each kind of data that is not entries down to its share of the store."""
        for trim in self._trim_other_data:
            trim()

    def give_back(self) -> int:
        """Return some free pages of the database to the file system; return how many bytes more can be returned."""
        before = self.free_page_bytes()
        if not before:
            return 0
        # Moving pages writes to the journal, which cannot grow on a full disk.
        for count in (_PAGES_PER_STEP, _FEW_PAGES):
            try:
                # The pragma frees one page per step, and execute() steps only once through a statement without columns.
                self._db.executescript(f"PRAGMA incremental_vacuum({count})")
                break
            except sqlite3.Error as error:
                if not is_full(error):
                    raise
                self._store.database.use_reserve()
        if left := self.free_page_bytes():
            # Stop if nothing was returned: a database made without incremental vacuum never returns pages.
            return left if left < before else 0
        # The pages leave the file only with a checkpoint.
        self._store.database.checkpoint()
        return 0

    def shrink_journal(self) -> None:
        """When idle on a disk short of space, empty the journal."""
        free, to_stay_free = self._disk.seen
        if free < to_stay_free:
            with contextlib.suppress(RefusedError):
                self._store.database.shrink_journal(0)

    def give_back_for_file(self, needed: int) -> None:
        """Return free pages until a file of ``needed`` bytes has room: it cannot use the database's pages."""
        if self._disk.has_room_for(needed):
            return
        while self.give_back() and not self._disk.has_room_for(needed):
            self._disk.ask()
        with contextlib.suppress(RefusedError):
            self._store.database.shrink_journal(0)
        self._disk.ask()

    def keep_reserve(self) -> None:
        """Make the reserve again if there is room for it."""
        self._disk.writes(self._store.database.keep_reserve())

    def free_page_bytes(self) -> int:
        """Return the bytes of the database's free pages."""
        count: int = self._db.execute("PRAGMA freelist_count").fetchone()[0]
        return count * self._page_size

    def _reclaimable(self, to_stay_free: int) -> int:
        """Return what the disk would gain from a checkpoint of the journal and from returning free pages.

        The journal's growth is temporary: no entry is evicted for it, up to a share of the space that must stay free.
        """
        count: int = self._db.execute("PRAGMA page_count").fetchone()[0]
        journal, database = self._store.database.sizes()
        self._journal_bytes = journal
        spare_journal = min(journal, to_stay_free // _JOURNAL_DIVISOR)
        return self.free_page_bytes() + spare_journal + database - count * self._page_size
