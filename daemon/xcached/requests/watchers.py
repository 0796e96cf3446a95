"""Tells watchers (``xcache monitor``) what connected programs do. Without any, it keeps nothing and no timer runs."""

from __future__ import annotations

import itertools
import logging
import math
import os
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from xcache._version import __version__
from xcache.wire import commands, ledger, protocol
from xcache.wire.protocol import MAX_SEEN_DOING, MAX_SEEN_MISSES, MAX_SEEN_PROGRAMS, MAX_SEEN_TEXT
from xcached.caller import Answer, Caller, Handlers, Load, Process, Reply, Stream
from xcached.host.reload import LiveSettings
from xcached.requests.leases import Leases
from xcached.requests.trust import Trust
from xcached.store.store import Store

logger = logging.getLogger("xcached")

_INTERVAL_SECONDS = 0.5
# Each Seen costs the daemon about a tenth of a millisecond, so a user has only so many watchers.
_MOST_WATCHERS = 8
_MISSED = frozenset({ledger.MISS, ledger.UNCACHEABLE})
# Reports say anything; a count beyond this is no program's.
_MOST_COUNTED = 10**9

Row = dict[str, protocol.Scalar]


class _Watcher:
    """One watcher, and what it has not been told yet."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.begin()

    def begin(self) -> None:
        """Begin to count anew, after a Seen."""
        self.since = time.monotonic()
        self.hits = self.misses = self.left_out = 0
        self.missed: deque[Row] = deque(maxlen=MAX_SEEN_MISSES)


class _Sight(NamedTuple):
    """A view of the daemon that all watchers of one user share."""

    facts: Row
    programs: list[Row]
    doing: list[Row]


class Watchers:
    """The connections that watch. Belongs to the serving thread."""

    def __init__(
        self,
        store: Store,
        settings: LiveSettings,
        leases: Leases,
        trust: Trust,
        callers: Callable[[], Iterable[Caller]],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """``callers`` returns the clients that are connected."""
        self._store = store
        self._settings = settings
        self._leases = leases
        self._trust = trust
        self._callers = callers
        self._call_later = call_later
        self._started = time.monotonic()
        self._watchers: dict[Caller, _Watcher] = {}
        self._ticking = self._is_over = False
        self.handlers: Handlers = {commands.Watch: self._watch}

    def leave(self, caller: Caller) -> None:
        """Forget a watcher whose connection has ended."""
        self._watchers.pop(caller, None)

    def close(self) -> None:
        """Tell nobody anything more, because the daemon is leaving."""
        self._is_over = True
        self._watchers.clear()

    def note_counts(self, caller: Caller, counts: dict[str, int | float]) -> None:
        """Count the hits and misses that a program reports."""
        hits, misses = _whole(counts.get("hits", 0)), _whole(counts.get("misses", 0))
        caller.process.hits += hits
        caller.process.misses += misses
        for watcher in self._watching(caller.uid):
            watcher.hits += hits
            watcher.misses += misses

    def note_rows(self, caller: Caller, run: str, rows: Sequence[ledger.Row]) -> None:
        """Note the misses among the rows of a run's ledger."""
        for watcher in self._watching(caller.uid):
            for row in rows:
                if row.outcome in _MISSED:
                    watcher.left_out += len(watcher.missed) == MAX_SEEN_MISSES
                    watcher.missed.append(_of_process(caller) | {"run": run} | _shortened(row))

    def _watching(self, uid: int) -> Iterator[_Watcher]:
        """Yield the watchers who may see a user's programs."""
        for caller, watcher in self._watchers.items():
            if self._trust.may_change(caller.uid, uid):
                yield watcher

    def _watch(self, caller: Caller, message: commands.Watch) -> Answer:
        # A second Watch on a connection takes the place of the first.
        own = sum(other.uid == caller.uid for other in self._watchers if other is not caller)
        if own >= _MOST_WATCHERS or self._is_over:
            return Reply(protocol.Refused("too many watchers", f"{own} commands of this user watch already"))
        watcher = self._watchers[caller] = _Watcher()
        watcher.stream = Stream(_seen(self._sights([caller.uid])[caller.uid], watcher))
        if not self._ticking:
            self._ticking = True
            self._call_later(_INTERVAL_SECONDS, self._tick)
        return watcher.stream

    def _tick(self) -> None:
        try:
            self._tell()
        except Exception:
            # A defect in here must not end the service of programs.
            logger.exception("what the daemon sees could not be told; nobody watches any more")
            self._watchers.clear()
        self._ticking = bool(self._watchers)
        if self._ticking:
            self._call_later(_INTERVAL_SECONDS, self._tick)

    def _tell(self) -> None:
        sights = self._sights({caller.uid for caller in self._watchers})
        # Sending may reveal that a watcher has gone.
        for caller, watcher in list(self._watchers.items()):
            if watcher.stream is not None and watcher.stream.say(_seen(sights[caller.uid], watcher)):
                watcher.begin()

    def _sights(self, uids: Iterable[int]) -> dict[int, _Sight]:
        """Return what each of these users may see."""
        processes: dict[Process, list[Caller]] = {}
        for caller in self._callers():
            if caller not in self._watchers:
                processes.setdefault(caller.process, []).append(caller)
        about = {
            "pid": os.getpid(),
            "version": __version__,
            "uptime_seconds": round(time.monotonic() - self._started, 3),
            "max_size": self._settings.now.max_size,
            "max_entries": self._settings.now.max_entries,
            **self._totals(),
        }
        return {uid: self._sight(uid, processes, about) for uid in uids}

    def _totals(self) -> Row:
        try:
            totals = self._store.reader.totals()
        except sqlite3.Error:
            # A request of a program finds out what is wrong with the database.
            totals = {}
        return {name: totals.get(name) for name in ("entries", "bytes")}

    def _sight(self, uid: int, processes: dict[Process, list[Caller]], about: Row) -> _Sight:
        visible = partial(self._trust.may_change, uid)
        mine = {process: callers for process, callers in processes.items() if visible(process.uid)}
        doing = list(itertools.islice(self._doing(visible, mine), MAX_SEEN_DOING))
        busy = {activity["pid"] for activity in doing}
        now = time.monotonic()
        first = sorted(mine, key=lambda process: (process.pid not in busy, process.since))[:MAX_SEEN_PROGRAMS]
        programs: list[Row] = [
            {
                **_of_process(mine[process][0]),
                "seconds": round(now - process.since, 3),
                "connections": len(mine[process]),
                "hits": process.hits,
                "misses": process.misses,
            }
            for process in first
        ]
        return _Sight(about | self._counted(visible, mine, processes), programs, doing)

    def _counted(self, visible: Callable[[int], bool], mine: Iterable[Process], processes: Iterable[Process]) -> Row:
        """Return the numbers of programs, compiles and waits; those of other users have names of their own."""
        counted: Counter[str] = Counter()
        for uid, (compiling, waiting) in self._leases.counts().items():
            side = "" if visible(uid) else "other_"
            counted[f"{side}compiling"] += compiling
            counted[f"{side}waiting"] += waiting
        counted["connected"] = len([*mine])
        counted["other_connected"] = len([*processes]) - counted["connected"]
        names = ("connected", "compiling", "waiting")
        return {name: counted[name] for name in (*names, *(f"other_{name}" for name in names))}

    def _doing(self, visible: Callable[[int], bool], mine: dict[Process, list[Caller]]) -> Iterator[Row]:
        """Yield what the visible users' programs do: what they compile first, the longest first."""
        now = time.monotonic()
        for lease in self._leases.held(visible):
            told = _activity(lease.holder, "compiling", lease.key, lease.module_name, now - lease.since)
            yield told | {"waiting": len(lease.waiters)}
        for waiter in self._leases.waits(visible):
            wanted, of = waiter.wanted, waiter.lease
            told = _activity(waiter.caller, "waiting", wanted.key, wanted.module_name, now - waiter.since)
            yield told | {"of_pid": of.holder.pid if of is not None else None}
        for caller in itertools.chain.from_iterable(mine.values()):
            if (load := caller.loading) is not None:
                told = _activity(caller, "loading", load.key, self._name_of(load), now - load.since)
                yield told | {"ahead": load.ahead}

    def _name_of(self, load: Load) -> str:
        """Return the name of the program that is loaded, which the client has not said."""
        try:
            return self._store.reader.module_name(load.key, load.digest)
        except sqlite3.Error:
            return ""


def _seen(sight: _Sight, watcher: _Watcher) -> commands.Seen:
    since_last: Row = {
        "seconds": round(time.monotonic() - watcher.since, 3),
        "hits": watcher.hits,
        "misses": watcher.misses,
        "left_out": watcher.left_out,
    }
    return commands.Seen(sight.facts | since_last, sight.programs, sight.doing, list(watcher.missed))


def _of_process(caller: Caller) -> Row:
    return {"pid": caller.pid, "uid": caller.uid, "program": caller.program[:MAX_SEEN_TEXT]}


def _activity(caller: Caller, kind: str, key: str, name: str, seconds: float) -> Row:
    told: Row = {"kind": kind, "key": key, "module_name": name[:MAX_SEEN_TEXT], "seconds": round(seconds, 3)}
    return _of_process(caller) | told


def _shortened(row: ledger.Row) -> Row:
    """Return a row with short texts: of a place in code its end, which tells most; and the spans whole, or none."""
    texts = {name: text[:MAX_SEEN_TEXT] for name, text in row._asdict().items() if isinstance(text, str)}
    return row._asdict() | texts | {"site": row.site[-MAX_SEEN_TEXT:], "spans": row.spans}


def _whole(count: float) -> int:
    return int(count) if math.isfinite(count) and abs(count) <= _MOST_COUNTED else 0
