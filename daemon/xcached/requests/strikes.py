"""Strikes against entries that are suspected of crashing the programs that load them. Belongs to the serving thread.

Two strikes bar an entry for a day: the reader does not get those bytes, and its own entry is quarantined. A strike
counts from the moment the daemon learns of it, because the next program may ask at once; the writer thread saves it
afterwards.

A crash in a load ahead is remembered separately, and for good: some entries load only after the program has done
something else, so a later load on request proves nothing about loads ahead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from xcached.caller import Caller, Load
from xcached.requests.process_ends import ProcessEnd
from xcached.store.quarantine import Quarantine
from xcached.store.store import Store
from xcached.store.writer import WriterThread

logger = logging.getLogger("xcached")

_BAR_STRIKES = 2
# Rows of one reader.
_MOST_ROWS = 1000
# A strike expires after a day. A bar then leaves one strike, which the next load on request clears or renews.
_EXPIRY_NS = 24 * 3600 * 10**9
# Findings of loads ahead. One ended in an unknown way:
_MAYBE = 1
# One crashed, or two ended in an unknown way:
_CRASHED_AHEAD = 2


class _RowId(NamedTuple):
    """The bytes that were loaded, and the user who loads them."""

    digest: str
    reader: int


class _Row(NamedTuple):
    """A row of the table ``strikes``."""

    key: str
    strikes: int
    """The strikes as counted at ``at``; see ``Strikes._count``."""
    ahead: int
    """The finding of loads ahead: 0, ``_MAYBE`` or ``_CRASHED_AHEAD``."""
    at: int
    """The last change, in nanoseconds since the epoch; also the rowid."""


class Strikes:
    """Counts strikes by the digest that was loaded, and its reader."""

    def __init__(self, store: Store, writer: WriterThread, quarantine: Quarantine) -> None:
        self._store = store
        self._writer = writer
        self._quarantine = quarantine
        # The oldest first.
        self._rows: dict[_RowId, _Row] = {
            _RowId(blob, reader): _Row(key, count, ahead, at)
            for blob, reader, key, count, ahead, at in store.database.reading.execute(
                "SELECT blob, reader_uid, key, count, ahead, rowid FROM strikes ORDER BY rowid"
            )
            # Any program that may write the file can alter the types.
            if isinstance(count, int) and isinstance(ahead, int)
        }
        # For each entry and reader: when a process last ended in an unknown way while loading it.
        self._last_unknown: dict[_RowId, float] = {}
        self._by_key: dict[tuple[str, int], list[_Row]] = {}
        self._last_at = 0
        self._rebuild_index()

    def bars(self, digest: str, reader: int) -> bool:
        """Return whether a reader must not get these bytes."""
        row = self._rows.get(_RowId(digest, reader))
        return row is not None and self._count(row) >= _BAR_STRIKES

    def suspects(self, key: str, reader: int) -> bool:
        """Return whether the entry should be loaded only when a program asks for it, never ahead.

        The cause of its next crash is then clear, and an entry that crashes only when loaded ahead does no more harm.
        """
        return any(
            0 < self._count(row) < _BAR_STRIKES
            or row.ahead >= _CRASHED_AHEAD
            or (row.ahead == _MAYBE and self._is_recent(row))
            for row in self._by_key.get((key, reader), ())
        )

    def judge(self, load: Load, caller: Caller, ending: ProcessEnd, ended: float) -> None:
        """Count the end of a process against the entry that it was loading.

        A crash is a strike. An unknown end is one too if the program had asked for the load; processes that were
        loading at the same moment may have been killed together, as by a batch system, and count once. After one
        unknown end in a load ahead, an entry is not loaded ahead for a day; after two, or a crash, never again.
        """
        if ending is ProcessEnd.OTHERWISE or load.digest in caller.process.ended_in:
            return
        caller.process.ended_in.add(load.digest)
        self._forget_old()
        before = self._rows.get(_RowId(load.digest, caller.uid))
        strikes, ahead = (self._count(before), before.ahead) if before else (0, 0)
        crashed = ending is ProcessEnd.CRASHED
        is_counted = crashed or not self._note_unknown_end(load, caller.uid, ended)
        if load.ahead:
            # Another load beside this one may have crashed the process, so a load ahead never bars an entry.
            strikes = max(strikes, int(crashed))
            ahead = _CRASHED_AHEAD if crashed else min(ahead + int(is_counted) * _MAYBE, _CRASHED_AHEAD)
        else:
            strikes += int(is_counted)
        self._note(load, caller, strikes, ahead)

    def _note_unknown_end(self, load: Load, reader: int, ended: float) -> bool:
        """Note that a process ended in an unknown way; return whether another one did since this load began."""
        row_id = _RowId(load.digest, reader)
        last = self._last_unknown.pop(row_id, float("-inf"))
        self._last_unknown[row_id] = ended
        of_reader = [each for each in self._last_unknown if each.reader == reader]
        for each in of_reader[:-_MOST_ROWS]:
            del self._last_unknown[each]
        return load.since <= last

    def forgive(self, load: Load, reader: int) -> None:
        """Clear a strike, after a program asked for the entry, loaded it, and survived."""
        row_id = _RowId(load.digest, reader)
        row = self._rows.get(row_id)
        if row is None or self._count(row) >= _BAR_STRIKES:
            return
        if not row.ahead:
            self._drop([row_id])
        elif row.strikes:
            self._rows[row_id] = row._replace(strikes=0)
            self._rebuild_index()
            self._save([row_id])

    def clear(self, uid: int | None) -> None:
        """Forget the strikes of one reader (None: of all)."""
        self._drop([row_id for row_id in self._rows if uid in (None, row_id.reader)])

    def _is_recent(self, row: _Row) -> bool:
        now = time.time_ns()
        return now - _EXPIRY_NS <= row.at <= max(now, self._last_at)

    def _count(self, row: _Row) -> int:
        """Return the strikes that still count."""
        return row.strikes if self._is_recent(row) else int(row.strikes >= _BAR_STRIKES)

    def _note(self, load: Load, caller: Caller, count: int, ahead: int) -> None:
        row_id, reader = _RowId(load.digest, caller.uid), caller.uid
        now = self._last_at = max(time.time_ns(), self._last_at + 1)
        self._rows.pop(row_id, None)
        self._rows[row_id] = _Row(load.key, count, ahead, now)
        of_reader = [each for each in self._rows if each.reader == reader]
        self._drop(of_reader[:-_MOST_ROWS])
        self._save([row_id])
        who = f"{caller.program} (process {caller.pid})"
        if load.ahead and ahead >= _CRASHED_AHEAD:
            logger.warning("%r ended while it loaded %s ahead; it is not loaded ahead again", who, load.key[:12])
        elif count:
            logger.warning("%r ended while it loaded %s: strike %d", who, load.key[:12], count)
        if count >= _BAR_STRIKES:
            reason = f"{count} processes ended while they loaded it, the last was {who!r}"
            # Queue it before anything this reader stores in its place.
            self._writer.call(lambda: self._quarantine.strike_out(load.key, load.digest, reader, reason), reader)

    def _forget_old(self) -> None:
        def still_matters(row: _Row) -> bool:
            return self._is_recent(row) or self._count(row) > 0 or row.ahead > 0

        self._drop([row_id for row_id, row in self._rows.items() if not still_matters(row)])

    def _drop(self, row_ids: Sequence[_RowId]) -> None:
        for row_id in row_ids:
            self._rows.pop(row_id, None)
        if row_ids:
            self._save(row_ids)
        self._rebuild_index()

    def _rebuild_index(self) -> None:
        self._by_key = {}
        for (_, reader), row in self._rows.items():
            self._by_key.setdefault((row.key, reader), []).append(row)

    def _save(self, changed: Sequence[_RowId]) -> None:
        """Queue the writing or deletion of rows, at the expense of the first row's reader."""

        def save() -> None:
            with self._store.transaction():
                for row_id in changed:
                    # The current row, so that the order of the writes does not matter.
                    row = self._rows.get(row_id)
                    if row is None:
                        db.execute("DELETE FROM strikes WHERE blob = ? AND reader_uid = ?", row_id)
                    else:
                        db.execute(
                            "INSERT OR REPLACE INTO strikes (rowid, blob, reader_uid, key, count, ahead)"
                            " VALUES (?, ?, ?, ?, ?, ?)",
                            (row.at, *row_id, row.key, row.strikes, row.ahead),
                        )

        db = self._store.database.writing
        self._writer.note(save, changed[0].reader)
