"""Which toolchains are still installed. Entries of those that are not are stale: kept for a while, and not served.

Everything here happens on a thread of its own, which may wait for a slow file system; who serves only reads ``stale``.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from xcache import protocol
from xcached.installations import ELSEWHERE, GONE, HERE, Installation, marks_of
from xcached.records import Records
from xcached.watching import Watcher
from xcached.writer import CallJob, WriterThread

logger = logging.getLogger("xcached")

# After something has happened, more will; and where nothing tells of it, somebody has to look.
_SETTLES, _LOOK_EVERY = 0.2, 10.0
_WORTH_NOTING_SECONDS = 3600.0
_MOST_OF_ONE_USER = 1000
_LONGEST_WRITE = 60.0


class _Announcement(NamedTuple):
    message: protocol.Announce
    uid: int
    done: Future[protocol.Message]


class Toolchains:
    """Keeps an eye on where toolchains are installed."""

    def __init__(self, records: Records, writer: WriterThread, grace: Callable[[], float]) -> None:
        """``grace``: for how many seconds what is stale is kept."""
        self.stale: frozenset[str] = frozenset()
        self._records = records
        self._writer = writer
        self._grace = grace
        self._installations: dict[tuple[str, int, str], Installation] = {}
        self._stale_since: dict[str, float] = {}
        self._jobs: queue.SimpleQueue[_Announcement | str | None] = queue.SimpleQueue()
        self._read()
        self._watcher = Watcher(lambda: self._jobs.put("look"))
        self._thread = threading.Thread(target=self._run, name="xcached-toolchains", daemon=True)
        self._thread.start()

    def announce(self, message: protocol.Announce, uid: int) -> Future[protocol.Message]:
        """A program says which toolchain it compiles with, and where that is."""
        done: Future[protocol.Message] = Future()
        self._jobs.put(_Announcement(message, uid, done))
        return done

    def close(self, seconds: float) -> None:
        """Stop looking."""
        self._watcher.close()
        self._jobs.put(None)
        self._thread.join(seconds)

    def _read(self) -> None:
        """What was known when the last daemon left."""
        for installation in self._records.installations():
            self._installations[_name(installation)] = installation
        self._stale_since = self._records.stale()
        self.stale = frozenset(self._stale_since)

    def _run(self) -> None:
        look_at = time.monotonic()
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, look_at - time.monotonic()))
            except queue.Empty:
                job = "due"
            if job is None:
                return
            try:
                if isinstance(job, _Announcement):
                    self._announced(job)
                elif job == "look":
                    look_at = min(look_at, time.monotonic() + _SETTLES)
                else:
                    look_at = time.monotonic() + _LOOK_EVERY
                    if self._look_at_all():
                        look_at = time.monotonic() + _SETTLES
            except Exception:
                # Nothing that is wrong with one of them may keep the others from being looked at.
                logger.exception("toolchains could not be looked at")

    def _announced(self, job: _Announcement) -> None:
        try:
            marks = marks_of(job.message)
            if marks is None:
                job.done.set_result(protocol.Refused("protocol error", "files that cannot be"))
            else:
                self._welcome(Installation(job.message.toolchain, job.uid, marks, GONE, time.time()), job.message)
        finally:
            if not job.done.done():
                job.done.set_result(protocol.Done())

    def _welcome(self, new: Installation, message: protocol.Announce) -> None:
        known = self._installations.get(_name(new))
        if known is None and not self._has_room(new.uid):
            return
        # A program that has run for long may speak of what is no longer there: only another look makes it live again.
        new.state = ELSEWHERE
        if known is not None and known.state != HERE and known.files == new.files:
            new.state, new.known_wrong = known.state, known.known_wrong
        if new.look():
            new.state = HERE
        same = known is not None and (known.state, known.files) == (new.state, new.files)
        # Seldom, so that a program that starts every second does not write every second.
        if known is not None and same and abs(new.seen_at - known.seen_at) < _WORTH_NOTING_SECONDS:
            return
        self._installations[_name(new)] = new
        self._submit(partial(self._records.save, new, message))
        self._find_stale()
        self._watch()

    def _has_room(self, uid: int) -> bool:
        return sum(known.uid == uid for known in self._installations.values()) < _MOST_OF_ONE_USER

    def _look_at_all(self) -> bool:
        """Look at what can be seen from here; whether there is more to do soon."""
        for installation in self._installations.values():
            if installation.state == ELSEWHERE:
                continue
            before = installation.state, installation.files
            installation.state = HERE if installation.look() else GONE
            if (installation.state, installation.files) != before:
                self._submit(partial(self._records.save, installation))
        self._find_stale()
        self._watch()
        return self._purge()

    def _find_stale(self) -> None:
        places: dict[str, list[Installation]] = {}
        for installation in self._installations.values():
            places.setdefault(installation.toolchain, []).append(installation)
        stale = {toolchain for toolchain, found in places.items() if all(one.state == GONE for one in found)}
        for toolchain in self._stale_since.keys() - stale:
            del self._stale_since[toolchain]
            logger.info("toolchain %s is installed again", toolchain[:12])
            self._submit(partial(self._records.revive, toolchain))
        for toolchain in stale - self._stale_since.keys():
            self._stale_since[toolchain] = time.time()
            reason = "; ".join(one.reason for one in places[toolchain])
            logger.info("toolchain %s is stale: %s", toolchain[:12], reason)
            self._submit(partial(self._records.make_stale, toolchain, reason))
        self.stale = frozenset(self._stale_since)

    def _watch(self) -> None:
        there = [one for one in self._installations.values() if one.state == HERE]
        folders = {folder for one in there for folder in one.folders}
        self._watcher.watch(folders, {folder for one in there for folder in one.above})

    def _purge(self) -> bool:
        """Remove some of what has been stale for long enough; whether more is left."""
        now = time.time()
        for toolchain, since in list(self._stale_since.items()):
            if now - since < self._grace():
                continue
            done = self._submit(partial(self._records.purge, toolchain)).result(_LONGEST_WRITE)
            if done != protocol.Removed(0, 0):
                return isinstance(done, protocol.Removed)
            del self._stale_since[toolchain]
            for name in [name for name in self._installations if name[0] == toolchain]:
                del self._installations[name]
        self.stale = frozenset(self._stale_since)
        return False

    def _submit(self, work: Callable[[], protocol.Removed | None]) -> Future[protocol.Message]:
        done: Future[protocol.Message] = Future()
        self._writer.submit(CallJob(lambda _: work() or protocol.Done(), done))
        return done


def _name(installation: Installation) -> tuple[str, int, str]:
    return installation.toolchain, installation.uid, installation.place
