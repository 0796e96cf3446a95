"""The entries that may be evicted, in the order in which they go. Belongs to the writer thread.

Everything is read row by row as it is taken, so that no query walks over the whole store.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from xcached.store.entries import EntryKey
from xcached.store.eviction import Candidate

EVICTED_AT_ONCE = 64
# Stale toolchains whose entries are evicted first.
_MOST_STALE = 1000
# Sharers of a program are counted up to this: a program with more does not come free in one step.
_MOST_SHARERS = EVICTED_AT_ONCE + 1


class EntryAtUse(NamedTuple):
    """An entry, and its last use in the order of all uses."""

    entry: EntryKey
    used_order: int


class Candidates:
    """Reads candidates for eviction from the store's rows."""

    def __init__(self, database: sqlite3.Connection, stale: Callable[[], Collection[tuple[str, int]]]) -> None:
        """``stale()`` returns each stale toolchain with a writer whose entries of it are stale."""
        self._db = database
        self._stale = stale

    def of(
        self, uid: int | None, due: Mapping[EntryKey, int], *, only_theirs: bool, without_end: bool
    ) -> Iterator[Candidate[EntryAtUse]]:
        """Yield entries of one user or of all in the order of eviction, ``due`` newcomers first.

        Entries of stale toolchains come next, unsorted and whatever their worth: nobody can be served them any more,
        and sorting them after a jaxlib upgrade would cost a walk over them all. Newcomers and stale entries may be of
        any user, unless ``only_theirs``. Unless ``without_end``, the entries end after as many as one step evicts.
        """
        whose = uid if only_theirs else None
        first = {candidate.subject.entry: candidate for candidate in self._still_due(due, whose)}
        yield from first.values()
        for candidate in self._others(uid, whose, -1 if without_end else EVICTED_AT_ONCE):
            if candidate.subject.entry not in first:
                yield candidate

    def unused_since(self, oldest: float) -> list[EntryKey]:
        """Return some entries whose last use is before ``oldest`` by the wall clock."""
        cursor = self._db.execute(
            "SELECT key, writer_uid, CAST(last_used_at AS REAL) FROM entries WHERE pinned = 0"
            " ORDER BY used_order LIMIT ?",
            (EVICTED_AT_ONCE,),
        )
        return [EntryKey(key, writer) for key, writer, last in cursor.fetchall() if (last or 0.0) < oldest]

    def _still_due(self, due: Mapping[EntryKey, int], whose: int | None) -> Iterator[Candidate[EntryAtUse]]:
        """Yield the newcomers that nobody has used since they were chosen."""
        for (key, writer), used_order in due.items():
            if whose is None or writer == whose:
                yield from self._rows("entries.key = ? AND used_order = ?", (key, used_order), writer, "", 1)

    def _others(self, uid: int | None, whose: int | None, most: int) -> Iterator[Candidate[EntryAtUse]]:
        pairs = list(itertools.islice(self._stale(), _MOST_STALE))
        stale = (json.dumps(pairs),) if pairs else ()
        among = "(SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?))"
        found = 0
        if stale:
            useless = self._rows(f"(toolchain_component, entries.writer_uid) IN {among}", stale, whose, "", most)
            for found, candidate in enumerate(useless, start=1):  # noqa: B007 - how many there were
                yield candidate
        # If there may be more stale ones, the next step takes those.
        if most < 0 or found < most:
            others = f"(toolchain_component, entries.writer_uid) NOT IN {among}" if stale else "1"
            yield from self._rows(others, stale, uid, "ORDER BY entries.worth, entries.used_order", most)

    def _rows(
        self, which: str, values: Sequence[str | int], uid: int | None, sorting: str, most: int
    ) -> Iterator[Candidate[EntryAtUse]]:
        """Query candidates; a program that several entries share counts as freed with the last of them."""
        cursor = self._db.execute(
            # CROSS JOIN fixes the order of the tables: the worth index, then two look-ups per row taken.
            "SELECT entries.key, entries.writer_uid, used_order, entries.footprint - blobs.stored_size, program,"  # noqa: S608
            " blobs.stored_size,"
            " (SELECT count(*) FROM (SELECT 1 FROM entries other WHERE other.program = entries.program"
            " AND other.writer_uid = entries.writer_uid LIMIT ?))"
            " FROM entries CROSS JOIN programs"
            " ON programs.digest = entries.program AND programs.writer_uid = entries.writer_uid"
            " CROSS JOIN blobs ON blobs.digest = programs.blob"
            f" WHERE entries.pinned = 0 AND {which} {'' if uid is None else 'AND entries.writer_uid = ?'}"
            f" {sorting} LIMIT ?",
            (_MOST_SHARERS, *values, *(() if uid is None else (uid,)), most),
        )
        # Close before anything changes.
        with contextlib.closing(cursor):
            for key, writer, order, size, program, program_size, sharers in cursor:
                standing = EntryAtUse(EntryKey(key, writer), order)
                yield Candidate(standing, size, f"{writer} {program}", program_size, sharers)
