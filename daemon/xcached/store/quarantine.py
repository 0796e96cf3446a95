"""The quarantine: entries that are damaged or crashed programs. Belongs to the writer thread.

They are served to nobody. Their bytes stay in ``quarantine/`` for a while, for an investigation.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

from xcache.wire import header, protocol
from xcached.store.blobs import read_chunks
from xcached.store.entries import EntryKey
from xcached.store.store import Store

logger = logging.getLogger("xcached")

_MOST_KEPT_ROWS = 100
_MOST_KEPT_BYTES = 1024**3

Steps = Generator[None, None, protocol.Message]


class Quarantine:
    """Moves entries of a store to the quarantine."""

    def __init__(self, store: Store, folder: Path, may_judge: Callable[[int, int], bool]) -> None:
        """``may_judge(reader, writer)``: whether the reader's word alone may quarantine the writer's entry."""
        self._store = store
        self._db = store.database.writing
        self._folder = folder
        self._may_judge = may_judge
        folder.mkdir(mode=0o700, exist_ok=True)

    def examine(self, key: str, digest: str, reader: int, reason: str, *, whole: bool) -> Steps:
        """Check an entry that a reader could not use. A damaged one is quarantined, whoever reports it.

        If the reader says the bytes are ``whole``, jaxlib refused them and the reader compiled the same program. Its
        fresh executable replaces the entry; the quarantine keeps a copy of the old bytes.
        """
        for entry in self._entries_with(key, digest):
            is_whole = yield from self._is_whole(entry, digest)
            if entry not in self._entries_with(key, digest):
                continue
            if is_whole is False:
                self.set_aside(entry, reason)
            elif is_whole and whole and self._may_judge(reader, entry.writer_uid):
                self._keep(entry, reason)
        return protocol.Done()

    def strike_out(self, key: str, digest: str, reader: int, reason: str) -> None:
        """Quarantine the entries that crashed a reader's programs, if the reader may judge their writers."""
        for entry in self._entries_with(key, digest):
            if self._may_judge(reader, entry.writer_uid):
                self.set_aside(entry, reason)

    def clear(self, uid: int | None) -> None:
        """Forget the quarantined entries of one user (None: of all)."""
        sql = "DELETE FROM quarantined WHERE writer_uid = coalesce(?, writer_uid)"
        self._store.free(lambda: self._db.execute(sql, (uid,)))
        self.trim()

    def trim(self) -> None:
        """Forget rows beyond the limits, oldest first, and delete files that have no row."""
        most = self._store.most_other_data(_MOST_KEPT_BYTES)
        sql = "SELECT id, writer_uid, file, stored_size FROM quarantined ORDER BY id"
        rows = [_Row(*row) for row in self._db.execute(sql)]
        gone = []
        while (one := _too_many(rows, most)) is not None:
            rows.remove(one)
            gone.append((one.id,))
        if gone:
            self._store.free(lambda: self._db.executemany("DELETE FROM quarantined WHERE id = ?", gone))
        kept = {row.file for row in rows}
        for path in self._folder.iterdir():
            if path.name not in kept:
                self._store.files.delete_file(path)

    def set_aside_if_same(self, entry: EntryKey, digest: str, reason: str, *, lost: bool) -> None:
        """Quarantine an entry that a reader found damaged; ``lost``: its file was gone.

        The entry may have been replaced since, or its bytes moved between row and file; then nothing happens.
        """
        if entry not in self._entries_with(entry.key, digest):
            return
        files = self._store.files
        if lost and (self._content(entry)[1] is not None or files.path(digest).exists() or files.is_elsewhere(digest)):
            return
        self.set_aside(entry, reason)

    def set_aside(self, entry: EntryKey, reason: str) -> None:
        """Quarantine an entry: from now on nobody is served it."""
        file = self._copy(entry)
        with self._store.transaction():
            self._add_row(entry, reason, file)
            maybe_orphaned = self._store.remove([entry], "set aside")
        self._store.delete_files(maybe_orphaned)
        self.trim()
        logger.warning("%s is quarantined: %s", entry.key[:12], reason)

    def _keep(self, entry: EntryKey, reason: str) -> None:
        """Copy the bytes of an entry that will be replaced; it is served until then."""
        file = self._copy(entry)
        with self._store.transaction():
            self._add_row(entry, reason, file)
        self.trim()
        logger.warning("%s will be replaced: %s", entry.key[:12], reason)

    def _add_row(self, entry: EntryKey, reason: str, file: str | None) -> None:
        self._db.execute(
            "INSERT INTO quarantined (key, writer_uid, module_name, platform, device_kind, jaxlib_version,"
            " compile_seconds, created_at, stored_size, blob, reason, set_aside_at, file)"
            " SELECT key, writer_uid, module_name, platform, device_kind, jaxlib_version, compile_seconds,"
            " created_at, stored_size, blob, ?, ?, ? FROM entries WHERE key = ? AND writer_uid = ?",
            (reason[: protocol.MAX_NAME], time.time(), file, *entry),
        )
        self._store.statistics.add({"quarantined": 1})

    def _copy(self, entry: EntryKey) -> str | None:
        """Copy an entry's bytes; return the file's name, or None if the bytes cannot be had."""
        name = f"{entry.key[:16]}-{time.time_ns():x}"
        digest, content = self._content(entry)
        try:
            if content is not None:
                (self._folder / name).write_bytes(content if isinstance(content, bytes) else str(content).encode())
            else:
                # The name in blobs/ is deleted with the entry or reused; this hard link keeps the bytes.
                os.link(self._store.files.path(digest), self._folder / name)
        except OSError:
            return None
        return name

    def _content(self, entry: EntryKey) -> tuple[str, bytes | None]:
        row = self._db.execute(
            "SELECT blobs.digest, blobs.content FROM entries JOIN blobs ON blobs.digest = entries.blob"
            " WHERE entries.key = ? AND entries.writer_uid = ?",
            entry,
        ).fetchone()
        return (row[0], row[1]) if row else ("", None)

    def _is_whole(self, entry: EntryKey, digest: str) -> Generator[None, None, bool | None]:
        """Return whether the bytes match digest, size and this entry's key; None if they were replaced meanwhile."""
        _, content = self._content(entry)
        if content is not None:
            whole = content if isinstance(content, bytes) else str(content).encode()
            return hashlib.sha256(whole).hexdigest() == digest and _is_of(entry, whole)
        place = self._store.files.open(digest)
        if place is None:
            return False
        found, is_of_entry = hashlib.sha256(), True
        with contextlib.closing(os.fdopen(place.descriptor, "rb")) as file:
            status = os.fstat(file.fileno())
            row = self._db.execute("SELECT stored_size FROM blobs WHERE digest = ?", (digest,)).fetchone()
            size = row[0] if row is not None and place.offset else status.st_size
            if (row is not None and row[0] != size) or place.offset + size > status.st_size:
                # A reader refuses the bytes for a damaged size, and would refuse them for ever.
                return False
            for number, chunk in enumerate(read_chunks(file.fileno(), size, place.offset)):
                is_of_entry = is_of_entry and (number > 0 or _is_of(entry, chunk))
                found.update(chunk)
                yield
            if place.offset:
                return found.hexdigest() == digest and is_of_entry
            try:
                if not os.path.samestat(status, self._store.files.path(digest).stat()):
                    return None
            except FileNotFoundError:
                return None
        return found.hexdigest() == digest and is_of_entry

    def _entries_with(self, key: str, digest: str) -> list[EntryKey]:
        """Return the entries that still have the bytes the reader got, and no fresh ones."""
        rows = self._db.execute("SELECT key, writer_uid FROM entries WHERE key = ? AND blob = ?", (key, digest))
        return [EntryKey(*row) for row in rows]


class _Row(NamedTuple):
    id: int
    writer_uid: int
    file: str | None
    stored_size: int


def _too_many(rows: list[_Row], most_bytes: int) -> _Row | None:
    """Return the row to forget next if there are too many or too large ones: the oldest of the user with most."""
    with_files = [row for row in rows if row.file]
    count, size = Counter[int](), Counter[int]()
    for row in rows:
        count[row.writer_uid] += 1
        size[row.writer_uid] += row.stored_size if row.file else 0
    for amounts, among, most in ((count, rows, _MOST_KEPT_ROWS), (size, with_files, most_bytes)):
        if amounts.total() > most:
            ((uid, _),) = amounts.most_common(1)
            return next(row for row in among if row.writer_uid == uid)
    return None


def _is_of(entry: EntryKey, beginning: bytes) -> bool:
    """Return whether an envelope names this entry's key."""
    found = header.unpack(beginning)
    return found is not None and found[0] == entry.key
