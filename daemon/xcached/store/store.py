"""The store: SQLite rows, and files beside them for large contents.

Changes belong to the writer thread; ``reader`` and ``files.open`` are for the serving thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from xcache.errors import RefusedError, StoreError
from xcache.wire import protocol
from xcache.wire.checks import proven_texts
from xcached.clock import GuardedClock
from xcached.store.blobs import BlobFiles
from xcached.store.database import Database, is_full
from xcached.store.entries import EntryKey, Source, Writer
from xcached.store.eviction import used, worth
from xcached.store.limits import LEAST_ROOM, Limits
from xcached.store.reader import Reader
from xcached.store.statistics import Statistics
from xcached.store.uses import Uses

# Bytes of a component's text in a row. limits.py bounds the number of entries.
# A compile counts for at most this time, whatever its writer says.
_LONGEST_COMPILE_SECONDS = 24 * 3600.0
# Rows per user. Two thousand marks of the longest texts take 2.5 MB.
_MOST_MARKS = 2000
# Compile times per user, and aliases; a small store keeps fewer.
_MOST_ROWS, _LEAST_ROWS = 100_000, 1000
# The runs may take at most this fraction (1/n) of the store, and so may the quarantine.
_OTHER_DATA_DIVISOR = 20
# Lower bound of that share on a disk short of space, enough for the runs of some programs.
_LEAST_OTHER_DATA_BYTES = 1024**2
# Removals of a user's entries between two trims of the compile times, which take some milliseconds each.
_REMOVALS_PER_TRIM = 500


class _UndoneError(Exception):
    """Ends a rehearsal."""


class Store:
    """Opens or makes the store in a folder; raises NewerStoreError for a store of a newer xcache."""

    def __init__(self, directory: Path, limits: Limits | None = None, *, shared: bool = False) -> None:
        """``shared``: the store has several users, and limits are kept fairly between them."""
        self.directory = directory
        self.shared = shared
        # The store's bytes when the disk was found short of space; None while it is not.
        self.bytes_when_disk_ran_short: int | None = None
        self.database = Database(directory)
        self.savepoint = self.database.savepoint
        self._db = self.database.writing
        self.reader = Reader(self.database.reading)
        try:
            self.files = BlobFiles(directory / "blobs", shared=shared)
        except OSError as error:
            self.database.close()
            raise StoreError(f"{directory / 'blobs'} cannot be used: {error.strerror}") from None
        self.set_limits(limits or Limits())
        self.statistics, self.uses = Statistics(self._db), Uses(self._db)
        self.age_clock = GuardedClock(self.uses.wall_time)
        self.after_put: Callable[[protocol.Put, Writer], object] = lambda *_: None
        """Called within the transaction of each put."""
        self.after_commit: Callable[[], object] = lambda: None
        """Called after each transaction that was committed."""
        # Whether the pins have to be counted again.
        self.pins_changed = True
        # Removed entries per user since their compile times were last trimmed.
        self._went: Counter[int] = Counter()

    def set_limits(self, limits: Limits) -> None:
        """Change the limits."""
        self.limits = limits
        # Users whose quota is to be checked: those who put something since the last check, and now everybody.
        self.grown = {uid for (uid,) in self._db.execute("SELECT uid FROM users")}

    def time_of_use(self) -> float:
        """Return the time to store for a use now: the wall clock's, or the guarded clock's if that is later."""
        return max(time.time(), self.age_clock.now(self.limits.max_age))

    def most_other_data(self, most: int) -> int:
        """Return the bytes allowed for one kind of data beside entries: ``most``, or less in a small store."""
        if self.limits.max_size:
            most = min(most, self.limits.max_size // _OTHER_DATA_DIVISOR)
        if self.bytes_when_disk_ran_short is not None:
            most = min(most, max(_LEAST_OTHER_DATA_BYTES, self.bytes_when_disk_ran_short // _OTHER_DATA_DIVISOR))
        return most

    def close(self) -> None:
        """Close the database, which removes its journal."""
        self.database.close()

    @contextlib.contextmanager
    def transaction(self, *, frees: bool = False) -> Iterator[None]:
        """Commit everything inside, durably, or nothing of it; ``frees``: whether it frees room."""
        with self.database.transaction(frees=frees):
            yield
        self.after_commit()

    def free(self, work: Callable[[], object]) -> None:
        """Do in a transaction of its own what frees room; on a full disk, the reserve goes for it."""
        try:
            with self.transaction(frees=True):
                work()
        except sqlite3.Error as error:
            if not is_full(error) or not self.database.use_reserve():
                raise
            with self.transaction(frees=True):
                work()

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Undo everything inside at the end."""
        before = self.uses.now, set(self.grown)
        try:
            with (
                contextlib.suppress(_UndoneError),
                self.database.kept_in_memory(),
                self.database.transaction(frees=True),
            ):
                yield
                raise _UndoneError
        finally:
            self.uses.now, self.grown = before
            self.pins_changed = True

    def has(self, entry: EntryKey) -> bool:
        """Return whether there is such an entry, with contents."""
        sql = "SELECT 1 FROM entries JOIN blobs ON blobs.digest = entries.blob WHERE key = ? AND writer_uid = ?"
        return self._db.execute(sql, entry).fetchone() is not None

    def check(self, source: Source) -> None:
        """Raise RefusedError unless a content is what was announced."""
        if source.checked:
            return
        if source.descriptor is not None:
            self.files.check(source.descriptor, source.size, source.digest, source.offset)
        elif (
            source.content is None
            or len(source.content) != source.size
            or hashlib.sha256(source.content).hexdigest() != source.digest
        ):
            raise RefusedError("wrong digest", "the bytes do not have the announced digest")

    def accept(self, source: Source) -> None:
        """Put a large content on disk under its digest, before the transaction that refers to it.

        An existing file is replaced, because it may be damaged.
        """
        if source.copy is not None:
            self.files.settle(source.copy, source.digest)
        elif source.descriptor is not None:
            self.files.write(source.descriptor, source.size, source.digest, source.offset)

    def put(self, put: protocol.Put, executable: Source, program: Source, writer: Writer) -> list[str]:
        """Within a transaction: add or replace an entry. Return digests that may be unreferenced now."""
        pinned = self._refers("entries", key=put.key, writer_uid=writer.uid, pinned=1)
        maybe_orphaned = self.remove([EntryKey(put.key, writer.uid)], staying=put.program_digest)
        turn = self.uses.next()
        usage = used(self.uses.before(EntryKey(put.key, writer.uid)), turn.time)
        maybe_orphaned += self._insert_blob(executable)
        if not self._refers("programs", digest=put.program_digest, writer_uid=writer.uid):
            maybe_orphaned += self._insert_blob(program)
            self._insert(
                "programs",
                digest=put.program_digest,
                writer_uid=writer.uid,
                raw_size=put.program_raw_size,
                codec=put.codec,
                blob=program.digest,
            )
        # A text is shown for all entries with that component, whoever brought it.
        described = proven_texts(put.components, put.details.items())
        for name, text in described.items():
            self._describe(put.components[name], name, text)
        names = {
            "module_name": put.module_name,
            "platform": put.platform,
            "device_kind": put.device_kind,
            "jaxlib_version": put.jaxlib_version,
            "writer_program": writer.program,
        }
        names = {name: cut(text, protocol.MAX_NAME) for name, text in names.items()}
        seconds = min(put.compile_seconds, _LONGEST_COMPILE_SECONDS)
        (kept,) = self._db.execute(
            "SELECT blobs.stored_size FROM programs JOIN blobs ON blobs.digest = programs.blob"
            " WHERE programs.digest = ? AND programs.writer_uid = ?",
            (put.program_digest, writer.uid),
        ).fetchone()
        # The stored program is kept, and its size may differ from the new one's. Texts count in full, even if other
        # entries share them: otherwise the second entry would have them for nothing.
        texts = sum(len(text.encode()) for text in (*names.values(), *described.values()))
        footprint = put.stored_size + kept + texts
        now = self.time_of_use()
        self._insert(
            "entries",
            key=put.key,
            writer_uid=writer.uid,
            blob=put.digest,
            codec=put.codec,
            raw_size=put.raw_size,
            stored_size=put.stored_size,
            compile_seconds=seconds,
            created_at=now,
            last_used_at=now,
            used_order=turn.order,
            hits=0,
            writer_pid=writer.pid,
            program=put.program_digest,
            footprint=footprint,
            uses=usage.uses,
            used_time=usage.time,
            worth=worth(usage, seconds, footprint),
            pinned=int(pinned),
            **names,
            **{f"{name}_component": put.components.get(name) for name in protocol.DESCRIBED_COMPONENTS},
        )
        self.grown.add(writer.uid)
        self.after_put(put, writer)
        return maybe_orphaned

    def _describe(self, component: str, name: str, text: str) -> None:
        """Keep the text of a component, in place of one that an older daemon has taken without a proof."""
        sql = "DELETE FROM components WHERE digest = ? AND description IS NOT ? RETURNING uses"
        uses = self._db.execute(sql, (component, text)).fetchone() or (0,)
        sql = "INSERT OR IGNORE INTO components (digest, name, description, uses) VALUES (?, ?, ?, ?)"
        self._db.execute(sql, (component, name, text, *uses))

    def mark_not_cacheable(self, mark: protocol.MarkNotCacheable, uid: int) -> None:
        """Within a transaction: mark a key as not cacheable; the user's oldest marks are forgotten."""
        self._db.execute(
            "INSERT OR REPLACE INTO not_cacheable (key, writer_uid, module_name, reason, created_at)"
            " VALUES (?, ?, ?, ?, ?)",
            (mark.key, uid, cut(mark.module_name, protocol.MAX_NAME), cut(mark.reason, protocol.MAX_NAME), time.time()),
        )
        self.forget_oldest("not_cacheable", uid, _MOST_MARKS)

    def forget_marks(self, uid: int | None) -> None:
        """Within a transaction: forget the marks of one user (None: of all)."""
        self._db.execute("DELETE FROM not_cacheable WHERE writer_uid = coalesce(?, writer_uid)", (uid,))

    def remove(self, entries: Iterable[EntryKey], reason: str = "", *, staying: str = "") -> list[str]:
        """Within a transaction: delete entries and what only they used. Return digests of files to delete after.

        ``reason`` is a cause of later misses. ``staying`` is a program that the next entry uses: its aliases would go
        with it.
        """
        maybe_orphaned: list[str] = []
        for entry in entries:
            self._db.execute("DELETE FROM not_cacheable WHERE key = ? AND writer_uid = ?", entry)
            row = self._db.execute(
                "SELECT blob, program, pinned FROM entries WHERE key = ? AND writer_uid = ?", entry
            ).fetchone()
            if row is None:
                continue
            blob, program, pinned = row
            self.pins_changed |= bool(pinned)
            self._db.execute("DELETE FROM entries WHERE key = ? AND writer_uid = ?", entry)
            if reason:
                sql = "UPDATE compile_times SET reason = ? WHERE key = ? AND writer_uid = ?"
                self._db.execute(sql, (reason, *entry))
            maybe_orphaned += self._drop_blob(blob)
            owned = (program, entry.writer_uid)
            if program != staying and not self._refers("entries", program=program, writer_uid=entry.writer_uid):
                found = self._db.execute(
                    "SELECT blob FROM programs WHERE digest = ? AND writer_uid = ?", owned
                ).fetchone()
                self._db.execute("DELETE FROM programs WHERE digest = ? AND writer_uid = ?", owned)
                maybe_orphaned += self._drop_blob(found[0]) if found else ()
            self._count_gone(entry.writer_uid)
        return maybe_orphaned

    def note_refusal(self, entry: EntryKey, seconds: float, kind: str) -> None:
        """Within a transaction: remember, as a cause of later misses, that an entry was not taken."""
        self._db.execute(
            "INSERT INTO compile_times (key, writer_uid, seconds, uses, used_time, reason) VALUES (?, ?, ?, 0, 0, ?)"
            " ON CONFLICT (key, writer_uid) DO UPDATE SET seconds = excluded.seconds, reason = excluded.reason",
            (*entry, min(seconds, _LONGEST_COMPILE_SECONDS), f"refused: {kind}"),
        )
        self._count_gone(entry.writer_uid)

    def _count_gone(self, uid: int) -> None:
        """Count a compile time that was kept, and trim a user's after many."""
        self._went[uid] += 1
        if self._went[uid] >= _REMOVALS_PER_TRIM:
            del self._went[uid]
            self.forget_oldest("compile_times", uid, self.most_rows(uid))

    def let_go(self, entries: Sequence[EntryKey], reason: str = "", counted_as: str = "") -> int:
        """Remove entries and delete their files, even on a full disk; return how many files.

        ``reason`` is a cause of later misses.
        """
        at, together, files, files_went_first = 0, len(entries), 0, False
        while at < len(entries):
            going = entries[at : at + together]
            try:
                with self.transaction(frees=True):
                    maybe_orphaned = self.remove(going, reason)
                    if counted_as:
                        self.statistics.add({counted_as: len(going)})
            except sqlite3.Error as error:
                if not is_full(error):
                    raise
                if not self.database.use_reserve() and together == 1:
                    # After a crash now, rows without files are no entries either.
                    if files_went_first or not (gone := self._delete_files_of(entries[at:])):
                        raise
                    files, files_went_first = files + gone, True
                # A smaller transaction may fit into the space there is.
                together = max(1, together // 2)
            else:
                files += self.delete_files(maybe_orphaned)
                at += together
        return files

    def _delete_files_of(self, entries: Iterable[EntryKey]) -> int:
        """Delete the files that only these entries have, before their rows; return how many."""
        with self.rehearsal():
            digests = [digest for digest in self.remove(entries) if not self._is_in_file(digest)]
        return sum(map(self.files.delete, digests))

    def delete_files(self, digests: Iterable[str]) -> int:
        """After a commit: delete the files among these digests that nothing refers to; return how many."""
        return sum(self.files.delete(digest) for digest in digests if not self._is_in_file(digest))

    def totals_now(self) -> dict[str, int]:
        """Return the totals by name, on the writer thread."""
        return dict(self._db.execute("SELECT name, amount FROM totals").fetchall())

    def entries_under(self, key: str) -> list[EntryKey]:
        """Return the entries and marks of all writers under a key."""
        sql = (
            "SELECT key, writer_uid FROM entries WHERE key = :key"
            " UNION SELECT key, writer_uid FROM not_cacheable WHERE key = :key"
        )
        return [EntryKey(*row) for row in self._db.execute(sql, {"key": key})]

    def entries_of(self, uid: int | None) -> list[EntryKey]:
        """Return all entries of one writer (None: of all)."""
        sql = "SELECT key, writer_uid FROM entries WHERE writer_uid = coalesce(?, writer_uid)"
        return [EntryKey(*row) for row in self._db.execute(sql, (uid,))]

    def sweep(self) -> int:
        """Delete files that no row refers to, such as those written just before a crash."""
        return sum(self.sweep_by_steps())

    def sweep_by_steps(self) -> Iterator[int]:
        """Sweep folder by folder; yield the number of files deleted from each."""
        yield self.files.clear_unfinished()
        for digests in self.files.by_folder():
            yield self.delete_files(digests)

    def most_rows(self, uid: int) -> int:
        """Return how many compile times or aliases to keep of a user: in a shared store as many as it has entries."""
        if self.shared:
            row = self._db.execute("SELECT entries FROM users WHERE uid = ?", (uid,)).fetchone()
            most = row[0] if row else 0
        else:
            most = self.limits.max_size // LEAST_ROOM if self.limits.max_size else _MOST_ROWS
        return min(_MOST_ROWS, max(_LEAST_ROWS, most))

    def forget_oldest(self, table: str, uid: int, most: int) -> None:
        """Within a transaction: delete a user's oldest rows of a table beyond ``most``."""
        self._db.execute(
            f"DELETE FROM {table} WHERE rowid IN (SELECT rowid FROM {table} WHERE writer_uid = ?"  # noqa: S608
            " ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
            (uid, most),
        )

    def _is_in_file(self, digest: str) -> bool:
        row = self._db.execute("SELECT content IS NULL FROM blobs WHERE digest = ?", (digest,)).fetchone()
        return row is not None and bool(row[0])

    def _refers(self, table: str, **values: object) -> bool:
        where = " AND ".join(f"{column} = ?" for column in values)
        sql = f"SELECT 1 FROM {table} WHERE {where} LIMIT 1"  # noqa: S608 - names of our own
        return self._db.execute(sql, tuple(values.values())).fetchone() is not None

    def _insert_blob(self, source: Source) -> Sequence[str]:
        """Insert or update a blob; return its digest if a row may have replaced a file."""
        if self._refers("blobs", digest=source.digest):
            # Its size, too: that may have been damaged, and the same bytes are put to replace it.
            sql = "UPDATE blobs SET stored_size = ?, content = ? WHERE digest = ?"
            self._db.execute(sql, (source.size, source.content, source.digest))
            return (source.digest,)
        self._insert("blobs", digest=source.digest, stored_size=source.size, content=source.content)
        return ()

    def _drop_blob(self, digest: str) -> Sequence[str]:
        if self._refers("entries", blob=digest) or self._refers("programs", blob=digest):
            return ()
        self._db.execute("DELETE FROM blobs WHERE digest = ?", (digest,))
        return (digest,)

    def _insert(self, table: str, **row: object) -> None:
        places = ", ".join("?" * len(row))
        sql = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})"  # noqa: S608 - names of our own
        self._db.execute(sql, tuple(row.values()))


def cut(text: str, most: int) -> str:
    """Return the beginning of a text, in at most ``most`` bytes of UTF-8."""
    return text if len(text) * 4 <= most else text.encode()[:most].decode(errors="ignore")
