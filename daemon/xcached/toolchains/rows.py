"""The toolchains' rows: where they are installed, since when they are stale, and what each invalidation removed."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from xcache.wire import commands, protocol
from xcache.wire.bounded import parsed_json
from xcache.wire.checks import is_text_of
from xcache.wire.protocol import LONGEST_DESCRIPTION
from xcached.store.entries import EntryKey
from xcached.store.store import Store, cut
from xcached.toolchains.installations import ELSEWHERE, GONE, HERE, Installation, marks_of

_REMOVED_PER_STEP = 64
# Rows per user.
_MOST_INVALIDATIONS = 200
# One invalidation may come in several messages; those within this time share a row.
_SAME_INVALIDATION_SECONDS = 60.0

_PLATFORM = re.compile(r"[a-z0-9_]{1,20}")


class ToolchainRows:
    """Rows of toolchains. The daemon's start reads them; all changes belong to the writer thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._db = store.database.writing
        self._reading = store.database.reading

    def installations(self) -> list[Installation]:
        """Return all remembered installations."""
        rows = self._reading.execute(
            "SELECT toolchain, uid, files, state, seen_at, (SELECT length(CAST(platform AS BLOB))"
            " + length(CAST(jaxlib_version AS BLOB)) + length(CAST(description AS BLOB))"
            " FROM toolchains WHERE digest = toolchain) FROM installations"
        )
        found = [_installation(*row) for row in rows]
        return [installation for installation in found if installation is not None]

    def stale(self) -> dict[str, float]:
        """Return the stale toolchains, and since when (wall clock)."""
        sql = "SELECT digest, CAST(stale_since AS REAL) FROM toolchains WHERE stale_since IS NOT NULL"
        return dict(self._reading.execute(sql).fetchall())

    def correct(self, now: float) -> None:
        """Correct times in the future, which a clock that was ahead left behind."""
        with self._store.transaction():
            self._db.execute("UPDATE toolchains SET stale_since = ? WHERE stale_since > ?", (now, now))

    def save(self, installation: Installation, message: protocol.Announce | None = None) -> None:
        """Save an installation, and the description of its toolchain if announced with one."""
        toolchain, seen_at = installation.toolchain, installation.seen_at
        files = json.dumps([list(mark) for mark in installation.files], ensure_ascii=False)
        with self._store.transaction():
            if message is not None:
                self._describe(toolchain, message, seen_at)
            self._db.execute(
                "INSERT OR REPLACE INTO installations (toolchain, uid, place, files, state, seen_at)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (toolchain, installation.uid, installation.place, files, installation.state, seen_at),
            )

    def _describe(self, toolchain: str, message: protocol.Announce, seen_at: float) -> None:
        """Keep what a toolchain is, if the announcement proves it: others have it, too."""
        words = proven_words(message)
        kept: tuple[float, float | None] = seen_at, None
        if any(words):
            # In place of what an older daemon, or an announcement without a proof, has left.
            sql = "DELETE FROM toolchains WHERE digest = ? AND description IS NOT ? RETURNING first_seen, stale_since"
            kept = self._db.execute(sql, (toolchain, words[2])).fetchone() or kept
        self._db.execute(
            "INSERT OR IGNORE INTO toolchains (digest, platform, jaxlib_version, description, first_seen, stale_since)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (toolchain, *words, *kept),
        )

    def forget(self, installation: Installation) -> None:
        """Forget an installation."""
        with self._store.transaction():
            self._db.execute(
                "DELETE FROM installations WHERE toolchain = ? AND uid = ? AND place = ?",
                (installation.toolchain, installation.uid, installation.place),
            )

    def make_stale(self, toolchain: str, reason: str, uid: int) -> None:
        """Record the entries a user loses to a toolchain's removal."""
        with self._store.transaction():
            entries, stored = self._db.execute(
                "SELECT count(*), coalesce(sum(stored_size), 0) FROM entries"
                " WHERE toolchain_component = ? AND writer_uid = ?",
                (toolchain, uid),
            ).fetchone()
            self._note(reason, entries, stored, uid, toolchain)

    def gone_everywhere(self, toolchain: str) -> None:
        """Mark a toolchain as gone from all places."""
        with self._store.transaction():
            self._db.execute("UPDATE toolchains SET stale_since = ? WHERE digest = ?", (time.time(), toolchain))

    def revive(self, toolchain: str) -> None:
        """Mark a toolchain as installed again."""
        with self._store.transaction():
            self._db.execute("UPDATE toolchains SET stale_since = NULL WHERE digest = ?", (toolchain,))

    def purge(self, toolchain: str, uid: int) -> commands.Removed | None:
        """Remove some of a user's entries of a toolchain; once none is left, forget the user's installations of it.

        Returns None if all entries left are pinned.
        """
        rows = self._db.execute(
            "SELECT key, writer_uid FROM entries"
            " WHERE toolchain_component = ? AND pinned = 0 AND writer_uid = ? LIMIT ?",
            (toolchain, uid, _REMOVED_PER_STEP),
        ).fetchall()
        entries = [EntryKey(*row) for row in rows]
        if not entries and self._has_entries(toolchain, uid):
            return None
        if entries:
            self._store.let_go(entries, "stale", "stale_removed")
        else:
            with self._store.transaction(frees=True):
                self._db.execute("DELETE FROM installations WHERE toolchain = ? AND uid = ?", (toolchain, uid))
                self._db.execute(
                    "DELETE FROM toolchains WHERE digest = :one"
                    " AND NOT EXISTS (SELECT 1 FROM installations WHERE toolchain = :one)",
                    {"one": toolchain},
                )
        return commands.Removed(len(entries), 0)

    def _has_entries(self, toolchain: str, uid: int) -> bool:
        sql = "SELECT 1 FROM entries WHERE toolchain_component = ? AND writer_uid = ? LIMIT 1"
        return self._db.execute(sql, (toolchain, uid)).fetchone() is not None

    def invalidated(self, reason: str, removed: commands.Removed, uid: int) -> None:
        """Record entries removed by a user, with the reason given."""
        with self._store.transaction(frees=True):
            self._note(reason, removed.entries, removed.bytes, uid)
            self._store.statistics.add({"invalidated_by_hand": removed.entries})

    def _note(self, reason: str, entries: int, stored: int, uid: int, toolchain: str | None = None) -> None:
        if not entries:
            # A row without entries would only displace one that lost some.
            return
        now = time.time()
        reason = cut(reason, protocol.MAX_NAME)
        sql = "SELECT rowid, at, reason FROM invalidations WHERE uid = ? ORDER BY rowid DESC LIMIT 1"
        last = self._db.execute(sql, (uid,)).fetchone()
        if last and last[2] == reason and abs(now - last[1]) < _SAME_INVALIDATION_SECONDS and toolchain is None:
            self._db.execute(
                "UPDATE invalidations SET entries = entries + ?, bytes = bytes + ? WHERE rowid = ?",
                (entries, stored, last[0]),
            )
        else:
            self._db.execute(
                "INSERT INTO invalidations (at, toolchain, reason, entries, bytes, uid) VALUES (?, ?, ?, ?, ?, ?)",
                (now, toolchain, reason, entries, stored, uid),
            )
            # Forget the user's own oldest rows.
            self._db.execute(
                "DELETE FROM invalidations WHERE rowid IN (SELECT rowid FROM invalidations WHERE uid = ?"
                " ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
                (uid, _MOST_INVALIDATIONS),
            )
        self._store.statistics.add({"invalidated": entries})


# This bounds the JSON of one installation's files: each path has fewer than 4096 characters.
_MOST_FILES = 16 * 1024**2


def proven_words(message: protocol.Announce) -> tuple[str, str, str]:
    """Return the platform, jaxlib's version and the description if the announcement proves them, or empty texts."""
    words = message.platform, message.jaxlib_version, message.description
    is_proven = (
        is_text_of(words[2], message.toolchain)
        and f"jaxlib={words[1]!r}" in words[2].split("\n")
        and _PLATFORM.fullmatch(words[0]) is not None
        and len(words[2].encode()) <= LONGEST_DESCRIPTION
    )
    return words if is_proven else ("", "", "")


def _installation(
    toolchain: Any, uid: Any, files: Any, state: Any, seen_at: Any, text_bytes: Any
) -> Installation | None:
    """Return a row's installation; None if it is malformed: any program that may write the file can alter it."""
    try:
        marks = marks_of(
            [dict(zip(protocol.InstalledFile._fields, file, strict=True)) for file in parsed_json(files, _MOST_FILES)]
        )
        right = type(toolchain) is str and type(uid) is int and state in (HERE, ELSEWHERE, GONE)
        if not marks or not right:
            return None
        return Installation(toolchain, uid, marks, state, float(seen_at), text_bytes=int(text_bytes or 0))
    except (ValueError, TypeError):
        return None
