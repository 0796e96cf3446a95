"""The ledger: the runs of programs, and how each program of a run came about. Belongs to the writer thread."""

from __future__ import annotations

import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from xcache.wire import commands, protocol
from xcache.wire.ledger import Row
from xcached.store.row_groups import RowGroups
from xcached.store.store import Store

_MOST_RUNS_OF_ONE_USER = 1000
# A row's bytes beside its texts, roughly.
_ROW_BYTES = 40
_COLUMNS = ", ".join(Row._fields)
_TEXTS = tuple(name for name in Row._fields if name != "position")
# Bytes of texts after which a page ends; one more row fits into a frame beside them.
_PAGE_BYTES = protocol.MAX_FRAME // 2
_SIZE = f"{_ROW_BYTES} + " + " + ".join(f"length(CAST({name} AS BLOB))" for name in _TEXTS)


class Ledger:
    """The rows of runs and of their programs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._db = store.database.writing
        self._groups = RowGroups(store, "runs", "ledger", "run", lambda: store.limits.max_ledger)
        self.clear, self.trim = self._groups.clear, self._groups.trim
        # By user, the runs after the last one that is recorded, which the database did not take.
        self._unrecorded: defaultdict[int, set[str]] = defaultdict(set)

    def unrecorded(self, uid: int | None) -> int:
        """Return how many of a user's last runs (None: of everybody's) the database did not take; for any thread."""
        return sum(len(runs) for user, runs in self._unrecorded.copy().items() if uid in (None, user))

    def record(self, uid: int, pid: int, program: str, message: protocol.RecordRun, rows: Sequence[Row]) -> None:
        """Keep the newest rows of a user's run; forget the oldest runs."""
        if not self._store.limits.max_ledger:
            return
        try:
            self._record(uid, pid, program, message, rows)
        except sqlite3.Error:
            self._unrecorded[uid].add(message.run)
            raise
        self._unrecorded.pop(uid, None)

    def _record(self, uid: int, pid: int, program: str, message: protocol.RecordRun, rows: Sequence[Row]) -> None:
        now = time.time()
        facts = _fitting(message.facts)
        fixed = _ROW_BYTES + len(f"{message.run}{program}{facts}".encode())
        with self._store.transaction():
            (run,) = self._db.execute(
                "INSERT INTO runs (run, uid, pid, program, facts, began_at, reported_at, ended_at, size)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (uid, run) DO UPDATE SET facts = excluded.facts,"
                " reported_at = excluded.reported_at, ended_at = excluded.ended_at,"
                " size = size + excluded.size - length(CAST(run || program || facts AS BLOB)) - ? RETURNING id",
                (
                    *(message.run, uid, pid, program, facts, message.began_at),
                    *(now, now if message.ended else None, fixed, _ROW_BYTES),
                ),
            ).fetchone()
            self._replace(run, rows)
            self._groups.forget_older(_MOST_RUNS_OF_ONE_USER, "uid = ?", uid)
            self._groups.forget_what_is_too_large()

    def note_end(self, uid: int, run: str, killed_by: str) -> None:
        """Note that the process of a user's run has ended, and by which signal, if by one."""
        facts = "json_set(facts, '$.killed_by', ?1)" if killed_by else "facts"
        with self._store.transaction():
            self._db.execute(
                f"UPDATE runs SET facts = {facts}, ended_at = ?2, size = size"
                f" + length(CAST({facts} AS BLOB)) - length(CAST(facts AS BLOB))"
                " WHERE uid = ?3 AND run = ?4 AND ended_at IS NULL",
                (killed_by, time.time(), uid, run),
            )

    def runs(self, uid: int | None, before: int) -> commands.Runs:
        """Return a page of a user's runs (None: everybody's), the latest first."""
        columns = ("id", "run", "uid", "pid", "program", "facts", "began_at", "reported_at", "ended_at")
        rows = self._db.execute(
            f"SELECT {', '.join(columns)} FROM runs WHERE uid = coalesce(?, uid) AND (? = 0 OR id < ?)"
            " ORDER BY id DESC LIMIT ?",
            (uid, before, before, protocol.MAX_LISTED_RUNS),
        )
        found = [dict(zip(columns, row, strict=True)) for row in _page(rows)]
        # An earlier version stored longer ones.
        return commands.Runs(
            [row if len(row["facts"]) <= protocol.MAX_TEXT else row | {"facts": "{}"} for row in found]
        )

    def rows(self, uid: int | None, message: commands.AskLedger) -> commands.LedgerRows:
        """Return a page of the ledger of a user's run (None: of anybody's)."""
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM ledger WHERE run = (SELECT id FROM runs WHERE id = ? AND uid = coalesce(?, uid))"
            " AND position >= ? ORDER BY position LIMIT ?",
            (message.run, uid, message.position, protocol.MAX_LISTED_ROWS),
        )
        return commands.LedgerRows([[*row] for row in _page(rows)])

    def _replace(self, run: int, rows: Sequence[Row]) -> None:
        positions = json.dumps([row.position for row in rows])
        these = "FROM ledger WHERE run = ? AND position IN (SELECT value FROM json_each(?))"
        before = f"SELECT coalesce(sum({_SIZE}), 0) {these}"
        ((old,),) = self._db.execute(before, (run, positions)).fetchall()
        marks = ", ".join("?" * (1 + len(Row._fields)))
        self._db.executemany(
            f"INSERT OR REPLACE INTO ledger (run, {_COLUMNS}) VALUES ({marks})", [(run, *row) for row in rows]
        )
        ((new,),) = self._db.execute(before, (run, positions)).fetchall()
        self._db.execute("UPDATE runs SET size = size + ? WHERE id = ?", (new - old, run))


def _fitting(facts: dict[str, str]) -> str:
    """Return facts as JSON that one field of a message can hold, without the longest ones if need be."""
    left = dict(sorted(facts.items(), key=lambda fact: len(fact[1])))
    while len(text := json.dumps(left)) > protocol.MAX_TEXT:
        left.popitem()
    return text


def _page(rows: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """Yield as many of the rows as fit into an answer, and at least the first."""
    left = _PAGE_BYTES
    for row in rows:
        yield row
        left -= sum(len(value.encode()) for value in row if isinstance(value, str))
        if left < 0:
            return
