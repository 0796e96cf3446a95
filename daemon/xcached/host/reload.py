"""The daemon's current settings, and their changes while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from xcache.config import config, remotes
from xcache.config.config import Config
from xcache.config.table import FIXED, SETTINGS
from xcache.errors import ConfigError
from xcached.host.watching import Depth, Watcher

logger = logging.getLogger("xcached")

# Time for an editor to finish writing a file, which it does in several steps.
_SETTLED_SECONDS = 0.1
# Longer if the file is empty or gone: it may be about to be written, and defaults could empty a large store.
_EMPTIED_SECONDS = 1.0


class FileState(NamedTuple):
    """A file's stat values, which change when the file does."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class FileChange(NamedTuple):
    """The new state of the files, and whether one of them became empty or vanished."""

    files: list[FileState | None]
    emptied: bool


class LiveSettings:
    """The current settings, as ``now``; callers ask each time and keep no copy."""

    def __init__(self) -> None:
        """Read the settings, or raise ConfigError; a failed reload keeps the old settings."""
        self._subscribers: list[Callable[[Config], None]] = []
        self._seen = file_states()
        self.now = config.load()
        self.problem = ""
        """Why the settings in the files are not in use; empty if they are."""

    def when_changed(self, subscriber: Callable[[Config], None]) -> None:
        """Call ``subscriber`` with new settings before they become ``now``.

        Only the first may refuse them, with a ConfigError, since the others have not been told by then.
        """
        self._subscribers.append(subscriber)

    def change(self) -> FileChange | None:
        """Return the new state of the files, if they differ from those last read; else None."""
        found = file_states()
        if found == self._seen:
            return None
        pairs = zip(self._seen, found, strict=False)
        return FileChange(found, any(old and old.size and not (new and new.size) for old, new in pairs))

    def reload(self) -> None:
        """Read the settings again: all of a valid change is taken, and nothing of an invalid one."""
        # Look at the files first, so that a change during the reading is noticed.
        self._seen = file_states()
        try:
            new = config.load()
            # Check the account first: the next check advises a restart, which cannot help if the account is unknown.
            new.daemon_uid()
            _refuse_fixed(self.now, new)
            changes = _describe_changes(self.now, new)
            for subscriber in self._subscribers if changes else ():
                subscriber(new)
        except (ConfigError, OSError) as error:
            self.problem = str(error)
            logger.error("the settings were not changed: %s", error)
            return
        self.problem = ""
        self.now = new
        for change in changes:
            logger.info("setting changed: %s", change)
        if not changes:
            logger.info("the settings were read again; nothing changed")


class Following:
    """Reloads the settings when their files change, as watchdog notices or a regular ``look`` finds."""

    def __init__(self, settings: LiveSettings, changed: Callable[[], None]) -> None:
        """``changed`` is called on the loop's thread after each reload."""
        self._settings = settings
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.TimerHandle | None = None
        self._watcher = Watcher(self._something_happened)
        self._watch()

    def look(self) -> None:
        """Schedule a reload if the files changed."""
        if self._waiting is None and self._settings.change() is not None:
            self._look_soon()
        self._watch()

    def close(self) -> None:
        """Stop following."""
        self._watcher.close()
        if self._waiting is not None:
            self._waiting.cancel()

    def _watch(self) -> None:
        self._watcher.watch(dict.fromkeys(_folders(), Depth.FILES))

    def _something_happened(self) -> None:
        # This is watchdog's thread; the loop may be closed by now.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._look_soon)

    def _look_soon(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        change = self._settings.change()
        patience = _EMPTIED_SECONDS if change is not None and change.emptied else _SETTLED_SECONDS
        self._waiting = self._loop.call_later(patience, self._settled, change)

    def _settled(self, change: FileChange | None) -> None:
        self._waiting = None
        if self._settings.change() != change:
            # Still being written, perhaps on a file system that reports nothing.
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
                f"{name} cannot change from {remotes.masked(str(before))!r} to {remotes.masked(str(after))!r}"
                f" ({new.sources.get(name)}) while the daemon runs; restart it"
            )


def _describe_changes(old: Config, new: Config) -> list[str]:
    """Return each change as ``name: old -> new (source)``."""
    pairs = [(setting.name, getattr(old, setting.name), getattr(new, setting.name)) for setting in SETTINGS]
    return [
        f"{name}: {remotes.masked(str(before))} -> {remotes.masked(str(after))} ({new.sources.get(name)})"
        for name, before, after in pairs
        if before != after
    ]


def file_states() -> list[FileState | None]:
    """Return each settings file's state; None for one that does not exist."""
    return [_state(path) for path in config.files()]


def _state(path: Path) -> FileState | None:
    try:
        found = path.stat()
    except OSError:
        return None
    # chmod changes ctime, not mtime.
    return FileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _folders() -> list[str]:
    """Return the folders in which a change of the files shows, links and missing parents included."""
    folders: dict[str, None] = {}
    for path in config.files():
        for place in (path, Path(os.path.realpath(path))):
            folder = place.parent
            while not folder.is_dir() and folder != folder.parent:
                folder = folder.parent
            folders[str(folder)] = None
    return list(folders)
