"""Watches folders for changes with watchdog, where the system reports them; the only user of watchdog."""

from __future__ import annotations

import enum
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger("xcached")

# Limit of watched folders. One descriptor and one thread serve all; the kernel keeps a kilobyte for each.
MOST_WATCHES = 2000
# As many symbolic links as the kernel follows for a path.
_MOST_LINKS = 40
# Parent folders whose move or deletion is noticed at once.
_WATCHED_PARENTS = 6


class Depth(enum.IntEnum):
    """The changes of a folder that are watched; each level includes the ones listed before it."""

    STAYS = 0
    """The folder itself is moved or deleted."""
    NAMES = 1
    """A name in it appears, disappears or changes."""
    FILES = 2
    """A file in it changes."""


class _Watch(NamedTuple):
    """A watched folder: watchdog's descriptor and callback number, the depth, and the folder's device and inode."""

    descriptor: int
    number: int
    depth: Depth
    identity: tuple[int, int]


class Watcher:
    """Calls back when something may have changed in some folders: not what changed, and perhaps too often."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        """``on_change`` is called on watchdog's thread, and must be quick."""
        self._on_change = on_change
        self._ids = itertools.count()
        self._watched: dict[str, _Watch] = {}
        self._inotify = _start()

    def watch(self, folders: Mapping[str, Depth]) -> bool:
        """Watch these folders and no others; return whether any of them is newly watched.

        A folder that cannot be watched is left out, so the caller still has to look now and then.
        """
        if self._inotify is None:
            return False
        deepest = sorted(folders.items(), key=lambda item: -item[1])[:MOST_WATCHES]
        wanted = {folder: (depth, identity) for folder, depth in deepest if (identity := _identity(folder))}
        for folder, watch in list(self._watched.items()):
            # A moved folder is still watched, and another folder may have its path now.
            if wanted.get(folder) != (watch.depth, watch.identity):
                self._watched.pop(folder, None)
                self._inotify.remove_callbacks([(watch.descriptor, watch.number)])
        added = [self._add(folder, *how) for folder, how in wanted.items() if folder not in self._watched]
        return any(added)

    def close(self) -> None:
        """Stop watching."""
        if self._inotify is not None:
            self._inotify.stop()

    # Callbacks of watchdog, on its thread.

    def on_event(self, event: object) -> None:  # noqa: ARG002
        """Report a change in a folder."""
        self._on_change()

    def on_watch_deleted(self, descriptor: int) -> None:
        """Forget a folder that is gone."""
        for folder, watch in list(self._watched.items()):
            if watch.descriptor == descriptor:
                self._watched.pop(folder, None)
        self._on_change()

    def on_queue_overflow(self) -> None:
        """Report a change: the kernel dropped events, so which one is unknown."""
        self._on_change()

    def _add(self, folder: str, depth: Depth, identity: tuple[int, int]) -> bool:
        number = next(self._ids)
        try:
            descriptor = self._inotify.add_callback(os.fsencode(folder), _mask(depth), self, number)
        except OSError as error:
            logger.debug("%s is not watched: %s", folder, error)
            return False
        # watchdog returns -1, without an error, for a folder it may not read.
        if descriptor == -1:
            return False
        self._watched[folder] = _Watch(descriptor, number, depth, identity)
        return True


def folders_of(paths: Iterable[str]) -> dict[str, Depth]:
    """Return the folders to watch for changes of these paths: those of the files, and of symbolic links on the way.

    Their parents are included, at a depth that notices when the whole folder is moved or deleted.
    """
    found: dict[str, Depth] = {}
    for folder, files in itertools.groupby(sorted(set(paths), key=_above), _above):
        for path in (folder, *filter(os.path.islink, files)):
            links, real = _resolve(path)
            deepest = {real if path == folder else _above(real): Depth.FILES}
            for one, depth in (dict.fromkeys(links, Depth.NAMES) | deepest).items():
                found[one] = max(depth, found.get(one, depth))
    for folder in list(found):
        for above in list(Path(folder).parents)[:_WATCHED_PARENTS]:
            found.setdefault(str(above), Depth.STAYS)
    return found


def _resolve(path: str) -> tuple[set[str], str]:
    """Return the folders of all symbolic links on the way to a path, and the path they lead to."""
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
    """Return the device and inode, which tell a folder from a later one at the same path."""
    try:
        found = Path(folder).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _mask(depth: Depth) -> int:
    from watchdog.observers.inotify_c import InotifyConstants as Inotify

    # IN_MASK_ADD: two paths may be the same folder (a bind mount); the second watch must not narrow the first.
    mask: int = Inotify.IN_DELETE_SELF | Inotify.IN_MOVE_SELF | Inotify.IN_ONLYDIR | Inotify.IN_MASK_ADD
    if depth >= Depth.NAMES:
        mask |= Inotify.IN_MOVE | Inotify.IN_CREATE | Inotify.IN_DELETE
    if depth >= Depth.FILES:
        mask |= Inotify.IN_MODIFY | Inotify.IN_ATTRIB
    return mask


def _start() -> Any:
    """Return watchdog's inotify thread, started; None where there is no inotify."""
    try:
        from watchdog.observers.inotify_c import InotifyFD

        inotify = InotifyFD()
    except Exception as error:  # noqa: BLE001 - watchdog has exceptions of its own on other systems
        logger.info("folders are not watched, but checked now and then: %s", error)
        return None
    inotify.start()
    return inotify
