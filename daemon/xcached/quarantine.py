"""Entries that are set aside: damaged ones, and those whose load ended processes. Belongs to the thread that writes.

What is set aside is served to nobody. Its bytes are kept for a while in ``quarantine/``, for who wants to know what
happened to them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from xcached.blobs import read_chunks
from xcached.caller import Given, Load
from xcached.store import Entry, Store

logger = logging.getLogger("xcached")

_STRIKES = 2
_MOST_KEPT = 100
_MOST_BYTES = 1024**3
_SHARE_OF_STORE = 20
# Of one reader.
_MOST_STRIKES = 1000
# Whoever ends programs by hand now and then does not thereby bar an entry.
_FORGOTTEN_AFTER_NS = 24 * 3600 * 10**9
_HEADER, _KEY_AT, _KEY_END = 48, 8, 40


class Quarantine:
    """Sets entries of a store aside. ``barred`` may be read by any thread."""

    def __init__(self, store: Store, folder: Path, may_judge: Callable[[int, int], bool]) -> None:
        """``may_judge(reader, writer)``: whether a reader's word is enough to set aside what a writer wrote."""
        self._store = store
        self._db = store.database.writing
        self._folder = folder
        self._may_judge = may_judge
        folder.mkdir(mode=0o700, exist_ok=True)
        # Digest and reader: what ended so many of the reader's processes that it is not to come back.
        self.barred: frozenset[tuple[str, int]] = frozenset()
        # Key and reader: what has a strike that a successful load takes back.
        self.struck: frozenset[tuple[str, int]] = frozenset()
        # The same by digest.
        self._suspected: frozenset[tuple[str, int]] = frozenset()
        # When a process of this reader last ended while it loaded this digest.
        self._last_ended: dict[tuple[str, int], float] = {}
        self._read_strikes()

    def complain(self, key: str, given: Given, reader: int, reason: str) -> None:
        """A reader cannot use what it was given: set it aside, or at least give it to that reader no more."""
        for entry in self._entries_with(key, given.digest):
            if self._may_judge(reader, entry.writer_uid):
                # What was stored since, perhaps the very same, has nothing to do with what that reader has.
                if not given.at < self._created_at(entry) <= time.time():
                    self.set_aside(entry, reason)
            elif self._is_whole(entry, given.digest):
                self._strike([Load(key, given.digest, math.inf)], reader, _STRIKES)
            else:
                self.set_aside(entry, reason)

    def strike(self, loads: Sequence[Load], ended: float, reader: int, program: str) -> None:
        """A process ended while it was loading these: the second time they are set aside.

        Programs that were loading at the same moment may have been ended together, and count as one.
        """
        apart = [
            load
            for load in loads
            if load.since > self._last_ended.get((load.digest, reader), -math.inf)
            # The first strike may be another's; the second has to be its own.
            and (load.alone or (load.digest, reader) not in self._suspected)
        ]
        for load in apart:
            # At its end, so that the oldest are forgotten first.
            self._last_ended.pop((load.digest, reader), None)
            self._last_ended[load.digest, reader] = ended
        while len(self._last_ended) > _MOST_STRIKES:
            del self._last_ended[next(iter(self._last_ended))]
        counts = self._strike(apart, reader, 1)
        for key, digest, _, _ in apart:
            strikes = counts.get((digest, reader), 1)
            logger.warning("%r ended while it loaded %s: strike %d", program, key[:12], strikes)
            if strikes < _STRIKES:
                continue
            for entry in self._entries_with(key, digest):
                if self._may_judge(reader, entry.writer_uid):
                    self.set_aside(entry, f"{strikes} processes ended while they loaded it, the last was {program!r}")

    def forgive(self, keys: Sequence[str], reader: int) -> None:
        """They were loaded after all."""
        with self._store.transaction():
            self._db.executemany(
                "DELETE FROM strikes WHERE key = ? AND reader_uid = ? AND count < ?",
                [(key, reader, _STRIKES) for key in keys],
            )
        self._read_strikes()

    def clear(self, uid: int | None) -> None:
        """Forget what was set aside, and why, for one user or for all."""
        with self._store.transaction():
            self._db.execute("DELETE FROM quarantined WHERE writer_uid = coalesce(?, writer_uid)", (uid,))
            self._db.execute("DELETE FROM strikes WHERE reader_uid = coalesce(?, reader_uid)", (uid,))
        self._read_strikes()
        self.sweep()

    def sweep(self) -> None:
        """Keep no more than there is room for, and no file that no row speaks of."""
        most = min(_MOST_BYTES, self._store.max_size // _SHARE_OF_STORE) if self._store.max_size else _MOST_BYTES
        rows = self._db.execute("SELECT id, file, stored_size FROM quarantined ORDER BY id DESC").fetchall()
        kept: set[str] = set()
        size = 0
        gone = []
        for position, (number, file, stored) in enumerate(rows):
            size += stored if file else 0
            if position >= _MOST_KEPT or (file and size > most):
                gone.append((number,))
            elif file:
                kept.add(file)
        if gone:
            with self._store.transaction():
                self._db.executemany("DELETE FROM quarantined WHERE id = ?", gone)
        for path in self._folder.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def set_aside(self, entry: Entry, reason: str) -> None:
        """Serve an entry to nobody any more."""
        name = f"{entry.key[:16]}-{time.time_ns():x}"
        file = name if self._copy(entry, self._folder / name) else None
        with self._store.transaction():
            self._db.execute(
                "INSERT INTO quarantined (key, writer_uid, module_name, platform, device_kind, jaxlib_version,"
                " compile_seconds, created_at, stored_size, blob, reason, set_aside_at, file)"
                " SELECT key, writer_uid, module_name, platform, device_kind, jaxlib_version, compile_seconds,"
                " created_at, stored_size, blob, ?, ?, ? FROM entries WHERE key = ? AND writer_uid = ?",
                (reason[:500], time.time(), file, *entry),
            )
            loose = self._store.remove([entry])
            self._store.add_statistics({"quarantined": 1})
        self._store.delete_files(loose)
        self.sweep()
        logger.warning("%s is set aside: %s", entry.key[:12], reason)

    def _copy(self, entry: Entry, target: Path) -> bool:
        """Keep the bytes as they are; whether there are any."""
        digest, content = self._content(entry)
        try:
            if content is not None:
                target.write_bytes(content if isinstance(content, bytes) else str(content).encode())
            else:
                # The name in blobs/ goes with the entry, or a fresh file takes it; this one stays with these bytes.
                os.link(self._store.files.path(digest), target)
        except OSError:
            return False
        return True

    def _content(self, entry: Entry) -> tuple[str, bytes | None]:
        row = self._db.execute(
            "SELECT blobs.digest, blobs.content FROM entries JOIN blobs ON blobs.digest = entries.blob"
            " WHERE entries.key = ? AND entries.writer_uid = ?",
            entry,
        ).fetchone()
        return (row[0], row[1]) if row else ("", None)

    def _is_whole(self, entry: Entry, digest: str) -> bool:
        """Whether the bytes are those of the digest, and of this entry's key."""
        _, content = self._content(entry)
        found = hashlib.sha256()
        header = b""
        if content is not None:
            found.update(content)
            header = content[:_HEADER]
        else:
            descriptor = self._store.files.open(digest)
            if descriptor is None:
                return False
            with contextlib.closing(os.fdopen(descriptor, "rb")) as file:
                for chunk in read_chunks(file.fileno(), os.fstat(file.fileno()).st_size):
                    header = header or chunk[:_HEADER]
                    found.update(chunk)
        return found.hexdigest() == digest and header[_KEY_AT:_KEY_END].hex() == entry.key

    def _entries_with(self, key: str, digest: str) -> list[Entry]:
        """Entries that still consist of what the reader got, and not of something fresher."""
        rows = self._db.execute("SELECT key, writer_uid FROM entries WHERE key = ? AND blob = ?", (key, digest))
        return [Entry(*row) for row in rows]

    def _created_at(self, entry: Entry) -> float:
        row = self._db.execute("SELECT created_at FROM entries WHERE key = ? AND writer_uid = ?", entry).fetchone()
        return float(row[0])

    def _strike(self, loads: Sequence[Load], reader: int, strikes: int) -> dict[tuple[str, int], int]:
        if not loads:
            return {}
        # The number of the row is the time: the oldest go first, and one strike alone is forgotten after a while.
        now = time.time_ns()
        with self._store.transaction():
            self._db.execute(
                "DELETE FROM strikes WHERE count < ? AND rowid NOT BETWEEN ? AND ?",
                (_STRIKES, now - _FORGOTTEN_AFTER_NS, now),
            )
            for place, load in enumerate(loads):
                self._db.execute(
                    "INSERT INTO strikes (rowid, blob, reader_uid, key, count) VALUES (?, ?, ?, ?, ?)"
                    " ON CONFLICT (blob, reader_uid) DO UPDATE SET count = count + excluded.count",
                    (now + place, load.digest, reader, load.key, strikes),
                )
            self._db.execute(
                "DELETE FROM strikes WHERE reader_uid = :reader AND rowid NOT IN"
                " (SELECT rowid FROM strikes WHERE reader_uid = :reader ORDER BY rowid DESC LIMIT :most)",
                {"reader": reader, "most": _MOST_STRIKES},
            )
        return self._read_strikes()

    def _read_strikes(self) -> dict[tuple[str, int], int]:
        rows = self._db.execute("SELECT blob, reader_uid, key, count FROM strikes").fetchall()
        self.barred = frozenset((blob, reader) for blob, reader, _, count in rows if count >= _STRIKES)
        self.struck = frozenset((key, reader) for _, reader, key, count in rows if count < _STRIKES)
        counts = {(blob, reader): count for blob, reader, _, count in rows}
        self._suspected = frozenset(counts)
        return counts
