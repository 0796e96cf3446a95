"""Look up, else compile and store: what the jax hook and ``xcache.compile`` have in common.

Nothing in here may stop a program. Whatever goes wrong with the cache is counted, said once, and the program compiles.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xcache import executables, payload, protocol
from xcache.client import Client
from xcache.clock import elsewhere, monotonic
from xcache.config import Config
from xcache.counting import Counting
from xcache.entries import Absent, Entry
from xcache.errors import (
    DamagedError,
    NotAskedError,
    UncacheableError,
    UnloadableError,
    XcacheError,
)
from xcache.fetching import Fetcher, LoadsAhead
from xcache.handlers import let_pass
from xcache.history import History
from xcache.launcher import Launcher
from xcache.prefetch import Loaded, Prefetcher
from xcache.request import Outcome, Request
from xcache.storing import Compiled, StoreQueue, Storer

if TYPE_CHECKING:
    from xcache.statistics import Statistics

logger = logging.getLogger("xcache")

# An entry that cannot be used is set aside, and perhaps somebody has a fresh one by then.
_ATTEMPTS = 2
# What loading takes is not known before it was done; this much of compiling, in most cases less.
_LOADING_TO_COMPILING = 0.2


class _Here(threading.local):
    """What this thread is at: who asks within a compile does not wait, since that compile may be what it waits for."""

    compiling = False


class Cache:
    """One process's way to its daemon."""

    def __init__(self, config: Config, mode: str, version: str, load_ahead: LoadsAhead | None = None) -> None:
        self.config = config
        self.mode = mode
        self._version = version
        self._load_ahead = load_ahead
        self._counting = Counting()
        self._said: set[str] = set()
        self._announced: set[str] = set()
        self._here = _Here()
        self._begin()
        self._undo = contextlib.ExitStack()
        self._undo.enter_context(executables.serialize_first_generation())
        # In this order, as everywhere here: Ctrl-C may come in between.
        self._undo.callback(atexit.unregister, self._at_exit)
        atexit.register(self._at_exit)
        # Registered weakly: a cache that was closed must not live on in every child.
        this = weakref.ref(self)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: _begin_in_child(this()))

    def _begin_in_child(self) -> None:
        """After a fork: leave the parent what is the parent's."""
        self._counting = self._counting.for_child()
        self._client.abandon()
        self._begin()

    def _begin(self) -> None:
        """Start with connections, threads and locks of this process's own."""
        self._launcher = Launcher(self.config)
        self._client = Client(self.config, self._version, self._launcher if self._starts_daemon() else None)
        self._storer = Storer(self._client, self._counting, self._announce, overwrite=self.mode == "refresh")
        self._queue = StoreQueue(self._store, self._tell, patience=self.config.timeout)
        self._history = History(self._client)
        fetcher = Fetcher(self._client, self._history, self._load_ahead, self._went_wrong)
        self._prefetcher = Prefetcher(
            fetcher,
            0 if self._load_ahead is None or self.mode == "refresh" else self.config.prefetch,
            lambda count: self._counting.add(prefetches_dropped=count),
        )
        self._lock = threading.RLock()
        self._is_silent = False
        self._finalized = False

    def statistics(self) -> Statistics:
        """What this process counted so far."""
        return self._counting.snapshot()

    def _starts_daemon(self) -> bool:
        # The machine's one daemon is started by the machine.
        return self.config.autostart and not self.config.daemon_user

    def warm_up(self) -> None:
        """Have a daemon started, so that it becomes ready while the program is still getting there."""
        try:
            if self._starts_daemon():
                self._launcher.start()
            self._prefetcher.start()
        except (XcacheError, OSError) as error:
            self._went_wrong(error)

    def get_or_compile(self, compile_now: Callable[[], Any], request: Callable[[], Request]) -> Outcome:
        """The executable, from the cache if it can be had there; only the compiler's own exceptions leave.

        ``request`` says what to ask for; UncacheableError from it, or from the daemon, is the reason not to.
        """
        leases: list[tuple[str, int]] = []
        # This may be in a signal handler, in the middle of a request of the same thread.
        with elsewhere():
            try:
                return self._get_or_compile(compile_now, request, leases)
            finally:
                # Also when Ctrl-C comes anywhere in there: this program would wait for itself when it tries again.
                while leases:
                    self._release(*leases.pop())

    def _get_or_compile(
        self, compile_now: Callable[[], Any], request: Callable[[], Request], leases: list[tuple[str, int]]
    ) -> Outcome:
        asked, found = self._ask(request, leases)
        if isinstance(found, Outcome):
            return found
        # Outside of all handlers: an exception of the compiler must not carry one of ours as its context.
        start = monotonic()
        before = self._here.compiling
        try:
            self._here.compiling = True
            executable = compile_now()
        finally:
            self._here.compiling = before
        seconds = monotonic() - start
        self._counting.add(compile_seconds=seconds)
        if asked is None:
            return Outcome(executable, "uncacheable", seconds)
        if self.mode == "readonly":
            # Nothing is stored that would show whether a daemon which was in trouble is well again.
            self._queue.tell_soon()
        else:
            self._history.note(asked.key.digest, asked.ahead, asked.platform, seconds * _LOADING_TO_COMPILING)
            self._finish_before_exit()
            raw = self._serialize_first(asked, executable) if asked.serialize_first() else None
            if self._queue.add(Compiled(asked, executable, seconds, found.lease, raw), weight=seconds):
                # Given back by the queue's thread, with the entry or without.
                leases.clear()
            else:
                self._counting.error("store queue full")
        return Outcome(executable, "miss", seconds)

    def _ask(
        self, request: Callable[[], Request], leases: list[tuple[str, int]]
    ) -> tuple[Request | None, Outcome | Absent]:
        """What was asked for, unless it is uncacheable, and what was found."""
        nothing = Absent(lease=0)
        try:
            asked = request()
            found = nothing if self.mode == "refresh" else self._look_up(asked, leases)
        except UncacheableError as reason:
            self.count_uncacheable(str(reason))
            return None, nothing
        except Exception as error:  # noqa: BLE001 - a defect in here must not cost anybody their program
            let_pass(error)
            self.count_uncacheable("key failed")
            self._complain("key failed", f"{type(error).__name__}: {error}")
            return None, nothing
        if isinstance(found, Absent):
            self._counting.add(requests=1, misses=1)
        return asked, found

    def _release(self, key: str, lease: int) -> None:
        """Let others compile what will not be stored."""
        if lease:
            try:
                self._client.release(key, lease)
            except Exception as error:  # noqa: BLE001 - the compiler's own exception may be on its way
                let_pass(error)
                logger.debug("a lease was not given back: %s", error)

    def count_uncacheable(self, reason: str) -> None:
        """Count a program that went past the cache, and why."""
        self._counting.uncacheable(reason)
        logger.debug("not cached: %s", reason)

    def close(self) -> None:
        """Finish what is still to be stored, and leave no trace in the process. Calling it again does nothing."""
        self._undo.close()
        self._finish()

    def _finish(self) -> None:
        self._prefetcher.finish(self.config.timeout)
        self._history.is_complete()
        for _ in range(self._queue.finish()):
            self._counting.error("not stored before exit")
        self._client.close()

    def _at_exit(self) -> None:
        self._finish()
        if any(thread.name.startswith("xcache-") for thread in threading.enumerate()):
            # One that is waiting for something, and may run on until the interpreter is gone. It must not be the one to
            # collect jax's client, which lets go of the GIL: who cannot have it back, deep in C++, ends the process.
            gc.disable()
            # Nor be in the middle of a line on stderr, which the interpreter wants to itself then.
            self._is_silent = True
            if self._lock.acquire(timeout=self.config.timeout):
                self._lock.release()
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", self.statistics())

    def _look_up(self, request: Request, leases: list[tuple[str, int]]) -> Outcome | Absent:
        waits = self.mode == "on" and request.may_wait and not self._here.compiling
        wanted = protocol.Get(
            request.key.digest,
            self.config.max_wait if waits else 0.0,
            request.module_name[:500],
            request.key.components["program"],
        )
        try:
            self._announce(request)
            for _ in range(_ATTEMPTS):
                start = monotonic()
                ahead = self._prefetcher.take(wanted.key, *request.ahead) if request.ahead else None
                if isinstance(ahead, Loaded):
                    self._counting.add(prefetched=1)
                    return self._hit(request, ahead.entry, ahead.executable, start, ahead.load_seconds)
                try:
                    found = ahead or self._client.get(wanted, leases)
                    if found.waited:
                        self._counting.add(wait_seconds=found.waited)
                    if isinstance(found, Absent):
                        logger.debug("miss: %s %s", request.module_name, wanted.key[:12])
                        return found
                    # What was waited for is counted by itself, and is not what the cache took.
                    return self._load(request, found, start + found.waited)
                except DamagedError as error:
                    self._went_wrong(error)
                    self._client.complain(wanted.key, error.digest, str(error))
        except UncacheableError:
            raise
        except Exception as error:  # noqa: BLE001 - nothing that is wrong with the cache is the program's trouble
            let_pass(error)
            self._went_wrong(error)
        return Absent(lease=0)

    def _announce(self, request: Request) -> None:
        """Once in a process: what was made by a toolchain that is not installed is not served, until it is again."""
        digest = request.key.components["toolchain"]
        if digest in self._announced:
            return
        self._announced.add(digest)
        # Only what can be named in a message: a path is bytes, and need not be text.
        files = [file._asdict() for file in request.toolchain_files() if file.path.isprintable()]
        if files:
            text = request.details().get("toolchain", "")
            announcement = protocol.Announce(digest, request.platform, request.jaxlib_version, text, files)
            try:
                self._client.announce(announcement)
            except BaseException:
                self._announced.discard(digest)
                raise

    def _load(self, request: Request, entry: Entry, start: float) -> Outcome | Absent:
        """The executable of an entry; DamagedError for one that cannot be used."""
        name, key = request.module_name, request.key.digest
        raw = payload.open_sealed(key, entry.digest, entry.sealed)
        load_start = monotonic()
        try:
            with self._client.loading(key, entry.digest):
                executable = request.load(raw)
        except Exception as error:  # noqa: BLE001 - whatever XLA throws here, compiling is the answer
            let_pass(error)
            failure = UnloadableError(f"{name} could not be loaded: {error}", entry.digest)
            if "RESOURCE_EXHAUSTED" not in str(error) and not isinstance(error, MemoryError):
                raise failure from None
            # What found no room, here or on the device, says nothing about the entry.
            self._went_wrong(failure)
            return Absent(lease=0)
        return self._hit(request, entry, executable, start, monotonic() - load_start)

    def _hit(self, request: Request, entry: Entry, executable: Any, start: float, load_seconds: float) -> Outcome:
        name, key = request.module_name, request.key.digest
        now = monotonic()
        self._counting.add(
            requests=1,
            hits=1,
            bytes_read=len(entry.sealed),
            load_seconds=load_seconds,
            saved_seconds=entry.compile_seconds - (now - start),
        )
        self._history.note(key, request.ahead, request.platform, load_seconds)
        self._queue.tell_soon()
        executables.remember(executable, executables.FirstGeneration(key, entry.digest, entry.keep))
        logger.debug("hit: %s %s (%.3f s instead of %.3f s)", name, key[:12], now - start, entry.compile_seconds)
        return Outcome(executable, "hit", entry.compile_seconds, now - start)

    def _finish_before_exit(self) -> None:
        """Children that multiprocessing forked leave without atexit; its own finalizers they do run."""
        process = sys.modules.get("multiprocessing.process")
        if self._finalized or process is None or process.parent_process() is None:
            return
        self._finalized = True
        from multiprocessing import util

        util.Finalize(None, self._finish, exitpriority=10)

    def _serialize_first(self, request: Request, executable: Any) -> bytes | None:
        """Serialize before the program has it; where that fails, it is tried again and dealt with behind its back."""
        try:
            return request.serialize(executable)
        except Exception as error:  # noqa: BLE001 - see above
            let_pass(error)
            return None

    def _store(self, compiled: Compiled) -> None:
        """On the queue's thread: have it stored, or let others compile it."""
        try:
            self._storer.store(compiled)
        except Exception as error:  # noqa: BLE001 - serialize() may raise anything, on a thread nobody watches
            self._went_wrong(error)
            self._release(compiled.request.key.digest, compiled.lease)

    def _tell(self) -> None:
        """On the queue's thread: add what was counted to the daemon's statistics, and what was wanted to its memory."""
        self._history.tell()
        untold = self._counting.take_untold()
        if untold:
            try:
                self._client.report(untold)
            except (XcacheError, OSError) as error:
                self._counting.put_back(untold)
                logger.debug("statistics not delivered: %s", error)

    def _went_wrong(self, error: Exception) -> None:
        if isinstance(error, NotAskedError):
            return
        kind = getattr(error, "kind", type(error).__name__)
        self._counting.error(kind)
        self._complain(kind, error)

    def _complain(self, kind: str, error: object) -> None:
        """One warning per kind of trouble and process; the rest for those who debug."""
        with self._lock:
            first = kind not in self._said
            self._said.add(kind)
            if not self._is_silent:
                level = logging.WARNING if first else logging.DEBUG
                logger.log(level, "%s (%s); compiling without the cache", error, kind)


def _begin_in_child(cache: Cache | None) -> None:
    if cache is not None:
        cache._begin_in_child()


_current: Cache | None = None


def current() -> Cache | None:
    """The cache this process uses, if it uses one."""
    return _current


def use(cache: Cache) -> None:
    """Make this the process's cache, in place of the one there was."""
    global _current
    if _current is not None:
        _current.close()
    _current = cache


def leave(cache: Cache) -> None:
    """Close a cache, and have none if it was the process's."""
    global _current
    cache.close()
    if _current is cache:
        _current = None
