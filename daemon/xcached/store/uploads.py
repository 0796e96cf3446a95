"""Uploads: what is still to be sent to remote tiers. The rows survive a restart. Belongs to the writer thread."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import NamedTuple

from xcache.wire import protocol
from xcached.store.entries import Writer
from xcached.store.store import Store

ENTRY, HISTORY = "entry", "history"
# Rows for one tier; beyond it the oldest are dropped, once for so many that came.
_MOST_ROWS, _ROWS_BETWEEN_TRIMS = 20_000, 200
# Seconds between the second attempt and the first; each later one comes after twice the time, up to the longest.
_FIRST_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 2.0, 900.0
# Seconds for which a history waits: a program that goes on soon sends a longer one.
_HISTORY_SECONDS = 2.0
# Rows that are queued at once while others wait for the writer thread.
_ROWS_OF_A_STEP = 200
_NOT_QUEUED = (
    "SELECT key, writer_uid FROM entries WHERE NOT EXISTS (SELECT 1 FROM uploads WHERE tier = ? AND kind = 'entry'"
    " AND name = key AND uploads.writer_uid = entries.writer_uid)"
    " AND writer_uid IN (SELECT value FROM json_each(?))"
)
_DEAREST = "ORDER BY compile_seconds DESC, key"
_RUNS_NOT_QUEUED = (
    "SELECT DISTINCT program || char(0) || arguments AS named, uid FROM histories WHERE NOT EXISTS (SELECT 1 FROM"
    " uploads WHERE tier = ? AND kind = 'history' AND name = program || char(0) || arguments AND writer_uid = uid)"
    " AND uid IN (SELECT value FROM json_each(?)) ORDER BY named"
)


class Upload(NamedTuple):
    """A row: an entry or a history to be sent to a tier."""

    tier: str
    kind: str
    name: str
    writer_uid: int
    attempts: int
    queued_at: float


class Uploads:
    """The rows of uploads."""

    def __init__(self, store: Store, may_share: Callable[[int], bool], on_new: Callable[[], None]) -> None:
        """``may_share`` says whether a user's entries leave the machine; ``on_new`` is told of new rows."""
        self._store = store
        self._db = store.database.writing
        self._may_share = may_share
        self._on_new = on_new
        # The tiers that take uploads, with the seconds of compile time below which an entry stays here.
        self._tiers: Mapping[str, float] = {}
        self._added = 0
        self._has_new = False
        store.after_put, store.after_commit = self._note_put, self._tell

    def send_to(self, tiers: Mapping[str, float]) -> None:
        """Send to these tiers from now on. Must be called before the writer thread begins: no put may come sooner."""
        self._tiers = dict(tiers)

    def forget_others(self) -> None:
        """Forget rows for tiers that the settings no longer name."""
        tiers = self._tiers
        with self._store.transaction(frees=True):
            kept = ", ".join("?" * len(tiers))
            self._db.execute(f"DELETE FROM uploads WHERE tier NOT IN ({kept})", tuple(tiers))  # noqa: S608 - question marks

    def note_history(self, uid: int, message: protocol.Remember) -> None:
        """Within a transaction: queue a history that was remembered."""
        if self._may_share(uid):
            self._add(HISTORY, f"{message.program}\0{message.arguments}", uid, self._tiers, _HISTORY_SECONDS)

    def push(self, tier: str, *, even_quick: bool) -> Generator[None, None, dict[str, protocol.Scalar]]:
        """Queue what the store has and may share, the dearest first; return how much that was, and what had no room.

        Rows that are queued already are not counted. The upload itself finds out what the tier has.
        """
        least = 0.0 if even_quick else self._tiers[tier]
        writers = [uid for (uid,) in self._db.execute("SELECT uid FROM users") if self._may_share(uid)]
        given = tier, json.dumps(writers)
        entries = self._db.execute(f"{_NOT_QUEUED} AND compile_seconds >= ? {_DEAREST}", (*given, least)).fetchall()
        runs = self._db.execute(_RUNS_NOT_QUEUED, given).fetchall()
        room = max(0, _MOST_ROWS - waiting(self._db, tier)[0])
        rows = [(ENTRY, *row) for row in entries] + [(HISTORY, *row) for row in runs]
        for at in range(0, min(len(rows), room), _ROWS_OF_A_STEP):
            with self._store.transaction():
                for kind, name, uid in rows[at : min(at + _ROWS_OF_A_STEP, room)]:
                    self._add(kind, name, uid, [tier])
            yield
        queued = min(len(entries), room)
        return {
            "name": tier,
            "entries": queued,
            "runs": min(len(runs), room - queued),
            "left": max(0, len(rows) - room),
        }

    @property
    def tiers(self) -> list[str]:
        """The tiers that take uploads."""
        return list(self._tiers)

    def done(self, rows: Iterable[Upload]) -> None:
        """Forget rows that were sent, or that need not be sent any more."""
        with self._store.transaction(frees=True):
            self._db.executemany(
                "DELETE FROM uploads WHERE tier = ? AND kind = ? AND name = ? AND writer_uid = ? AND queued_at = ?",
                [(row.tier, row.kind, row.name, row.writer_uid, row.queued_at) for row in rows],
            )

    def failed(self, row: Upload) -> None:
        """Have a row tried again later."""
        wait = min(_LONGEST_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2.0**row.attempts)
        with self._store.transaction():
            self._db.execute(
                "UPDATE uploads SET attempts = attempts + 1, due_at = ?"
                " WHERE tier = ? AND kind = ? AND name = ? AND writer_uid = ?",
                (time.time() + wait, row.tier, row.kind, row.name, row.writer_uid),
            )

    def _note_put(self, put: protocol.Put, writer: Writer) -> None:
        if self._tiers and self._may_share(writer.uid) and put.module_name != f"jit_{protocol.TRIAL}":
            wanted = [tier for tier, least in self._tiers.items() if put.compile_seconds >= least]
            self._add(ENTRY, put.key, writer.uid, wanted)

    def _add(self, kind: str, name: str, uid: int, tiers: Iterable[str], delay: float = 0.0) -> None:
        now = time.time()
        for tier in tiers:
            self._db.execute(
                "INSERT OR REPLACE INTO uploads (tier, kind, name, writer_uid, queued_at, attempts, due_at)"
                " VALUES (?, ?, ?, ?, ?, 0, ?)",
                (tier, kind, name, uid, now, now + delay),
            )
        self._added += 1
        if self._added % _ROWS_BETWEEN_TRIMS == 0:
            self._trim()
        self._has_new = True

    def _tell(self) -> None:
        # Not before the commit: the rows could not be seen yet.
        if self._has_new:
            self._has_new = False
            self._on_new()

    def _trim(self) -> None:
        """Drop the oldest rows of each tier that has too many, and count them."""
        for tier in self._tiers:
            over = "SELECT rowid FROM uploads WHERE tier = ? ORDER BY queued_at DESC LIMIT -1 OFFSET ?"
            sql = f"DELETE FROM uploads WHERE rowid IN ({over})"  # noqa: S608 - our own words
            if dropped := self._db.execute(sql, (tier, _MOST_ROWS)).rowcount:
                self._store.statistics.add({"uploads_dropped": dropped})


def due(connection: sqlite3.Connection, tier: str, now: float, most: int) -> list[Upload]:
    """Return rows of a tier that are due, the oldest first."""
    rows = connection.execute(
        "SELECT tier, kind, name, writer_uid, attempts, queued_at FROM uploads WHERE tier = ? AND due_at <= ?"
        " ORDER BY due_at LIMIT ?",
        (tier, now, most),
    )
    return [Upload(*row) for row in rows]


def of_entry(connection: sqlite3.Connection, tier: str, key: str) -> list[Upload]:
    """Return the rows of a tier for an entry, also those that are not due."""
    rows = connection.execute(
        "SELECT tier, kind, name, writer_uid, attempts, queued_at FROM uploads"
        " WHERE tier = ? AND kind = ? AND name = ?",
        (tier, ENTRY, key),
    )
    return [Upload(*row) for row in rows]


def waiting(connection: sqlite3.Connection, tier: str) -> tuple[int, float | None]:
    """Return how many rows a tier has, and when the next is due."""
    count, first = connection.execute("SELECT count(*), min(due_at) FROM uploads WHERE tier = ?", (tier,)).fetchone()
    return int(count), first
