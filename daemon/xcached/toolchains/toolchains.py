"""Tracks which toolchains are still installed. Entries of the others are stale: kept for a grace period, not served.

It works on a thread of its own, and checks each user's files on one more, which a slow file system may block. The
serving thread calls ``is_stale``, which reads values that are replaced as a whole, and ``announce``, which asks the
installations only whether one is known.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from xcache.wire import commands, protocol
from xcache.wire.bounded import text_of
from xcached.caller import Caller
from xcached.clock import steady
from xcached.fair_queue import SharedFairQueue
from xcached.host.watching import MOST_WATCHES, Depth, Watcher, folders_of
from xcached.store.writer import WriterThread
from xcached.toolchains.file_checks import FileChecks
from xcached.toolchains.installations import ELSEWHERE, GONE, HERE, Installation, marks_of
from xcached.toolchains.rows import ToolchainRows, proven_words

logger = logging.getLogger("xcached")

# Pause after an event, because more will follow; and the time between checks without events.
_SETTLE_SECONDS, _CHECK_SECONDS = 0.2, 10.0
# Under constant events, checks take at most this share of the time, with at most this pause between them.
_CHECK_SHARE, _LONGEST_PAUSE_SECONDS = 0.1, 1.0
# An unchanged announcement is saved again only after this time.
_SAVE_AGAIN_SECONDS = 3600.0
# Limits for one user: places remembered, their bytes, and announcements not yet checked.
_MOST_PLACES_PER_USER, _MOST_BYTES_PER_USER, _MOST_ANNOUNCED = 1000, 4 * 1024**2, 50
# Wait this long for a check of files; a slower one reports when it is done.
_FILE_CHECK_SECONDS = 0.5
_WRITE_SECONDS = 60.0


# An installation is identified by its toolchain, user and place.
InstallationKey = tuple[str, int, str]
ToolchainAndUser = tuple[str, int]


class _Announcement(NamedTuple):
    message: protocol.Announce
    new: Installation
    # When the program started, by the steady clock.
    started: float
    done: Future[None]


class _Result(NamedTuple):
    """A check's result: copies of a user's installations with their states, and the folders to watch."""

    found: list[tuple[Installation, str]]
    folders: Mapping[str, Depth]


class Check(NamedTuple):
    """A check in progress, and whether it decides if the toolchain is known or served."""

    done: Future[None]
    decides: bool


def _everybody_believes(reader: int, writer: int) -> bool:  # noqa: ARG001
    return True


class Toolchains:
    """Watches where toolchains are installed."""

    def __init__(
        self,
        rows: ToolchainRows,
        writer: WriterThread,
        grace: Callable[[], float],
        reads: Callable[[int, int], bool] = _everybody_believes,
        accounts: Iterable[int] = (),
    ) -> None:
        """``grace``: seconds to keep stale entries. ``reads(reader, writer)``: whether the reader trusts the writer.

        Entries written by ``accounts`` are stale if the toolchain is gone from all places, whoever announced them.
        """
        self.stale: frozenset[str] = frozenset()
        """Toolchains that at least one user no longer has; ``is_stale`` tells whether that concerns a user."""
        self._rows = rows
        self._writer = writer
        self._grace = grace
        self._reads = reads
        self._accounts = frozenset(accounts)
        self._installations: dict[InstallationKey, Installation] = {}
        # For each toolchain in ``stale``: whether it is gone from all places of each user.
        self._gone: dict[str, dict[int, bool]] = {}
        self._stale_since: dict[ToolchainAndUser, float] = {}
        self._stale_everywhere: set[str] = set()
        self._jobs: SharedFairQueue[_Announcement] = SharedFairQueue()
        # Each user's announcements in the queue: the serving thread counts up, the toolchain thread down.
        self._pending: Counter[int] = Counter()
        self._pending_lock = threading.Lock()
        self._file_checks: FileChecks[_Result | str | bool] = FileChecks(self._receive_late)
        self._late_results: deque[_Result] = deque()
        self._folders: dict[int, Mapping[str, Depth]] = {}
        self._load()
        self._has_events = False
        self._watcher = Watcher(self._check_soon)
        self._thread = threading.Thread(target=self._run, name="xcached-toolchains", daemon=True)
        self._thread.start()

    def announce(self, message: protocol.Announce, caller: Caller) -> Check | None:
        """Queue a client's announcement of its toolchain; return None if its files are implausible."""
        marks = marks_of(message.files)
        if marks is None:
            return None
        new = Installation(message.toolchain, caller.uid, marks, ELSEWHERE, time.time())
        done: Future[None] = Future()
        with self._pending_lock:
            busy = self._pending[caller.uid] >= _MOST_ANNOUNCED
            if not busy:
                self._pending[caller.uid] += 1
        if busy:
            # The user's next program announces it again.
            done.set_result(None)
            return Check(done, decides=False)
        self._jobs.add(caller.uid, _Announcement(message, new, _started(caller.pid), done))
        decides = _key(new) not in self._installations or self.is_stale(message.toolchain, caller.uid)
        return Check(done, decides)

    def is_stale(self, toolchain: str, reader: int) -> bool:
        """Return whether a toolchain is gone from every place of the reader and of the users the reader trusts."""
        if toolchain not in self.stale:
            return False
        places = [gone for uid, gone in self._gone.get(toolchain, {}).items() if self._reads(reader, uid)]
        return bool(places) and all(places)

    def useless(self) -> frozenset[ToolchainAndUser]:
        """Return the stale toolchains, each with a writer whose entries of it are stale."""
        return frozenset(self._stale_since)

    def close(self, seconds: float) -> None:
        """Stop watching and checking."""
        self._watcher.close()
        self._jobs.close()
        self._thread.join(seconds)

    def _check_soon(self) -> None:
        """Have the thread check soon; further events until then change nothing."""
        if not self._has_events:
            self._has_events = True
            self._jobs.wake()

    def _receive_late(self, result: _Result | str | bool) -> None:
        if isinstance(result, _Result):
            self._late_results.append(result)
            self._check_soon()

    def _load(self) -> None:
        """Load the installations that the last daemon knew."""
        # Rows hold the wall clock's time, because no other clock lasts across restarts of the machine.
        now = time.time()
        since = {one: steady() - max(0.0, now - then) for one, then in self._rows.stale().items()}
        self._writer.call(partial(self._rows.correct, now))
        for installation in self._rows.installations():
            installation.gone_at = since.get(installation.toolchain, steady())
            self._installations[_key(installation)] = installation
        self._stale_everywhere = set(since)
        for toolchain, then in since.items():
            for uid in self._concerned(one.uid for one in self._installations.values() if one.toolchain == toolchain):
                self._stale_since[toolchain, uid] = then
        self._publish(self._places())

    def _concerned(self, announcers: Iterable[int]) -> set[int]:
        return {*announcers, *self._accounts}

    def _run(self) -> None:
        next_check = earliest_check = time.monotonic()
        while not self._jobs.closed:
            if self._has_events:
                self._has_events = False
                next_check = min(next_check, max(time.monotonic() + _SETTLE_SECONDS, earliest_check))
            left = next_check - time.monotonic()
            try:
                # Check first: announcements may never cease.
                if left <= 0:
                    began = time.monotonic()
                    next_check = began + _CHECK_SECONDS
                    rest = self._check_all()
                    ended = time.monotonic()
                    earliest_check = ended + min((ended - began) / _CHECK_SHARE, _LONGEST_PAUSE_SECONDS)
                    next_check = max(ended + rest, earliest_check)
                elif (turn := self._jobs.take()) is not None:
                    began = time.monotonic()
                    self._handle_announcement(turn.item)
                    self._jobs.charge(turn.user, time.monotonic() - began)
                elif not self._has_events:
                    self._jobs.wait(left)
            except Exception:
                # A failure with one user's files must not stop the checks of others.
                logger.exception("toolchains could not be checked")

    def _handle_announcement(self, job: _Announcement) -> None:
        try:
            self._remember(job.new, job.message, job.started)
        finally:
            with self._pending_lock:
                self._pending[job.new.uid] -= 1
                if not self._pending[job.new.uid]:
                    del self._pending[job.new.uid]
            job.done.set_result(None)

    def _remember(self, new: Installation, message: protocol.Announce, started: float) -> None:
        known = self._installations.get(_key(new))
        known_bytes = known.text_bytes if known is not None else 0
        # All places of a toolchain share its texts, whoever proved them.
        sharers = [new, *(one for one in self._installations.values() if one.toolchain == new.toolchain)]
        new.text_bytes = sum(len(word.encode()) for word in proven_words(message))
        new.text_bytes = max(one.text_bytes for one in sharers)
        if known is None and not self._has_room(new):
            return
        before = ELSEWHERE
        if known is not None and known.files == new.files:
            before, new.known_wrong = known.state, known.known_wrong
        # Compare stat values only: repeated announcements must not make the daemon read gigabytes.
        seen = new.copy()
        found = self._file_checks.ask(new.uid, partial(seen.look, reads=False), _FILE_CHECK_SECONDS)
        if isinstance(found, str):
            new.files, new.reason = seen.files, seen.reason
        else:
            # The user's files cannot be checked at the moment.
            found = ELSEWHERE
        new.gone_at = steady()
        if found == HERE or before == HERE:
            new.state = HERE if found == ELSEWHERE else found
        elif known is not None and before == GONE and started <= known.gone_at:
            # A long-running program may announce files that are already gone; that does not revive the toolchain.
            # A program started since then has a different view of the file systems, such as from a container.
            new.state, new.gone_at = GONE, known.gone_at
        for one in sharers:
            one.text_bytes = new.text_bytes
        # A proof of what the toolchain is comes late if the first announcement had none.
        same = known is not None and (known.state, known.files) == (new.state, new.files)
        same &= known_bytes == new.text_bytes
        # Save seldom, so that a program started every second does not cause a write every second.
        if known is not None and same and abs(new.seen_at - known.seen_at) < _SAVE_AGAIN_SECONDS:
            return
        self._installations[_key(new)] = new
        saved = self._writer.call(partial(self._rows.save, new, message))
        self._update_stale()
        # The check soon watches new places; watching after each of hundreds of announcements would cost too much.
        self._check_soon()
        # Wait for the write, so that announcements cannot outrun it.
        saved.result(_WRITE_SECONDS)

    def _has_room(self, new: Installation) -> bool:
        """Return whether one more place of this user can be remembered, after forgetting idle ones that are gone."""
        theirs = [known for known in self._installations.values() if known.uid == new.uid]
        idle = [
            known for known in theirs if known.state == GONE and (known.toolchain, known.uid) not in self._stale_since
        ]
        idle.sort(key=lambda known: known.seen_at, reverse=True)
        count, weight = len(theirs), sum(known.weight for known in theirs) + new.weight
        while count >= _MOST_PLACES_PER_USER or weight > _MOST_BYTES_PER_USER:
            if not idle:
                logger.warning("user %d has announced %d toolchains; no more are remembered", new.uid, len(theirs))
                return False
            oldest = idle.pop()
            count, weight = count - 1, weight - oldest.weight
            del self._installations[_key(oldest)]
            self._writer.call(partial(self._rows.forget, oldest))
        return True

    def _check_all(self) -> float:
        """Check all visible installations; return the seconds until the next check is due."""
        now, rests = time.monotonic(), [_CHECK_SECONDS]
        while self._late_results:
            self._take_over(self._late_results.popleft())
        users = {installation.uid for installation in self._installations.values()}
        self._folders = {uid: folders for uid, folders in self._folders.items() if uid in users}
        for uid in users:
            if (until := self._file_checks.rests_until(uid)) > now:
                # This user's last check took long, and was not long ago.
                rests.append(until - now)
                continue
            theirs = [one.copy() for one in self._installations.values() if one.uid == uid and one.state != ELSEWHERE]
            check = partial(_check_files, theirs)
            result = self._file_checks.ask(uid, check, _FILE_CHECK_SECONDS) if theirs else _Result([], {})
            if isinstance(result, _Result):
                self._take_over(result, uid)
        self._update_stale()
        # Events before a folder was watched went unheard, so newly watched folders mean another check.
        missed = self._watch()
        return _SETTLE_SECONDS if self._purge() or missed else min([*rests, *self._grace_left()])

    def _take_over(self, result: _Result, uid: int | None = None) -> None:
        """Adopt a check's results, unless something else was announced meanwhile."""
        for seen, state in result.found:
            uid = seen.uid
            known = self._installations.get(_key(seen))
            if known is None or [mark.digest for mark in known.files] != [mark.digest for mark in seen.files]:
                continue
            before = known.state, known.files
            known.files, known.known_wrong, known.reason = seen.files, seen.known_wrong, seen.reason
            if state != ELSEWHERE:
                known.state = state
            if (known.state, known.files) != before:
                known.gone_at = steady()
                self._writer.call(partial(self._rows.save, known))
        if uid is not None:
            self._folders[uid] = result.folders

    def _places(self) -> dict[str, dict[int, list[Installation]]]:
        places: dict[str, dict[int, list[Installation]]] = {}
        for installation in self._installations.values():
            places.setdefault(installation.toolchain, {}).setdefault(installation.uid, []).append(installation)
        return places

    def _publish(self, places: Mapping[str, Mapping[int, list[Installation]]]) -> None:
        gone = {
            toolchain: {uid: all(one.state == GONE for one in found) for uid, found in users.items()}
            for toolchain, users in places.items()
        }
        # The serving thread reads _gone after it found the toolchain in ``stale``, so _gone comes first.
        self._gone = {toolchain: users for toolchain, users in gone.items() if any(users.values())}
        self.stale = frozenset(self._gone)

    def _update_stale(self) -> None:
        places = self._places()
        self._publish(places)
        stale = {
            (toolchain, uid)
            for toolchain in self.stale
            for uid in self._concerned(places[toolchain])
            if self.is_stale(toolchain, uid)
        }
        for toolchain, uid in self._stale_since.keys() - stale:
            del self._stale_since[toolchain, uid]
            logger.info("toolchain %s of user %d is installed again", toolchain[:12], uid)
        for toolchain, uid in sorted(stale - self._stale_since.keys()):
            self._stale_since[toolchain, uid] = steady()
            # The reason is the latest change among the places that concern the user.
            found = [one for other, theirs in places[toolchain].items() if self._reads(uid, other) for one in theirs]
            reason = max(found, key=lambda one: one.gone_at).reason
            reason += f", the last of {count} places" if (count := len(found)) > 1 else ""
            logger.info("toolchain %s of user %d is stale: %s", toolchain[:12], uid, reason)
            self._writer.call(partial(self._rows.make_stale, toolchain, reason, uid))
        everywhere = {toolchain for toolchain in self.stale if all(self._gone[toolchain].values())}
        for toolchain in everywhere - self._stale_everywhere:
            self._writer.call(partial(self._rows.gone_everywhere, toolchain))
        for toolchain in self._stale_everywhere - everywhere:
            self._writer.call(partial(self._rows.revive, toolchain))
        self._stale_everywhere = everywhere

    def _watch(self) -> bool:
        """Watch the installations' folders, the same number for each user; return whether any is newly watched."""
        share = MOST_WATCHES // max(1, len(self._folders))
        folders: dict[str, Depth] = {}
        for theirs in self._folders.values():
            for folder, depth in sorted(theirs.items(), key=lambda item: -item[1])[:share]:
                folders[folder] = max(depth, folders.get(folder, depth))
        # This may block on one user's file system; the others' files are still checked regularly.
        return self._file_checks.ask(None, partial(self._watcher.watch, folders), _FILE_CHECK_SECONDS) is True

    def _grace_left(self) -> Iterator[float]:
        """Grace seconds left for each stale toolchain; overdue ones, which pins may keep, are skipped."""
        left = (since + self._grace() - steady() for since in list(self._stale_since.values()))
        return (max(seconds, _SETTLE_SECONDS) for seconds in left if seconds > 0)

    def _purge(self) -> bool:
        """Remove some entries whose grace period is over; return whether more are left."""
        for (toolchain, uid), since in list(self._stale_since.items()):
            if steady() < since + self._grace():
                continue
            done = self._writer.call(partial(self._rows.purge, toolchain, uid)).result(_WRITE_SECONDS)
            if isinstance(done, commands.Removed) and done.entries:
                return True
            if done != commands.Removed(0, 0):
                continue
            del self._stale_since[toolchain, uid]
            for name in [name for name in self._installations if name[:2] == (toolchain, uid)]:
                del self._installations[name]
        self._publish(self._places())
        self._stale_everywhere &= self.stale
        return False


def _check_files(installations: list[Installation]) -> _Result:
    """Check one user's installations, on a thread that may block; return their states and the folders to watch."""
    found = [(one, one.look()) for one in installations]
    return _Result(found, folders_of(path for one, state in found if state == HERE for path in one.paths))


def _key(installation: Installation) -> InstallationKey:
    return installation.toolchain, installation.uid, installation.place


def _started(pid: int) -> float:
    """Return when a process started, by the steady clock; 0 if that cannot be seen."""
    try:
        ticks = text_of(f"/proc/{pid}/stat", errors="replace").rpartition(")")[2].split()[19]
        return int(ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
