"""What is written down of toolchains: where they are, since when they are stale, and how many entries a change cost."""

from __future__ import annotations

import json
import time
from typing import Any

from xcache import protocol
from xcached.installations import ELSEWHERE, GONE, HERE, Installation, Mark, marks_of
from xcached.store import Entry, Store

_REMOVED_AT_ONCE = 64
_MOST_INVALIDATIONS = 1000
# What is asked for at once comes in several messages.
_ONE_CHANGE_SECONDS = 60.0


class Records:
    """Rows of toolchains. What is read belongs to the thread that serves, what is written to the one that writes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._db = store.database.writing
        self._reading = store.database.reading

    def installations(self) -> list[Installation]:
        """All that were ever announced and are remembered."""
        rows = self._reading.execute("SELECT toolchain, uid, files, state, seen_at FROM installations")
        found = [_installation(*row) for row in rows]
        return [installation for installation in found if installation is not None]

    def stale(self) -> dict[str, float]:
        """Which toolchains are stale, and since when."""
        sql = "SELECT digest, CAST(stale_since AS REAL) FROM toolchains WHERE stale_since IS NOT NULL"
        return dict(self._reading.execute(sql).fetchall())

    def correct(self, now: float) -> None:
        """The clock was ahead: nothing is stale since a moment that is still to come."""
        with self._store.transaction():
            self._db.execute("UPDATE toolchains SET stale_since = ? WHERE stale_since > ?", (now, now))

    def save(self, installation: Installation, message: protocol.Announce | None = None) -> None:
        """Write down an installation, and what its toolchain is."""
        toolchain, seen_at = installation.toolchain, installation.seen_at
        files = json.dumps([list(mark) for mark in installation.files])
        with self._store.transaction():
            if message is not None:
                self._db.execute(
                    "INSERT INTO toolchains (digest, platform, jaxlib_version, description, first_seen)"
                    " VALUES (?, ?, ?, ?, ?) ON CONFLICT (digest) DO NOTHING",
                    (toolchain, message.platform, message.jaxlib_version, message.description, seen_at),
                )
            self._db.execute(
                "INSERT OR REPLACE INTO installations (toolchain, uid, place, files, state, seen_at)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (toolchain, installation.uid, installation.place, files, installation.state, seen_at),
            )

    def forget(self, installation: Installation) -> None:
        """Forget a place."""
        with self._store.transaction():
            self._db.execute(
                "DELETE FROM installations WHERE toolchain = ? AND uid = ? AND place = ?",
                (installation.toolchain, installation.uid, installation.place),
            )

    def make_stale(self, toolchain: str, reason: str) -> None:
        """From now on what it made is not served; written down with what that costs."""
        with self._store.transaction():
            self._db.execute("UPDATE toolchains SET stale_since = ? WHERE digest = ?", (time.time(), toolchain))
            entries, stored = self._db.execute(
                "SELECT count(*), coalesce(sum(stored_size), 0) FROM entries WHERE toolchain_component = ?",
                (toolchain,),
            ).fetchone()
            self._note(reason, entries, stored, toolchain)

    def revive(self, toolchain: str) -> None:
        """It is installed again, and so what it made is of use again."""
        with self._store.transaction():
            self._db.execute("UPDATE toolchains SET stale_since = NULL WHERE digest = ?", (toolchain,))

    def purge(self, toolchain: str) -> protocol.Removed | None:
        """Remove some of what a toolchain made; when nothing is left, forget it. None if all that is left is pinned."""
        rows = self._db.execute(
            "SELECT key, writer_uid FROM entries WHERE toolchain_component = ? AND pinned = 0 LIMIT ?",
            (toolchain, _REMOVED_AT_ONCE),
        ).fetchall()
        entries = [Entry(*row) for row in rows]
        if not entries and self._has_entries(toolchain):
            return None
        if entries:
            self._store.let_go(entries, "stale_removed")
        else:
            with self._store.transaction():
                self._db.execute("DELETE FROM installations WHERE toolchain = ?", (toolchain,))
                self._db.execute("DELETE FROM toolchains WHERE digest = ?", (toolchain,))
        return protocol.Removed(len(entries), 0)

    def _has_entries(self, toolchain: str) -> bool:
        sql = "SELECT 1 FROM entries WHERE toolchain_component = ? LIMIT 1"
        return self._db.execute(sql, (toolchain,)).fetchone() is not None

    def invalidated(self, reason: str, removed: protocol.Removed) -> None:
        """Somebody removed entries, and said why."""
        with self._store.transaction():
            self._note(reason, removed.entries, removed.bytes)

    def _note(self, reason: str, entries: int, stored: int, toolchain: str | None = None) -> None:
        now = time.time()
        last = self._db.execute("SELECT rowid, at, reason FROM invalidations ORDER BY rowid DESC LIMIT 1").fetchone()
        if last and last[2] == reason and abs(now - last[1]) < _ONE_CHANGE_SECONDS and toolchain is None:
            self._db.execute(
                "UPDATE invalidations SET entries = entries + ?, bytes = bytes + ? WHERE rowid = ?",
                (entries, stored, last[0]),
            )
        else:
            self._db.execute(
                "INSERT INTO invalidations (at, toolchain, reason, entries, bytes) VALUES (?, ?, ?, ?, ?)",
                (now, toolchain, reason[:2000], entries, stored),
            )
            # The oldest are forgotten.
            self._db.execute(
                "DELETE FROM invalidations WHERE rowid <= (SELECT max(rowid) FROM invalidations) - ?",
                (_MOST_INVALIDATIONS,),
            )
        if entries:
            self._store.add_statistics({"invalidated": entries})


def _installation(toolchain: Any, uid: Any, files: Any, state: Any, seen_at: Any) -> Installation | None:
    """What a row says; None for one that cannot be, since anybody who may write the file can alter it."""
    try:
        marks = marks_of([dict(zip(Mark._fields, file, strict=True)) for file in json.loads(files)])
        right = type(toolchain) is str and type(uid) is int and state in (HERE, ELSEWHERE, GONE)
        return Installation(toolchain, uid, marks, state, float(seen_at)) if marks and right else None
    except (ValueError, TypeError):
        return None
