"""The order of uses and the store's own time, which goes by uses. Belongs to the writer thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import NamedTuple

from xcached.store.entries import EntryKey, Use
from xcached.store.eviction import Usage, time_passed, used, worth


class _Now(NamedTuple):
    order: int
    time: float


class Uses:
    """Where the order and the time stand, and how each entry was used."""

    def __init__(self, db: sqlite3.Connection) -> None:
        """Go on from the last use; ``wall_time`` is the wall clock's time then."""
        self._db = db
        # CAST, because any program that may write the file can alter these values. The two partial indexes serve one
        # value of pinned each.
        sql = (
            "SELECT CAST(used_order AS INTEGER), CAST(used_time AS REAL), CAST(last_used_at AS REAL) FROM entries"
            " WHERE pinned = {} ORDER BY used_order DESC LIMIT 1"
        )
        rows = [db.execute(sql.format(pinned)).fetchone() or (0, 0.0, 0.0) for pinned in (0, 1)]
        order, time, self.wall_time = (max(value or 0 for value in column) for column in zip(*rows, strict=True))
        self.now = _Now(order, time)
        """Kept by a rehearsal, which sets it back."""

    @property
    def order(self) -> int:
        """The order of the last use."""
        return self.now.order

    def next(self, uses: int = 1) -> _Now:
        """Advance by some uses of one entry, and return where things stand. A use counts less among more entries."""
        (entries,) = self._db.execute("SELECT amount FROM totals WHERE name = 'entries'").fetchone()
        self.now = _Now(self.now.order + 1, self.now.time + time_passed(entries, uses))
        return self.now

    def before(self, entry: EntryKey) -> Usage:
        """Return the past usage of an entry that was stored before."""
        sql = "SELECT uses, used_time FROM compile_times WHERE key = ? AND writer_uid = ?"
        row = self._db.execute(sql, entry).fetchone()
        return Usage(*row) if row and all(type(value) in (int, float) for value in row) else Usage()

    def note(self, uses: Mapping[EntryKey, Use]) -> None:
        """Within a transaction: add hits; ``uses`` is in the order of the last use."""
        for entry, use in uses.items():
            row = self._db.execute(
                "SELECT uses, used_time, compile_seconds, footprint FROM entries WHERE key = ? AND writer_uid = ?",
                entry,
            ).fetchone()
            # Any program that may write the file can alter these values.
            if row is None or not all(type(value) in (int, float) for value in row):
                continue
            now = self.next(use.hits)
            usage = used(Usage(*row[:2]), now.time, use.hits)
            self._db.execute(
                # last_used_at is for people; the ranking uses no clock that jumps.
                "UPDATE entries SET hits = hits + ?, last_used_at = ?, used_order = ?, uses = ?, used_time = ?,"
                " worth = ? WHERE key = ? AND writer_uid = ?",
                (use.hits, use.last_used_at, now.order, *usage, worth(usage, *row[2:]), *entry),
            )
