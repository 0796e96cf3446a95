"""Load executables on threads of their own, before the program asks for them, while it is still tracing.

The daemon remembers what a program of this name wanted last time. This run may differ at any point: the program loads
by itself what XLA has not begun to load, and after two unpredicted requests in a row nothing more is loaded ahead.

The threads end as soon as there is nothing to load for the moment, because a program may wait for all its threads.
"""

from __future__ import annotations

import _thread
import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from xcache.client.contents import SealedEntry
from xcache.clock import monotonic
from xcache.errors import is_no_room
from xcache.prefetch import processors
from xcache.request import LoadTarget
from xcache.threads import usual_stack

_T = TypeVar("_T")

# Until the first predicted request, the threads load for at most this long in all.
_ON_TRUST_SECONDS = 1.0
# An executable that the program has not asked for after this long is dropped.
_KEEP_SECONDS = 60.0
# After so many unpredicted requests in a row, the prediction is taken to be of another program.
_MAX_SURPRISES = 2
_MAX_THREADS = 3
# A costly executable among the next _LOOKAHEAD_ITEMS is loaded before a cheap one (seconds to load).
_CHEAP_SECONDS, _COSTLY_SECONDS, _LOOKAHEAD_ITEMS = 0.01, 0.1, 8
# While executables are held, a thread checks this often whether their clients still exist.
_CHECK_SECONDS = 1.0


class Item(NamedTuple):
    """An executable that will probably be wanted, and how it was loaded last time."""

    key: str
    options: bytes
    devices: tuple[int, ...]
    platform: str
    seconds: float
    made_with: tuple[str, str, str]
    """Digests of the flags, platform and toolchain it was made with; a process with others must not load it."""
    entry: SealedEntry | None = None
    """The entry itself, if it came with the prediction."""


class LoadedAhead(NamedTuple):
    """An executable that was loaded ahead, its entry, when and how long it was loaded, and its size in bytes."""

    executable: Any
    entry: SealedEntry
    load_began: float
    load_seconds: float
    size: int


class Begin(Protocol):
    """The callback that ``Work.load`` makes directly before XLA begins to load."""

    def __call__(self, target: LoadTarget, patience: float) -> bool:
        """Return whether the executable is still wanted; the program waits ``patience`` seconds for it at most."""


class Work(Protocol):
    """The work of the threads. Only ``load`` raises, and only MemoryError."""

    def predict(self) -> Sequence[Item]:
        """Return what the program will probably want, in order."""

    def load(self, item: Item, begin: Begin, is_over: Callable[[], bool]) -> LoadedAhead | None:
        """Load an executable; raise MemoryError if there is no room for it."""

    def is_current(self, client: Any) -> bool:
        """Return whether the program can still use what is loaded onto this client."""

    def end_loading(self) -> None:
        """Tell the daemon that this thread is loading nothing; each thread calls it before it ends."""


class _Slot:
    """The state of one item: waiting, begun, being loaded by XLA (``target`` is set), or done."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.begun = False
        self.target: LoadTarget | None = None
        self.patience = 0.0
        self.done = False
        self.loaded: LoadedAhead | None = None
        self.is_taken = False
        self.since = monotonic()


class Prefetcher:
    """Loads executables ahead of one program. Thread-safe."""

    def __init__(
        self,
        work: Work,
        memory: int,
        dropped: Callable[[int], None],
        unused: Callable[[str, LoadedAhead], None],
    ) -> None:
        """Hold at most ``memory`` bytes (0: load nothing ahead); report executables nobody asked for to ``dropped``.

        ``unused`` gets the key of each load that the program did not use, for whatever reason.
        """
        self._work = work
        self._memory = memory
        self._dropped = dropped
        self._unused = unused
        # Take this lock, never the condition: Ctrl-C in Condition.__enter__, which is Python, would leave it held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._slots: dict[str, _Slot] = {}
        # Loads in progress in XLA, wanted or not.
        self._loading = 0
        self._asked: set[str] = set()
        # All threads that have not ended, and those of them that still look for something to load.
        self._threads: set[threading.Thread] = set()
        self._busy: set[threading.Thread] = set()
        self._has_keeper = False
        self._max_threads = min(_MAX_THREADS, processors.threads_to_spare())
        # Threads of the program that wait for a load.
        self._waiting_threads = 0
        self._has_prediction = False
        self._surprises = 0
        self._held = 0
        self._trusted_seconds = _ON_TRUST_SECONDS
        self._over = memory == 0 or self._max_threads == 0
        self._processors = processors.Processors()

    def start(self) -> None:
        """Ask for a prediction and begin to load, on a thread."""
        with self._lock:
            if not self._over and not self._threads and not self._has_prediction:
                self._processors.open()
                self._begin_threads(1)

    def take(self, key: str, target: LoadTarget) -> LoadedAhead | SealedEntry | None:
        """Return what was loaded for exactly this client, else the entry that came with the prediction, else None.

        The program waits only for a load that XLA has begun, and no longer than compiling would take.
        """
        with self._lock:
            is_first, slot = key not in self._asked, self._slots.get(key)
            self._asked.add(key)
            if slot is None:
                if is_first and self._has_prediction:
                    self._was_surprised()
                return None
            self._surprises = 0
            self._trusted_seconds = float("inf")
            if slot.target is not None and slot.target.is_same(target):
                self._wait_for(slot)
                loaded = slot.loaded
                slot.is_taken = True
            else:
                loaded = None
            self._forget(slot)
            self._start_threads()
            return loaded or slot.item.entry

    def is_over(self) -> bool:
        """Return whether loading ahead has ended."""
        return self._over

    def look(self) -> None:
        """Drop what was loaded onto clients that no longer exist."""
        with self._lock:
            for slot in [slot for slot in self._slots.values() if slot.target is not None]:
                if slot.target is not None and not self._work.is_current(slot.target.client):
                    self._forget(slot)

    def with_room(self, work: Callable[[], _T], seconds: float) -> _T:
        """Compile or load. If memory runs out, drop what was loaded ahead, within these seconds, and try once more."""
        try:
            return work()
        except Exception as error:
            if not (is_no_room(error) and self.give_up(seconds)):
                raise
        return work()

    def give_up(self, seconds: float) -> bool:
        """Drop everything and load nothing more; return whether that freed memory.

        Wait for loads in progress in XLA, but no longer than ``seconds``.
        """
        with self._lock:
            had_any = self._loading > 0 or any(slot.loaded is not None for slot in self._slots.values())
            self._end()
            return had_any and self._changed.wait_for(lambda: not self._loading, seconds)

    def stop(self, seconds: float) -> None:
        """Begin nothing more, and wait ``seconds`` at most for loads in progress in XLA, which cannot be stopped."""
        with self._lock:
            self._end()
            self._changed.wait_for(lambda: not self._loading, seconds)

    def finish(self, seconds: float) -> bool:
        """Stop and wait for the threads, which may be waiting for the daemon; return whether all have ended."""
        deadline = monotonic() + seconds
        with self._lock:
            self._end()
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - monotonic()))
        with self._lock:
            self._changed.wait_for(lambda: not self._has_keeper, max(0.0, deadline - monotonic()))
            return not self._has_keeper and not any(thread.is_alive() for thread in threads)

    def end(self) -> None:
        """Begin nothing more and drop what is held, without waiting."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._over = True
        self._processors.close()
        for slot in list(self._slots.values()):
            self._forget(slot)
        self._changed.notify_all()

    def _was_surprised(self) -> None:
        self._surprises += 1
        # Perhaps only the program's first steps were as predicted.
        self._trusted_seconds = min(self._trusted_seconds, _ON_TRUST_SECONDS)
        if self._surprises >= _MAX_SURPRISES:
            for slot in [slot for slot in self._slots.values() if not slot.done]:
                self._forget(slot)

    def _wait_for(self, slot: _Slot) -> None:
        """Wait for a load that XLA has begun; meanwhile one more thread loads, on the waiting thread's processor."""
        if slot.done:
            return
        self._waiting_threads += 1
        try:
            self._start_threads()
            self._changed.wait_for(lambda: slot.done, slot.patience)
        finally:
            self._waiting_threads -= 1

    def _start_threads(self) -> None:
        """Start threads for the waiting items, once the program has asked for one or there is room again."""
        # A copy, because a signal handler that compiles comes here again and changes the slots.
        slots = list(self._slots.values())
        waiting = sum(not slot.begun and slot.item.seconds <= self._trusted_seconds for slot in slots)
        if waiting and not self._over and self._held < self._memory:
            self._begin_threads(waiting - len(self._busy))

    def _begin_threads(self, count: int) -> None:
        for _ in range(min(count, self._allowed_threads() - len(self._busy))):
            thread = _Thread(self)
            try:
                with usual_stack():
                    thread.start()
            except RuntimeError:
                return
            self._threads.add(thread)
            self._busy.add(thread)

    def _allowed_threads(self) -> int:
        return self._max_threads + self._waiting_threads

    def _run(self) -> None:
        try:
            if not self._has_prediction:
                self._plan(self._work.predict())
            while (slot := self._next(are_busy=self._is_costly_next() and self._processors.are_taken())) is not None:
                self._load(slot)
        except MemoryError:
            self.give_up(0.0)
        finally:
            self._work.end_loading()
            with self._lock:
                self._threads.discard(threading.current_thread())
                self._busy.discard(threading.current_thread())
                self._begin_keeper()
                self._changed.notify_all()

    def _plan(self, items: Sequence[Item]) -> None:
        with self._lock:
            self._has_prediction = True
            room = self._memory
            for item in () if self._over else items:
                if item.key in self._asked or item.key in self._slots:
                    continue
                room -= 0 if item.entry is None else len(item.entry.sealed)
                self._slots[item.key] = _Slot(item if room >= 0 else item._replace(entry=None))
            # The first predicted request lifts the limit on trust, so threads start for all items.
            self._begin_threads(len(self._slots) - len(self._busy))

    def _load(self, slot: _Slot) -> None:
        def begin(target: LoadTarget, patience: float) -> bool:
            with self._lock:
                if self._over or self._slots.get(slot.item.key) is not slot:
                    # The program has asked for it meanwhile, and loads it by itself.
                    return False
                slot.target, slot.patience = target, patience
                self._loading += 1
                return True

        loaded = None
        try:
            loaded = self._work.load(slot.item, begin, self.is_over)
        finally:
            with self._lock:
                self._loading -= slot.target is not None
                slot.done, slot.since = True, monotonic()
                if loaded is None:
                    self._forget(slot)
                elif self._slots.get(slot.item.key) is slot and self._work.is_current(_client(slot)):
                    slot.loaded = loaded
                    self._held += loaded.size
                else:
                    self._unused(slot.item.key, loaded)
                    self._forget(slot)
                self._changed.notify_all()

    def _is_costly_next(self) -> bool:
        with self._lock:
            return any(not slot.begun and slot.item.seconds >= _CHEAP_SECONDS for slot in self._slots.values())

    def _next(self, *, are_busy: bool) -> _Slot | None:
        with self._lock:
            # A thread that was begun while the program waited ends when it has loaded one executable.
            slot = self._choose(are_busy) if len(self._busy) <= self._allowed_threads() else None
            if slot is None:
                # This thread ends now; new work starts another one.
                self._busy.discard(threading.current_thread())
                return None
            slot.begun = True
            self._trusted_seconds -= slot.item.seconds
            return slot

    def _choose(self, are_busy: bool) -> _Slot | None:
        if self._over or self._held >= self._memory:
            return None
        waiting = [slot for slot in self._slots.values() if not slot.begun]
        if are_busy:
            # A long load beside the program would only take its processor, and more memory than a load by the program.
            waiting = [slot for slot in waiting if slot.item.seconds < _CHEAP_SECONDS]
        slot = next((slot for slot in waiting if slot.item.seconds <= self._trusted_seconds), None)
        if slot is not None and slot.item.seconds < _CHEAP_SECONDS:
            # The program can load a cheap executable by itself, but would have to wait for a costly one.
            trusted = itertools.takewhile(
                lambda slot: slot.item.seconds <= self._trusted_seconds, waiting[:_LOOKAHEAD_ITEMS]
            )
            slot = next((slot for slot in trusted if slot.item.seconds >= _COSTLY_SECONDS), slot)
        return slot

    def _begin_keeper(self) -> None:
        """Start the thread that drops what is left over, once no other thread is busy."""
        if self._slots and not self._has_keeper and not self._busy:
            with contextlib.suppress(RuntimeError), usual_stack():
                # It lives as long as anything is held, so a program that joins all of ``threading.enumerate()`` must
                # not find it there.
                _thread.start_new_thread(self._keep, ())
                self._has_keeper = True

    def _keep(self) -> None:
        """Drop what the program never asked for, and what was loaded onto clients that no longer exist."""
        try:
            while self._drop_stale():
                pass
        except BaseException:  # noqa: BLE001 - nobody watches this thread
            self.end()
        finally:
            with self._lock:
                self._has_keeper = False
                self._changed.notify_all()

    def _drop_stale(self) -> bool:
        """Drop what has been held for too long, then wait for a while; return whether anything is left."""
        self.look()
        with self._lock:
            now = monotonic()
            late = [slot for slot in self._slots.values() if now - slot.since >= _KEEP_SECONDS]
            for slot in late:
                if slot.done:
                    self._forget(slot)
                elif not slot.begun:
                    slot.item = slot.item._replace(entry=None)
            if count := sum(slot.done for slot in late):
                self._dropped(count)
            # This is checked under the lock that the wait below releases, so no notification is missed.
            if self._over or not any(slot.loaded or slot.item.entry for slot in self._slots.values()):
                return False
            self._changed.wait(min(_CHECK_SECONDS, _KEEP_SECONDS / 4))
            return True

    def _forget(self, slot: _Slot) -> None:
        was_full = self._held >= self._memory
        if self._slots.get(slot.item.key) is slot:
            del self._slots[slot.item.key]
        if slot.loaded is not None:
            self._held -= slot.loaded.size
            if not slot.is_taken:
                self._unused(slot.item.key, slot.loaded)
            slot.loaded = None
        # Other changes wake no thread, which would take the GIL from the program.
        if was_full or not self._slots:
            self._changed.notify_all()


class _Thread(threading.Thread):
    """A thread whose join() ends loading ahead, so that a program which joins all its threads does not hang."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        super().__init__(target=prefetcher._run, name="xcache-prefetch", daemon=True)
        self._prefetcher = prefetcher

    def join(self, timeout: float | None = None) -> None:
        """End the loading ahead, and wait for the thread."""
        self._prefetcher.end()
        super().join(timeout)


def _client(slot: _Slot) -> Any:
    return None if slot.target is None else slot.target.client
