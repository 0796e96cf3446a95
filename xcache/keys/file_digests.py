"""Digests of files, remembered from one process to the next while the files do not change."""

import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from xcache.clock import process_began
from xcache.descriptors import check_file_size
from xcache.errors import UncacheableError
from xcache.keys.named_files import is_settled
from xcache.threads import processors
from xcache.wire.bounded import parsed_json, read_all
from xcache.wire.hashing import file_digest
from xcache.wire.protocol import InstalledFile

MEMO = "library-digests.json"
_MOST_THREADS = 4
LARGE_BYTES = 1 << 20
_MAX_MEMO_BYTES = 1 << 20
# A memo with more files than this is rid of those that no longer exist.
_MAX_MEMO_FILES = 256
# The name of a tree of files in the memo begins so, and a path does not; a tree for each installation in use.
_TREE, _MOST_TREES = "tree ", 16


# By path: the marks and digests of the files that this process has read. Threads want the same file at once, and one of
# them reads it.
_read: dict[str, list[Any]] = {}
_reading = threading.RLock()


class FileDigests:
    """Digests of large files, remembered in a memo until the file's size, inode, mtime or ctime changes."""

    def __init__(self, folder: Path | None) -> None:
        self._memo = None if folder is None else folder / MEMO
        self._known: dict[str, Any] = {}
        self._changed = False
        if self._memo is not None:
            self._known = _read_memo(self._memo)

    def of(self, path: Path, mapped: Callable[[], dict[Path, int]] = dict) -> InstalledFile:
        """Return ``path`` with its digest; raise UncacheableError if it was replaced since this process mapped it."""
        try:
            stat = path.stat()
            _check_in_place(stat, mapped)
            digest = self._remembered(path, stat)
            if digest is None:
                with _reading, path.open("rb") as file:
                    stat = os.fstat(file.fileno())
                    _check_in_place(stat, mapped)
                    digest = self._read(path, file, stat)
        except OSError:
            raise UncacheableError("a native library that cannot be read") from None
        return InstalledFile(str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino, digest)

    def _read(self, path: Path, file: BufferedReader, stat: os.stat_result) -> str:
        known = _read.get(str(path))
        if known is None or known[:-1] != _mark(stat):
            known = [*_mark(stat), file_digest(file, min(_MOST_THREADS, processors()))]
        if is_settled(stat):
            self._known[str(path)] = _read[str(path)] = known
            self._changed = True
        return str(known[-1])

    def _remembered(self, path: Path, stat: os.stat_result) -> str | None:
        known = self._known.get(str(path))
        return str(known[-1]) if isinstance(known, list) and known[-1] and known[:-1] == _mark(stat) else None

    def of_tree(self, mark: str, files: Mapping[str, Path]) -> str:
        """Return a digest of the contents of many files by name; ``mark`` changes when one of them does.

        Libraries are remembered one by one, because other digests have them, too.
        """
        name = f"{_TREE}{mark}"
        if isinstance(known := self._known.get(name), str):
            return known
        found, are_settled = hashlib.sha256(), True
        for shown, path in sorted(files.items()):
            if path.suffix == ".so":
                found.update(f"{shown} {self.of(path).digest}\n".encode())
                continue
            with path.open("rb") as file:
                are_settled &= is_settled(os.fstat(file.fileno()))
                found.update(f"{shown} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        if are_settled:
            trees = [each for each in self._known if each.startswith(_TREE)]
            for each in trees[: max(0, len(trees) + 1 - _MOST_TREES)]:
                del self._known[each]
            self._known[name] = found.hexdigest()
            self._changed = True
        return found.hexdigest()

    def save(self) -> None:
        """Write new digests to the memo. Failing to write it only costs time later."""
        if self._memo is None or not self._changed:
            return
        try:
            self._memo.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._memo.parent.stat().st_uid != os.getuid():
                return
            content = json.dumps(self._known)
            check_file_size(len(content))
            handle, name = tempfile.mkstemp(prefix=MEMO, dir=self._memo.parent)
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(content)
                Path(name).replace(self._memo)
            except BaseException:
                # On a full disk every process would leave such a file.
                Path(name).unlink(missing_ok=True)
                raise
        except OSError:
            return


def _check_in_place(stat: os.stat_result, mapped: Callable[[], dict[Path, int]]) -> None:
    """Raise UncacheableError for a library that was replaced since this process mapped it."""
    # Small libraries only load the large one. On a layered file system the inodes may never match, but there the file
    # is older than the process.
    if stat.st_size >= LARGE_BYTES and stat.st_ctime > process_began() - 1:
        inodes = mapped().values()
        if inodes and stat.st_ino not in inodes:
            raise UncacheableError("a native library was replaced while the program runs")


def _mark(stat: os.stat_result) -> list[int]:
    """Return the numbers that change when a file does."""
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _begin_in_child() -> None:
    """Another thread of the parent may have held the lock."""
    global _reading
    _reading = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)


def _read_memo(path: Path) -> dict[str, Any]:
    if not path.is_file():
        # Reading from a pipe would wait for a writer.
        return {}
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            # The memo decides the keys, so only this user may be able to write it.
            if stat.st_uid != os.getuid() or stat.st_mode & 0o022 or stat.st_size > _MAX_MEMO_BYTES:
                return {}
            known = parsed_json(read_all(file, _MAX_MEMO_BYTES), _MAX_MEMO_BYTES)
    except (OSError, ValueError):
        return {}
    return _living(known) if isinstance(known, dict) else {}


def _living(known: dict[str, Any]) -> dict[str, Any]:
    """Forget files that are gone, so that a memo does not grow with every environment there ever was."""
    if len(known) <= _MAX_MEMO_FILES:
        return known
    return {path: mark for path, mark in known.items() if path.startswith(_TREE) or Path(path).exists()}
