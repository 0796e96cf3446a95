"""Folders are watched for changes, by watchdog where the system tells of them; the only user of watchdog."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

logger = logging.getLogger("xcached")

# One descriptor and one thread serve all of them; the kernel keeps a kilobyte for each.
_MOST_WATCHES = 2000


class Watcher:
    """Tells when something may have changed in some folders: not what, and perhaps more often than it did."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        """``on_change`` is called on a thread of its own, and must be quick."""
        self._on_change = on_change
        self._ids = itertools.count()
        # What watchdog calls each of them, and whether what is in it is watched as well.
        self._watched: dict[str, tuple[Any, int, bool]] = {}
        self._inotify = _start()

    def watch(self, folders: Iterable[str], above: Iterable[str] = ()) -> None:
        """Watch what is in these ``folders``, and whether these and those ``above`` them stay; and no others.

        What cannot be watched is passed over: whoever needs to know looks now and then.
        """
        if self._inotify is None:
            return
        wanted = dict.fromkeys(map(os.path.realpath, above), False)
        wanted |= dict.fromkeys(map(os.path.realpath, folders), True)
        wanted = dict(sorted(wanted.items(), key=lambda item: not item[1])[:_MOST_WATCHES])
        for folder, (descriptor, number, inside) in list(self._watched.items()):
            if wanted.get(folder) != inside:
                self._watched.pop(folder, None)
                self._inotify.remove_callbacks([(descriptor, number)])
        self._add({folder: inside for folder, inside in wanted.items() if folder not in self._watched})

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
        for folder, (known, _, _) in list(self._watched.items()):
            if known == descriptor:
                self._watched.pop(folder, None)
        self._on_change()

    def on_queue_overflow(self) -> None:
        """So much happened that nobody knows what."""
        self._on_change()

    def _add(self, folders: Mapping[str, bool]) -> None:
        from watchdog.observers.inotify_c import InotifyConstants as Inotify

        stays = Inotify.IN_DELETE_SELF | Inotify.IN_MOVE_SELF | Inotify.IN_ONLYDIR
        inside = stays | Inotify.IN_MODIFY | Inotify.IN_ATTRIB | Inotify.IN_MOVE | Inotify.IN_CREATE | Inotify.IN_DELETE
        for folder, everything in folders.items():
            number = next(self._ids)
            mask = inside if everything else stays
            try:
                descriptor = self._inotify.add_callback(os.fsencode(folder), mask, self, number)
            except OSError as error:
                logger.debug("%s is not watched: %s", folder, error)
                continue
            # watchdog says nothing of a folder that may not be read.
            if descriptor != -1:
                self._watched[folder] = descriptor, number, everything


def _start() -> Any:
    """watchdog's one thread that reads from the kernel; None where there is nothing to read."""
    try:
        from watchdog.observers.inotify_c import InotifyFD

        inotify = InotifyFD()
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        logger.info("folders are not watched, but looked at now and then: %s", error)
        return None
    inotify.start()
    return inotify
