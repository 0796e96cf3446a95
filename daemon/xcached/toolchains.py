"""Which toolchains are still installed. Entries of those that are not are stale: kept for a while, and not served.

Everything here happens on a thread of its own, which may wait for a slow file system; who serves only reads ``stale``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple

from xcache import protocol
from xcached.ageing import steady
from xcached.caller import Caller
from xcached.installations import ELSEWHERE, GONE, HERE, Installation, marks_of
from xcached.records import Records
from xcached.watching import Watcher, folders_of
from xcached.writer import WriterThread

logger = logging.getLogger("xcached")

# After something has happened, more will; and where nothing tells of it, somebody has to look.
_SETTLES, _LOOK_EVERY = 0.2, 10.0
# Of its time, where something happens all the time, and how long that is put up with.
_SHARE_OF_LOOKING, _LONGEST_REST = 0.1, 1.0
_WORTH_NOTING_SECONDS = 3600.0
_MOST_OF_ONE_USER = 1000
_LONGEST_WRITE = 60.0


class _Announcement(NamedTuple):
    message: protocol.Announce
    new: Installation
    # When the program was started, if that is known.
    started: float
    done: Future[None]


class Look(NamedTuple):
    """Someone looks at what was announced, and whether that decides what is known of it, or what is served."""

    done: Future[None]
    decides: bool


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
        self._told = False
        self._watcher = Watcher(self._look_soon)
        self._thread = threading.Thread(target=self._run, name="xcached-toolchains", daemon=True)
        self._thread.start()

    def announce(self, message: protocol.Announce, caller: Caller) -> Look | None:
        """A program says which toolchain it compiles with, and where that is; None where its files cannot be."""
        marks = marks_of(message.files)
        if marks is None:
            return None
        new = Installation(message.toolchain, caller.uid, marks, ELSEWHERE, time.time())
        done: Future[None] = Future()
        self._jobs.put(_Announcement(message, new, _started(caller.pid), done))
        return Look(done, decides=_name(new) not in self._installations or message.toolchain in self.stale)

    def close(self, seconds: float) -> None:
        """Stop looking."""
        self._watcher.close()
        self._jobs.put(None)
        self._thread.join(seconds)

    def _look_soon(self) -> None:
        """Something happened: noted once, however often it does until that is heard."""
        if not self._told:
            self._told = True
            # Only to wake whoever waits: it must not stand behind all that is announced.
            self._jobs.put("told")

    def _read(self) -> None:
        """What was known when the last daemon left."""
        # By the wall clock, as far as that can be.
        now = time.time()
        self._stale_since = {one: steady() - max(0.0, now - since) for one, since in self._records.stale().items()}
        self._writer.call(partial(self._records.correct, now))
        for installation in self._records.installations():
            installation.gone_at = self._stale_since.get(installation.toolchain, steady())
            self._installations[_name(installation)] = installation
        self.stale = frozenset(self._stale_since)

    def _run(self) -> None:
        look_at = rested_at = time.monotonic()
        while True:
            if self._told:
                self._told = False
                look_at = min(look_at, max(time.monotonic() + _SETTLES, rested_at))
            # Also where there is always somebody who announces something.
            job: _Announcement | str | None = "due"
            with contextlib.suppress(queue.Empty):
                if (left := look_at - time.monotonic()) > 0:
                    job = self._jobs.get(timeout=left)
            if job is None:
                return
            try:
                if isinstance(job, _Announcement):
                    self._announced(job)
                elif job == "due":
                    began = time.monotonic()
                    look_at = began + _LOOK_EVERY
                    rest = self._look_at_all()
                    ended = time.monotonic()
                    rested_at = ended + min((ended - began) / _SHARE_OF_LOOKING, _LONGEST_REST)
                    look_at = max(ended + rest, rested_at)
            except Exception:
                # Nothing that is wrong with one of them may keep the others from being looked at.
                logger.exception("toolchains could not be looked at")

    def _announced(self, job: _Announcement) -> None:
        try:
            self._welcome(job.new, job.message, job.started)
        finally:
            job.done.set_result(None)

    def _welcome(self, new: Installation, message: protocol.Announce, started: float) -> None:
        known = self._installations.get(_name(new))
        if known is None and not self._has_room(new.uid):
            return
        before = ELSEWHERE
        if known is not None and known.files == new.files:
            before, new.known_wrong = known.state, known.known_wrong
        # By how it looks alone: whoever announces must not have gigabytes read, again and again.
        found = new.look(reads=False)
        new.gone_at = steady()
        if found == HERE or before == HERE:
            new.state = HERE if found == ELSEWHERE else found
        elif known is not None and before == GONE and started <= known.gone_at:
            # A program that has run for long may speak of what is no longer there, and does not make it live again.
            # One that was started since then sees other file systems than this daemon, who may be in a container.
            new.state, new.gone_at = GONE, known.gone_at
        same = known is not None and (known.state, known.files) == (new.state, new.files)
        # Seldom, so that a program that starts every second does not write every second.
        if known is not None and same and abs(new.seen_at - known.seen_at) < _WORTH_NOTING_SECONDS:
            return
        self._installations[_name(new)] = new
        self._writer.call(partial(self._records.save, new, message))
        self._find_stale()
        # What is new is watched then; for each of hundreds at once that would be much.
        self._look_soon()

    def _has_room(self, uid: int) -> bool:
        """Whether one more of this user's can be remembered; a place that is gone makes room if it decides nothing."""
        theirs = [known for known in self._installations.values() if known.uid == uid]
        if len(theirs) < _MOST_OF_ONE_USER:
            return True
        idle = [known for known in theirs if known.state == GONE and known.toolchain not in self._stale_since]
        if not idle:
            logger.warning("user %d has announced %d toolchains; no more are remembered", uid, len(theirs))
            return False
        oldest = min(idle, key=lambda known: known.seen_at)
        del self._installations[_name(oldest)]
        self._writer.call(partial(self._records.forget, oldest))
        return True

    def _look_at_all(self) -> float:
        """Look at what can be seen from here; in how many seconds that is to be done again, whatever happens."""
        for installation in self._installations.values():
            if installation.state == ELSEWHERE:
                continue
            before = installation.state, installation.files
            found = installation.look()
            if found != ELSEWHERE:
                installation.state = found
            if (installation.state, installation.files) != before:
                installation.gone_at = steady()
                self._writer.call(partial(self._records.save, installation))
        self._find_stale()
        # What happened before something was watched was not heard of.
        missed = self._watch()
        return _SETTLES if self._purge() or missed else min([_LOOK_EVERY, *self._left_of_grace()])

    def _find_stale(self) -> None:
        places: dict[str, list[Installation]] = {}
        for installation in self._installations.values():
            places.setdefault(installation.toolchain, []).append(installation)
        stale = {toolchain for toolchain, found in places.items() if all(one.state == GONE for one in found)}
        for toolchain in self._stale_since.keys() - stale:
            del self._stale_since[toolchain]
            logger.info("toolchain %s is installed again", toolchain[:12])
            self._writer.call(partial(self._records.revive, toolchain))
        for toolchain in stale - self._stale_since.keys():
            self._stale_since[toolchain] = steady()
            # What changed now, and not what has long been gone.
            reason = max(places[toolchain], key=lambda one: one.gone_at).reason
            reason += f", the last of {count} places" if (count := len(places[toolchain])) > 1 else ""
            logger.info("toolchain %s is stale: %s", toolchain[:12], reason)
            self._writer.call(partial(self._records.make_stale, toolchain, reason))
        self.stale = frozenset(self._stale_since)

    def _watch(self) -> bool:
        """Watch where something is; whether something of that was not watched before."""
        there = [one for one in self._installations.values() if one.state == HERE]
        return self._watcher.watch(folders_of(path for one in there for path in one.paths))

    def _left_of_grace(self) -> Iterator[float]:
        """How long what is stale is still to be kept; not what was to be removed, which pins may keep."""
        left = (since + self._grace() - steady() for since in self._stale_since.values())
        return (max(seconds, _SETTLES) for seconds in left if seconds > 0)

    def _purge(self) -> bool:
        """Remove some of what has been stale for long enough; whether more is left."""
        for toolchain, since in list(self._stale_since.items()):
            if steady() < since + self._grace():
                continue
            done = self._writer.call(partial(self._records.purge, toolchain)).result(_LONGEST_WRITE)
            if isinstance(done, protocol.Removed) and done.entries:
                return True
            if done != protocol.Removed(0, 0):
                continue
            del self._stale_since[toolchain]
            for name in [name for name in self._installations if name[0] == toolchain]:
                del self._installations[name]
        self.stale = frozenset(self._stale_since)
        return False


def _name(installation: Installation) -> tuple[str, int, str]:
    return installation.toolchain, installation.uid, installation.place


def _started(pid: int) -> float:
    """When a process was started, by the steady clock; long ago where that cannot be seen."""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return int(ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
