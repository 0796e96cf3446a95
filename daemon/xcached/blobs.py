"""Large contents as files named by their digest: written aside, synced, renamed, and only then spoken of."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from xcache.errors import RefusedError

_NAME = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20


class BlobFiles:
    """A folder of content-addressed files. One thread writes; any thread may open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unfinished = folder / "unfinished"
        self._unfinished.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        """Where the content with this digest is, if it is here."""
        return self._folder / digest[:2] / digest

    def open(self, digest: str) -> int | None:
        """A descriptor to read it from, or None if it is gone; any other trouble is an OSError."""
        try:
            return os.open(self.path(digest), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None

    def write(self, source: int, size: int, digest: str) -> None:
        """Copy ``size`` bytes from a descriptor; afterwards they are on disk under ``digest``, or nothing is."""
        status = os.fstat(source)
        # What is no file may go on without an end, and would fill the disk before it is found to be something else.
        if not stat.S_ISREG(status.st_mode) or status.st_size < size:
            raise RefusedError("wrong size", f"there are no {size} bytes in what was handed over")
        target = self.path(digest)
        aside = self._unfinished / digest
        try:
            self._make_folders(target.parent)
            with open(aside, "wb", opener=_opener) as file:
                found = hashlib.sha256()
                for chunk in read_chunks(source, size):
                    found.update(chunk)
                    file.write(chunk)
                if found.hexdigest() != digest:
                    raise RefusedError("wrong digest", "the bytes are not those of the digest that was given")
                file.flush()
                os.fsync(file.fileno())
            aside.rename(target)
            _sync_folder(target.parent)
        except OSError as error:
            raise RefusedError(_kind(error), f"{target.parent}: {error.strerror}") from None
        finally:
            aside.unlink(missing_ok=True)

    def _make_folders(self, needed: Path) -> None:
        """Make what is missing of the folders, which somebody may have deleted; never the store they belong to."""
        for folder in (self._folder, self._unfinished, needed):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
                _sync_folder(folder.parent)

    def delete(self, digest: str) -> bool:
        """Remove a content, and whether there was one; one that is gone already is no trouble."""
        try:
            self.path(digest).unlink()
        except OSError:
            return False
        return True

    def clear_unfinished(self) -> int:
        """Delete what a killed daemon left half written."""
        count = 0
        for path in self._unfinished.iterdir():
            path.unlink(missing_ok=True)
            count += 1
        return count

    def by_folder(self) -> Iterator[list[str]]:
        """The digests of all files, folder by folder."""
        for folder in sorted(self._folder.iterdir()):
            if len(folder.name) == 2:
                yield [path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)]


def read_chunks(source: int, size: int) -> Iterator[bytes]:
    """Exactly ``size`` bytes of a descriptor that a client handed over, wherever it stood."""
    at = 0
    while at < size:
        chunk = os.pread(source, min(_CHUNK, size - at), at)
        if not chunk:
            raise RefusedError("wrong size", f"{at} bytes came where {size} were announced")
        at += len(chunk)
        yield chunk


def _kind(error: OSError) -> str:
    return "disk full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "store error"


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
