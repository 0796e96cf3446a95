"""The settings of the daemon as they are now, and how they change while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from xcache import config
from xcache.config import Config
from xcache.errors import ConfigError
from xcache.settings import FIXED, SETTINGS
from xcached.watching import Depth, Watcher

logger = logging.getLogger("xcached")

# An editor writes a file in several steps.
_SETTLED_SECONDS = 0.1
# One that is empty or gone is perhaps about to be written. By the defaults, most of a large store would have to go.
_EMPTIED_SECONDS = 1.0


class Identity(NamedTuple):
    """What tells that a file is not what it was."""

    device: int
    inode: int
    size: int
    written: int
    changed: int


class Change(NamedTuple):
    """What the files have become, and whether one of them has nothing in it any more."""

    files: list[Identity | None]
    emptied: bool


class Settings:
    """What is asked for ``now`` when it is needed; never kept by who asks."""

    def __init__(self, load: Callable[[], Config] = config.load) -> None:
        """``load`` reads them; what it read when the daemon started has to be right."""
        self._load = load
        self._takers: list[Callable[[Config], None]] = []
        self._seen = _look()
        self.now = load()
        self.problem = ""
        """Why the settings as they stand in the files now were refused, if they were."""

    def when_changed(self, take: Callable[[Config], None]) -> None:
        """Have ``take`` called with new settings before they are ``now``; a ConfigError from the first refuses them."""
        self._takers.append(take)

    def change(self) -> Change | None:
        """What their files are now, where that is not what it was when they were read."""
        found = _look()
        if found == self._seen:
            return None
        pairs = zip(self._seen, found, strict=False)
        return Change(found, any(old and old.size and not (now and now.size) for old, now in pairs))

    def reload(self) -> None:
        """Read them again. All of a valid change is taken, and nothing of one that is not."""
        # First, so that what is written meanwhile is noticed.
        self._seen = _look()
        try:
            new = self._load()
            _refuse_fixed(self.now, new)
            changes = _changes(self.now, new)
            for take in self._takers if changes else ():
                take(new)
        except (ConfigError, OSError) as error:
            self.problem = str(error)
            logger.error("the settings were not changed: %s", error)
            return
        self.problem = ""
        self.now = new
        for change in changes:
            logger.info("setting changed: %s", change)
        if not changes:
            logger.info("the settings were read again and are what they were")


class Following:
    """Follows the files as they change: watchdog tells of folders, and ``look`` is called now and then besides."""

    def __init__(self, settings: Settings, changed: Callable[[], None]) -> None:
        """``changed`` is called on the loop's thread after they were read again."""
        self._settings = settings
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.TimerHandle | None = None
        self._watcher = Watcher(self._something_happened)
        self._watch()

    def look(self) -> None:
        """Have them read again soon if they changed."""
        if self._waiting is None and self._settings.change() is not None:
            self._look_soon()
        self._watch()

    def close(self) -> None:
        """Follow no longer."""
        self._watcher.close()
        if self._waiting is not None:
            self._waiting.cancel()

    def _watch(self) -> None:
        self._watcher.watch(dict.fromkeys(_folders(), Depth.FILES))

    def _something_happened(self) -> None:
        # On watchdog's thread; the loop may be closed by now.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._look_soon)

    def _look_soon(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        change = self._settings.change()
        patience = _EMPTIED_SECONDS if change is not None and change.emptied else _SETTLED_SECONDS
        self._waiting = self._loop.call_later(patience, self._settled, change)

    def _settled(self, change: Change | None) -> None:
        self._waiting = None
        if self._settings.change() != change:
            # Still being written, perhaps where nobody tells of it.
            self._look_soon()
            return
        if change is not None:
            self._settings.reload()
            self._changed()
        self._watch()


def _refuse_fixed(old: Config, new: Config) -> None:
    for name in FIXED:
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            raise ConfigError(
                f"{name} cannot change from {str(before)!r} to {str(after)!r} ({new.sources.get(name)}) while the"
                " daemon runs; restart it"
            )


def _changes(old: Config, new: Config) -> list[str]:
    """Each change as ``name: old -> new``."""
    pairs = [(setting.name, getattr(old, setting.name), getattr(new, setting.name)) for setting in SETTINGS]
    return [
        f"{name}: {before} -> {after} ({new.sources.get(name)})" for name, before, after in pairs if before != after
    ]


def _look() -> list[Identity | None]:
    """What tells whether a file is another than before; None for one that is not there."""
    return [_identity(path) for path in config.files()]


def _identity(path: Path) -> Identity | None:
    try:
        found = path.stat()
    except OSError:
        return None
    # Who may read it is not in the time of what is in it.
    return Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _folders() -> list[str]:
    """Where a change of the files shows: in their folders, those they are linked from, or what there is above them."""
    folders: dict[str, None] = {}
    for path in config.files():
        for place in (path, Path(os.path.realpath(path))):
            folder = place.parent
            while not folder.is_dir() and folder != folder.parent:
                folder = folder.parent
            folders[str(folder)] = None
    return list(folders)
