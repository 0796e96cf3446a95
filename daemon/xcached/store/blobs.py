"""Content-addressed files for large contents: written under a temporary name, synced, then renamed to the digest."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import NamedTuple

from xcache.errors import RefusedError
from xcached.store.deleted_files import DeletedFiles
from xcached.store.disk import DiskUsage, usage_of

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 4 << 20
# One sync at the end would take long and keep other users from their turns.
_SYNC_EVERY_BYTES = 64 << 20
# macOS has no fdatasync.
_sync_data = getattr(os, "fdatasync", os.fsync)


class Place(NamedTuple):
    """An open file, and where a content begins in it."""

    descriptor: int
    offset: int = 0


class _Copy:
    """A copy in progress: the bytes written so far, and the bytes expected in all."""

    def __init__(self) -> None:
        self.written = self.expected = 0


class BlobFiles:
    """A folder of content-addressed files. Any thread may copy in and open; one thread settles and deletes."""

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        """``shared``: several users share the store, and a reader may keep another user's file open for long."""
        self._folder = folder
        self._shared = shared
        self._unfinished = folder / "unfinished"
        self.deleted = DeletedFiles(folder.parent / "held")
        self._numbers = itertools.count()
        # Names in ``unfinished`` being written; a killed daemon left the others.
        self._in_progress: dict[str, _Copy] = {}
        self.elsewhere: Callable[[str], tuple[int, int] | None] = lambda _: None
        """Returns a descriptor of another file that has a content, and where in it; None if there is none."""
        self._lock = threading.Lock()
        self._unfinished.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        """Return where the content with this digest is, if it is stored."""
        return self._folder / digest[:2] / digest

    def open(self, digest: str) -> Place | None:
        """Return where to read the content, or None if it is gone; raise OSError for any other failure."""
        try:
            return Place(os.open(self.path(digest), os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            elsewhere = self.elsewhere(digest)
            return None if elsewhere is None else Place(*elsewhere)

    def is_elsewhere(self, digest: str) -> bool:
        """Return whether the content is in place in another file."""
        found = self.elsewhere(digest)
        if found is not None:
            os.close(found[0])
        return found is not None

    def copy_in(self, source: int, size: int, digest: str, start: int = 0) -> Generator[None, None, Path | None]:
        """Check ``size`` bytes of a descriptor from ``start`` on, and copy them to a temporary file, in small steps.

        Returns the synced copy, for ``settle`` to name or ``discard`` to delete; None if the disk has no room.
        """
        unfinished = self._new_unfinished(digest)
        try:
            try:
                if self._has_plenty(unfinished, size):
                    yield from self._copy(source, size, digest, unfinished, start)
                    return unfinished
            except OSError as error:
                if not _is_full(error):
                    raise
                unfinished.unlink(missing_ok=True)
            yield from _check(source, size, digest, start)
        except OSError as error:
            self.discard(unfinished)
            raise RefusedError(_kind(error), f"{self._unfinished}: {error.strerror}") from None
        except BaseException:
            self.discard(unfinished)
            raise
        self.discard(unfinished)
        return None

    def check(self, source: int, size: int, digest: str, start: int = 0) -> None:
        """Raise RefusedError unless a descriptor holds the bytes of this digest."""
        for _ in _check(source, size, digest, start):
            pass

    def write(self, source: int, size: int, digest: str, start: int = 0) -> None:
        """Copy ``size`` bytes from a descriptor to disk under ``digest``; on failure nothing is left."""
        unfinished = self._new_unfinished(digest)
        try:
            for _ in self._copy(source, size, digest, unfinished, start):
                pass
            self.settle(unfinished, digest)
        except OSError as error:
            raise RefusedError(_kind(error), f"{self._unfinished}: {error.strerror}") from None
        finally:
            self.discard(unfinished)

    def settle(self, unfinished: Path, digest: str) -> None:
        """Rename a copy to its digest; from now on the content is stored."""
        target = self.path(digest)
        try:
            self._make_folders(target.parent)
            if self._shared:
                self.deleted.replace(target, unfinished)
            else:
                unfinished.rename(target)
            with self._lock:
                self._in_progress.pop(unfinished.name, None)
            _sync_folder(target.parent)
        except OSError as error:
            raise RefusedError(_kind(error), f"{target.parent}: {error.strerror}") from None

    def discard(self, unfinished: Path) -> None:
        """Delete a copy that was not settled."""
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        with self._lock:
            self._in_progress.pop(unfinished.name, None)

    def aside_bytes(self) -> int:
        """Return the bytes of unsettled copies: they take space on the disk, and may be discarded again."""
        with self._lock:
            return self._aside_bytes()

    def _aside_bytes(self) -> int:
        return sum(copy.written for copy in self._in_progress.values())

    def disk(self) -> DiskUsage:
        """Return the disk's free and total bytes. Unsettled copies count as free, so no entry is evicted for one.

        The lock covers the statvfs, so that the bytes written and the bytes free belong to the same moment.
        """
        with self._lock:
            found = usage_of(self._folder.parent)
            return found._replace(free=found.free + self._aside_bytes())

    def _new_unfinished(self, digest: str) -> Path:
        name = f"{digest}-{next(self._numbers)}"
        with self._lock:
            self._in_progress[name] = _Copy()
        return self._unfinished / name

    def _copy(self, source: int, size: int, digest: str, unfinished: Path, start: int) -> Iterator[None]:
        _require(source, start + size)
        self._make_folders(self._unfinished)
        with open(unfinished, "wb", opener=_opener) as file:
            found = hashlib.sha256()
            unsynced = 0
            for chunk in read_chunks(source, size, start):
                found.update(chunk)
                with self._lock:
                    self._in_progress[unfinished.name].written += len(chunk)
                file.write(chunk)
                unsynced += len(chunk)
                if unsynced >= _SYNC_EVERY_BYTES:
                    file.flush()
                    _sync_data(file.fileno())
                    unsynced = 0
                yield
            _compare(found, digest)
            file.flush()
            os.fsync(file.fileno())

    def _has_plenty(self, unfinished: Path, size: int) -> bool:
        """Return whether the disk has twice the room for this copy, beside all copies in progress."""
        with self._lock:
            to_come = sum(max(0, copy.expected - copy.written) for copy in self._in_progress.values())
            # Ask about the store's folder: the folder of the files may have been deleted.
            plenty = shutil.disk_usage(self._folder.parent).free >= to_come + 2 * size
            self._in_progress[unfinished.name].expected = size if plenty else 0
        return plenty

    def _make_folders(self, needed: Path) -> None:
        """Make the folders that are missing, in case somebody deleted them; never the store's own folder."""
        for folder in (self._folder, self._unfinished, needed):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
                _sync_folder(folder.parent)

    def delete(self, digest: str) -> bool:
        """Delete a content; return whether it is deleted now: not if it was gone, or is still open to a reader."""
        return self.delete_file(self.path(digest))

    def delete_file(self, path: Path) -> bool:
        """Delete a file that may be open; in a shared store its bytes come free even so."""
        try:
            if self._shared:
                return self.deleted.delete(path)
            path.unlink()
        except OSError:
            return False
        return True

    def clear_unfinished(self) -> int:
        """Delete what a killed daemon left half written; return how many files that were."""
        count = 0
        for path in self._unfinished.iterdir():
            if path.name not in self._in_progress:
                path.unlink(missing_ok=True)
                count += 1
        return count

    def by_folder(self) -> Iterator[list[str]]:
        """Yield the digests of all files, folder by folder."""
        for folder in sorted(self._folder.iterdir()):
            if len(folder.name) == 2:
                yield [path.name for path in folder.iterdir() if _DIGEST.fullmatch(path.name)]


def read_chunks(source: int, size: int, start: int = 0) -> Iterator[bytes]:
    """Yield exactly ``size`` bytes of a descriptor from ``start`` on, whatever its file offset."""
    at = 0
    while at < size:
        chunk = os.pread(source, min(_CHUNK_BYTES, size - at), start + at)
        if not chunk:
            raise RefusedError("wrong size", f"{size} bytes were announced, and the file has only {at}")
        at += len(chunk)
        yield chunk


def _check(source: int, size: int, digest: str, start: int) -> Iterator[None]:
    _require(source, start + size)
    found = hashlib.sha256()
    for chunk in read_chunks(source, size, start):
        found.update(chunk)
        yield
    _compare(found, digest)


def _require(source: int, size: int) -> None:
    """Refuse anything but a regular file: a pipe or device may never end, and would fill the disk."""
    status = os.fstat(source)
    if not stat.S_ISREG(status.st_mode) or status.st_size < size:
        raise RefusedError("wrong size", f"the descriptor is no file of {size} bytes")


def _compare(found: hashlib._Hash, digest: str) -> None:
    if found.hexdigest() != digest:
        raise RefusedError("wrong digest", "the bytes do not have the announced digest")


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _kind(error: OSError) -> str:
    return "disk full" if _is_full(error) else "store error"


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
