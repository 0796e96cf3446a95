"""Folders are watched for changes, by watchdog where the system tells of them; the only user of watchdog."""

from __future__ import annotations

import enum
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger("xcached")

# One descriptor and one thread serve all of them; the kernel keeps a kilobyte for each.
_MOST_WATCHES = 2000
# As many links as the kernel follows on the way to a file.
_MOST_LINKS = 40
# How far up somebody may move a folder away and have it noticed at once.
_LEVELS = 6


class Depth(enum.IntEnum):
    """What of a folder is watched; each includes those above."""

    STAYS = 0
    """Whether it is moved away or deleted."""
    NAMES = 1
    """And which names there are in it."""
    FILES = 2
    """And what happens to the files in it."""


class _Watch(NamedTuple):
    """What watchdog calls a folder, how deep it is watched, and which one it is that had its path then."""

    descriptor: int
    number: int
    depth: Depth
    identity: tuple[int, int]


class Watcher:
    """Tells when something may have changed in some folders: not what, and perhaps more often than it did."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        """``on_change`` is called on a thread of its own, and must be quick."""
        self._on_change = on_change
        self._ids = itertools.count()
        self._watched: dict[str, _Watch] = {}
        self._inotify = _start()

    def watch(self, folders: Mapping[str, Depth]) -> bool:
        """Watch these, and no others; whether some of them are watched only from now on.

        What cannot be watched is passed over: whoever needs to know looks now and then.
        """
        if self._inotify is None:
            return False
        deepest = sorted(folders.items(), key=lambda item: -item[1])[:_MOST_WATCHES]
        wanted = {folder: (depth, identity) for folder, depth in deepest if (identity := _identity(folder))}
        for folder, watch in list(self._watched.items()):
            # One that was moved away is still watched, and another may have its path.
            if wanted.get(folder) != (watch.depth, watch.identity):
                self._watched.pop(folder, None)
                self._inotify.remove_callbacks([(watch.descriptor, watch.number)])
        added = [self._add(folder, *how) for folder, how in wanted.items() if folder not in self._watched]
        return any(added)

    def close(self) -> None:
        """Stop watching."""
        if self._inotify is not None:
            self._inotify.stop()

    # What watchdog calls, on its thread.

    def on_event(self, event: object) -> None:  # noqa: ARG002
        """Something happened in a folder."""
        self._on_change()

    def on_watch_deleted(self, descriptor: int) -> None:
        """A folder is gone."""
        for folder, watch in list(self._watched.items()):
            if watch.descriptor == descriptor:
                self._watched.pop(folder, None)
        self._on_change()

    def on_queue_overflow(self) -> None:
        """So much happened that nobody knows what."""
        self._on_change()

    def _add(self, folder: str, depth: Depth, identity: tuple[int, int]) -> bool:
        number = next(self._ids)
        try:
            descriptor = self._inotify.add_callback(os.fsencode(folder), _mask(depth), self, number)
        except OSError as error:
            logger.debug("%s is not watched: %s", folder, error)
            return False
        # watchdog says nothing of a folder that may not be read.
        if descriptor == -1:
            return False
        self._watched[folder] = _Watch(descriptor, number, depth, identity)
        return True


def folders_of(paths: Iterable[str]) -> dict[str, Depth]:
    """What has to be watched for what is found under these paths: the folders of files, and of links that lead there.

    What is above them is watched for being moved or deleted as a whole.
    """
    found: dict[str, Depth] = {}
    for folder, files in itertools.groupby(sorted(set(paths), key=_above), _above):
        for path in (folder, *filter(os.path.islink, files)):
            links, real = _resolve(path)
            deepest = {real if path == folder else _above(real): Depth.FILES}
            for one, depth in (dict.fromkeys(links, Depth.NAMES) | deepest).items():
                found[one] = max(depth, found.get(one, depth))
    for folder in list(found):
        for above in list(Path(folder).parents)[:_LEVELS]:
            found.setdefault(str(above), Depth.STAYS)
    return found


def _resolve(path: str) -> tuple[set[str], str]:
    """The folders of all symbolic links on the way to a path, and where it leads."""
    folders: set[str] = set()
    real, names, links = "/", path.split("/")[::-1], 0
    while names and links < _MOST_LINKS:
        name = names.pop()
        if name in ("", ".", ".."):
            real = _above(real) if name == ".." else real
            continue
        here = f"{real.rstrip('/')}/{name}"
        try:
            target = os.readlink(here)  # noqa: PTH115 - a Path for each would take most of the time
        except OSError:
            real = here
            continue
        folders.add(real)
        real = "/" if target.startswith("/") else real
        names += target.split("/")[::-1]
        links += 1
    return folders, real


def _above(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _identity(folder: str) -> tuple[int, int] | None:
    """What tells a folder from another one that has its path later."""
    try:
        found = Path(folder).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _mask(depth: Depth) -> int:
    from watchdog.observers.inotify_c import InotifyConstants as Inotify

    # Where two paths lead to the same folder, as bind mounts do, the second must not make it less.
    mask: int = Inotify.IN_DELETE_SELF | Inotify.IN_MOVE_SELF | Inotify.IN_ONLYDIR | Inotify.IN_MASK_ADD
    if depth >= Depth.NAMES:
        mask |= Inotify.IN_MOVE | Inotify.IN_CREATE | Inotify.IN_DELETE
    if depth >= Depth.FILES:
        mask |= Inotify.IN_MODIFY | Inotify.IN_ATTRIB
    return mask


def _start() -> Any:
    """watchdog's one thread that reads from the kernel; None where there is nothing to read."""
    try:
        from watchdog.observers.inotify_c import InotifyFD

        inotify = InotifyFD()
    except Exception as error:  # noqa: BLE001 - on other systems watchdog has exceptions of its own for that
        logger.info("folders are not watched, but looked at now and then: %s", error)
        return None
    inotify.start()
    return inotify
