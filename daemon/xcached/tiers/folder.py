"""A folder that machines share: NFS, a mounted bucket, a volume of a cluster. Plain files, written aside and renamed.

Every operation runs in a thread, because a mount whose server is gone holds the caller for ever.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

from xcached.tiers.tier import (
    DENIED,
    FAILED,
    FULL,
    MISSING,
    READ_ONLY,
    TOO_LARGE,
    UNREACHABLE,
    Listed,
    TierError,
    is_name,
)
from xcached.tiers.workers import Workers

_T = TypeVar("_T")

_KINDS = (
    {errno.EACCES: DENIED, errno.EPERM: DENIED, errno.EROFS: READ_ONLY, errno.EFBIG: TOO_LARGE}
    | dict.fromkeys((errno.ENOSPC, errno.EDQUOT), FULL)
    # The errors of a mount whose server is gone.
    | dict.fromkeys(
        (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH), UNREACHABLE
    )
)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
# A file being written; no object's name has this character.
_ASIDE = "#"
# So old is only what a writer left that was killed.
_LEFTOVER_SECONDS = 86400.0
_THREADS = 16


class Folder:
    """A shared folder."""

    can_create = True
    can_list = True

    def __init__(self, root: Path) -> None:
        self._root = root
        self._workers = Workers(_THREADS)

    async def get(self, name: str, most: int) -> bytes | None:
        """Return an object of at most ``most`` bytes; None if there is none."""
        return await self._in_thread(lambda: self._read(name, most))

    async def begin(self, name: str, most: int) -> bytes | None:
        """Return the first ``most`` bytes of an object, or all it has; None if there is none."""
        return await self._in_thread(lambda: self._read(name, most, whole=False))

    async def contains(self, name: str) -> bool:
        """Return whether there is such an object."""
        return await self._in_thread(lambda: self._is_there(name))

    async def put(self, name: str, content: bytes) -> None:
        """Write an object, in place of an older one."""
        await self._in_thread(lambda: self._write(name, content))

    async def create(self, name: str, content: bytes) -> bool:
        """Write an object unless there is one; return whether it was written."""
        return await self._in_thread(lambda: self._write_new(name, content))

    async def remove(self, name: str) -> None:
        """Remove an object. The folder in which it was stays: another machine may be writing there."""
        await self._in_thread(lambda: self._unlink(name))

    async def listed(self, prefix: str) -> AsyncIterator[Listed]:
        """Yield the objects whose names begin so."""
        folders = [prefix.rpartition("/")[0]]
        await self._in_thread(self._require_root)
        while folders:
            below, objects = await self._in_thread(functools.partial(self._scan, folders.pop()))
            folders += [each for each in below if f"{each}/".startswith(prefix) or prefix.startswith(f"{each}/")]
            for each in objects:
                if each.name.startswith(prefix):
                    yield each

    async def close(self) -> None:
        """End the threads."""
        self._workers.close()

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        try:
            return await self._workers.do(work)
        except OSError as error:
            raise self._translated(error) from None
        except RuntimeError:
            raise TierError(FAILED, "no thread can be started") from None

    def _translated(self, error: OSError) -> TierError:
        kind = _KINDS.get(error.errno or 0, FAILED)
        return TierError(kind, f"{self._root}: {os.strerror(error.errno) if error.errno else 'failed'}")

    def _require_root(self) -> os.stat_result:
        try:
            found = self._root.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise TierError(MISSING, f"{self._root} does not exist") from None
        if not stat.S_ISDIR(found.st_mode):
            raise TierError(MISSING, f"{self._root} is not a folder")
        return found

    def _read(self, name: str, most: int, *, whole: bool = True) -> bytes | None:
        try:
            # Without waiting, should it be a pipe.
            descriptor = os.open(self._root / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            self._require_root()
            return None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                return None
            if found.st_size <= most or not whole:
                with os.fdopen(descriptor, "rb", closefd=False) as file:
                    content = file.read(most + whole)
                if len(content) <= most:
                    return content
            raise TierError(TOO_LARGE, f"an object has {found.st_size} bytes; at most {most} were asked for")
        finally:
            os.close(descriptor)

    def _is_there(self, name: str) -> bool:
        try:
            return stat.S_ISREG((self._root / name).stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            self._require_root()
            return False

    def _unlink(self, name: str) -> None:
        try:
            with self._writing():
                (self._root / name).unlink()
        except (FileNotFoundError, NotADirectoryError):
            self._require_root()

    def _write(self, name: str, content: bytes) -> None:
        with self._writing(), self._written_aside(name, content) as aside:
            aside.replace(self._root / name)

    def _write_new(self, name: str, content: bytes) -> bool:
        with self._writing(), self._written_aside(name, content) as aside:
            try:
                os.link(aside, self._root / name)
            except FileExistsError:
                # A server of NFS that did it may be asked again, when its answer is lost.
                return aside.stat().st_nlink == 2
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise TierError(FAILED, f"{self._root} is on a file system without hard links") from None
            return True

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except PermissionError:
            if os.access(self._root, os.R_OK | os.X_OK):
                raise TierError(READ_ONLY, f"{self._root} can be read, and not written") from None
            raise

    @contextlib.contextmanager
    def _written_aside(self, name: str, content: bytes) -> Iterator[Path]:
        """Write a file beside the place of an object, with the permissions of the folder; it is gone afterwards."""
        mode = self._require_root().st_mode
        aside = (self._root / name).with_name(f"{_ASIDE}{secrets.token_hex(8)}")
        try:
            descriptor = _opened_new(aside)
        except FileNotFoundError:
            self._make_folder(aside.parent, mode)
            descriptor = _opened_new(aside)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                # Not every file system has permissions.
                with contextlib.suppress(OSError):
                    os.fchmod(descriptor, mode & 0o666)
            yield aside
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()

    def _make_folder(self, folder: Path, mode: int) -> None:
        # The root itself is not made: where nothing is mounted, nothing belongs.
        for each in reversed([folder, *folder.parents]):
            if self._root in each.parents:
                with contextlib.suppress(FileExistsError):
                    each.mkdir(0o700)
                    with contextlib.suppress(OSError):
                        each.chmod(mode & 0o2777)

    def _scan(self, folder: str) -> tuple[list[str], list[Listed]]:
        """Return the names of folders and objects in a folder; remove what killed writers left."""
        folders, objects = [], []
        try:
            entries = list(os.scandir(self._root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return [], []
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            # It may be gone by now.
            with contextlib.suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                elif entry.is_file(follow_symlinks=False):
                    found = entry.stat(follow_symlinks=False)
                    if is_name(name):
                        objects.append(Listed(name, found.st_size, found.st_mtime))
                    elif entry.name.startswith(_ASIDE) and time.time() - found.st_mtime > _LEFTOVER_SECONDS:
                        with contextlib.suppress(OSError):
                            Path(entry.path).unlink()
        return folders, objects


def _opened_new(file: Path) -> int:
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
