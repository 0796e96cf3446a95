"""Look up, else compile and store: the part that the jax hook and ``xcache.compile`` share.

Nothing here may stop a program. When the cache fails, it counts the error, warns once, and lets the program compile.
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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from xcache import executables
from xcache.aliases import Aliases
from xcache.announcing import Announcer
from xcache.causes import Explainer, is_out_of_reach
from xcache.client.client import Client
from xcache.client.contents import Absent, HeldLease
from xcache.client.launcher import Launcher
from xcache.clock import elsewhere, monotonic
from xcache.config.config import Config
from xcache.counters import Counting
from xcache.errors import RefusedError, UncacheableError
from xcache.guard import guard
from xcache.lookup import Lookup
from xcache.prefetch.fetcher import Fetcher, Loader
from xcache.prefetch.history import History
from xcache.prefetch.prefetcher import Prefetcher
from xcache.recording import Ledger
from xcache.request import Alias, Outcome, Request
from xcache.signals import reraise_if_the_programs
from xcache.storing import Compiled, StoreQueue, Storer, located_first, serialize_first
from xcache.threads import check_threads
from xcache.trouble import Trouble
from xcache.wire import protocol
from xcache.wire.ownership import own_uid

if TYPE_CHECKING:
    from xcache.statistics import Statistics
    from xcache.wanted import Wanted

logger = logging.getLogger("xcache")

# The estimate of an executable's load time until it has been loaded once; most load faster.
_LOAD_TO_COMPILE_RATIO = 0.2
# The least time for writing what the process wanted, if the user asked for that.
_LOCK_SECONDS = 2.0


class _Nesting(threading.local):
    """Whether this thread is compiling. A request made meanwhile must not wait: it may wait for that very compile."""

    compiling = False


class Cache:
    """The cache of one process: asks the daemon for executables, and stores what the process compiles."""

    def __init__(self, config: Config, mode: str, version: str, loader: Loader | None = None) -> None:
        # First, so that a uid that cannot be used is reported before anything else is tried.
        own_uid()
        check_threads()
        self.config = config
        self.mode = mode
        self._version = version
        self._loader = loader
        self._began = monotonic()
        self._counting = Counting()
        self._parent_run = ""
        self._is_unnoticed = False
        self._warned: set[str] = set()
        self._announced: set[str] = set()
        self._nesting = _Nesting()
        self._wanted: Wanted | None = None
        self._begin()
        # close() runs the first before pending stores are finished, the second after everything else.
        self._undo, self.at_close = contextlib.ExitStack(), contextlib.ExitStack()
        self._undo.enter_context(executables.serialize_first_generation())
        # The undo is registered first, here and elsewhere, because Ctrl-C may arrive between the two calls.
        self._undo.callback(atexit.unregister, self._at_exit)
        atexit.register(self._at_exit)
        # A fork handler cannot be unregistered; a strong reference would keep a closed cache alive.
        this = weakref.ref(self)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: _begin_in_child(this()))

    def _begin_in_child(self) -> None:
        """Start afresh in a forked child, and leave the parent's connections and counts to the parent."""
        self._counting = self._counting.for_child()
        self._parent_run = self.ledger.run
        self.client.abandon()
        self._begin()

    def _begin(self) -> None:
        """Make connections, threads and locks of this process's own."""
        self._launcher = Launcher(self.config)
        self.client = Client(self.config, self._version, self._launcher if self._starts_daemon() else None)
        self._trouble = Trouble(self._counting, self._warned)
        self.ledger = Ledger(self.mode, self.client.record_run, self._parent_run, is_kept=self.config.max_ledger > 0)
        self._explainer = Explainer(self._counting, self.ledger, self.mode, says=self.config.explain)
        self._announcer = Announcer(self.client, self._announced)
        self._history = History(self.client)
        self.aliases = Aliases(self.client, self._history, self._trouble, is_readonly=self.mode == "readonly")
        self._wanted = self._begin_wanted()
        self._storer = Storer(
            self.client, self._counting, self._announcer, self.aliases, self.ledger, overwrite=self.mode == "refresh"
        )
        self._queue = StoreQueue(self._store, self._report, self.client.is_late, self.client.pause)
        fetcher = Fetcher(self.client, self._history, self._loader, self._trouble.note)
        self._prefetcher = Prefetcher(
            fetcher,
            0 if self._loader is None or self.mode == "refresh" else self.config.prefetch,
            lambda count: self._counting.add(prefetches_dropped=count),
            lambda key, loaded: self.ledger.note_unused(key, loaded.load_began, loaded.load_seconds),
        )
        self._lookup = Lookup(
            self.client,
            self._prefetcher,
            self._announcer,
            self._history,
            self.aliases,
            self._counting,
            self.ledger,
            self._trouble,
            self._queue.report_soon,
            self.config,
        )
        self._is_summed_up = False
        self._finalized = False

    def _begin_wanted(self) -> Wanted | None:
        """Return what notes the programs of this process, if the user wants a list of them."""
        if self._wanted is not None:
            return self._wanted.for_child(self._trouble.note)
        if self.config.lock is None:
            return None
        # Most programs need it not.
        from xcache.wanted import Wanted, run_began

        return Wanted(self.config.lock, self._trouble.note, run_began())

    def statistics(self) -> Statistics:
        """Return what this process has counted so far."""
        return self._counting.snapshot(self.client.lost_seconds)

    def _starts_daemon(self) -> bool:
        # systemd, a container or root starts the one daemon of a machine; programs never do.
        return self.config.autostart and not self.config.daemon_user

    def warm_up(self) -> None:
        """Start a daemon early, so that it is ready when the program first compiles."""
        start = monotonic()
        try:
            if self._starts_daemon():
                self._launcher.start()
            self._prefetcher.start()
        except BaseException as error:  # noqa: BLE001 - a library that guards sockets may raise anything
            reraise_if_the_programs(error)
            self._trouble.note(error)
        self.client.charge(monotonic() - start)

    def be_unnoticed(self) -> None:
        """Report nothing more of this process, as of a check that is nobody's work: neither counts nor its run."""
        self._is_unnoticed = True

    def drop_for_discarded_clients(self) -> None:
        """Drop what was loaded ahead for clients that jax has discarded."""
        self._prefetcher.look()

    def get_or_compile(
        self,
        compile_now: Callable[[], Any],
        request: Callable[[], Request],
        as_without: Callable[[], Any] | None = None,
        *,
        has_another: bool = False,
    ) -> Outcome:
        """Return the executable, from the cache if possible; only the compiler's own exceptions leave.

        ``request`` says what to ask for. It may raise UncacheableError; the program then compiles by ``as_without``,
        if that is given. If this ``has_another`` cache, a program that the store cannot have goes there, too.
        """
        # A signal handler may compile in the middle of another request of the same thread.
        with elsewhere(), self._lease() as lease:
            return self._get_or_compile(compile_now, request, as_without or compile_now, lease, has_another=has_another)

    @contextlib.contextmanager
    def _lease(self) -> Iterator[HeldLease]:
        """Yield a place for a lease; give it back at the end, unless it was handed on."""
        lease = HeldLease()
        try:
            yield lease
        finally:
            # Also after Ctrl-C: the program's next attempt would wait for the lease that it holds itself.
            if held := lease.hand_on():
                self._release(*held)

    def get_if_stored(self, request: Callable[[], Request]) -> Outcome | None:
        """Return the executable if it is there; do not wait for another program's compile, and count no miss."""
        try:
            with self.ledger.stage("key"):
                asked = request()
            self.ledger.tell(key=asked.key.digest)
            with elsewhere(), self._lease() as lease:
                found = self._lookup.look_up(asked, lease, may_wait=False)
        except UncacheableError:
            return None
        except BaseException as error:  # noqa: BLE001 - a bug in here must not stop the program
            reraise_if_the_programs(error)
            logger.debug("could not look up by alias: %s: %s", type(error).__name__, error)
            return None
        if isinstance(found, Outcome):
            self._note_wanted(asked, found.compile_seconds)
            return found
        self._lookup.keep_complaints(asked.key.digest, found)
        return None

    def _get_or_compile(
        self,
        compile_now: Callable[[], Any],
        request: Callable[[], Request],
        as_without: Callable[[], Any],
        lease: HeldLease,
        *,
        has_another: bool,
    ) -> Outcome:
        asked, found = self._request_and_look_up(request, lease)
        if isinstance(found, Outcome):
            self._note_wanted(asked, found.compile_seconds)
            return found
        self.check_guard()
        # Outside every except block: an exception of the compiler must not carry one of ours as its context.
        located = b""
        is_left = has_another and self._is_out_of_reach()
        if asked is not None:
            self.ledger.note_compiling()
            self._queue.report_soon()
            if self.mode != "readonly" and not is_left:
                # Before XLA gets the module, which it may change.
                located = located_first(asked)
        start = monotonic()
        before = self._nesting.compiling
        try:
            self._nesting.compiling = True
            compiling = as_without if asked is None or is_left else compile_now
            executable = self._prefetcher.with_room(compiling, self.config.timeout)
        finally:
            self._nesting.compiling = before
            self.ledger.note("compile", start, monotonic())
        seconds = monotonic() - start
        self._counting.add(compile_seconds=seconds)
        if asked is None:
            return Outcome(executable, "uncacheable", seconds)
        self._note_wanted(asked, seconds)
        if is_left:
            # The other cache may have had it: it must not get into the store under this key.
            self.ledger.tell(stored="no: left to jax's own cache")
            return Outcome(executable, "left", seconds)
        if self.mode == "readonly":
            # A readonly program stores nothing, so only its reports show that a failed daemon works again.
            self.ledger.tell(stored="no: XCACHE=readonly")
            self._queue.report_soon()
        else:
            self._history.note(asked.key.digest, asked.target, asked.platform, seconds * _LOAD_TO_COMPILE_RATIO)
            self._finish_before_exit()
            first = found.serialize_first or asked.serialize_first()
            with self.ledger.stage("serialize") if first else contextlib.nullcontext():
                serialized = serialize_first(asked, executable) if first else None
            compiled = Compiled(
                asked, executable, seconds, found.lease, serialized, found.complaints, located, self.ledger.current()
            )
            if self._queue.add(compiled, weight=seconds):
                # The queue's thread gives the lease back, with the entry or without.
                lease.hand_on()
            else:
                self._counting.error("store queue full")
                self.ledger.tell(stored="no: too many executables were waiting to be stored")
        return Outcome(executable, "miss", seconds)

    def _request_and_look_up(
        self, request: Callable[[], Request], lease: HeldLease
    ) -> tuple[Request | None, Outcome | Absent]:
        """Return the request (None if it is uncacheable) and the answer to it."""
        nothing = Absent(lease=0)
        try:
            with self.ledger.stage("key"):
                asked = request()
            self.ledger.tell(key=asked.key.digest)
            may_wait = self.mode == "on" and asked.may_wait and not self._nesting.compiling
            found = nothing if self.mode == "refresh" else self._lookup.look_up(asked, lease, may_wait=may_wait)
        except UncacheableError as reason:
            self.count_uncacheable(str(reason))
            return None, nothing
        except BaseException as error:  # noqa: BLE001 - a bug in here must not stop the program
            reraise_if_the_programs(error)
            self.count_uncacheable("key failed")
            # A program that is nearly at its recursion limit may still compile; that is no trouble of the cache.
            if not isinstance(error, RecursionError):
                self._trouble.warn("key failed", f"{type(error).__name__}: {error}")
            return None, nothing
        if isinstance(found, Absent):
            self._explainer.miss(asked, found)
        return asked, found

    def _is_out_of_reach(self) -> bool:
        """Return whether the store can neither give nor take this thread's program, as the cause of its miss says."""
        return self.mode == "readonly" or is_out_of_reach(self.ledger.current().cause)

    def _note_wanted(self, asked: Request | None, seconds: float) -> None:
        if self._wanted is not None and asked is not None:
            self._wanted.note(asked, seconds)
            self._finish_before_exit()

    def _release(self, key: str, lease: int) -> None:
        """Give a lease back, so that another program may compile what this one will not store."""
        if lease:
            try:
                self.client.release(key, lease)
            except BaseException as error:  # noqa: BLE001 - the compiler's own exception may be propagating
                reraise_if_the_programs(error)
                logger.debug("could not give a lease back: %s", error)

    def check_guard(self) -> None:
        """Raise CompileInGuardError if this thread's program must not be compiled now."""
        asked, settings = self.ledger.current(), self.config
        asked.stored = "no: compiling it was forbidden"
        guard.check(asked.described(), asked.cause, settings.on_miss, self._on_miss_since())
        asked.stored = ""
        if settings.on_miss != "allow":
            self._finish_before_exit()

    def _on_miss_since(self) -> float | None:
        """Return the moment from which the setting ``on_miss`` holds; None if only ``xcache.warmed_up()`` begins it."""
        after = self.config.on_miss_after
        return None if after is None else self._began + after

    def _say_whether_on_miss_held(self) -> None:
        # A handler of the program's may raise anything.
        with contextlib.suppress(Exception):
            if said := guard.unheld(self.config.on_miss, self._on_miss_since()):
                logger.warning("%s", said)

    def note_call(self, alias: Alias) -> None:
        """Have the daemon keep the record of a call, once it has an entry of the program."""
        self.aliases.note_call(alias)
        self._queue.report_soon()

    def count_call(self, outcome: str) -> None:
        """Count a call of ``xcache.jit`` by why it was traced, or as one that was not."""
        self._counting.call(outcome)

    def count_lowering(self, outcome: str, instead_of: str = "") -> None:
        """Count a program by why it was lowered, or as one that was not, and take back what it was counted as."""
        self._counting.lowering(outcome, instead_of)

    def count_uncacheable(self, reason: str) -> None:
        """Count a program that bypassed the cache, and why."""
        self._explainer.uncacheable(reason)

    def close(self) -> None:
        """Finish pending stores and undo every change to the process. Calling it again does nothing."""
        self._undo.close()
        self._finish()
        self._sum_up()
        self.at_close.close()

    def _finish(self) -> None:
        try:
            self._send_the_rest()
        except BaseException as error:  # noqa: BLE001 - the program may have broken what this uses
            reraise_if_the_programs(error)
            self._trouble.note(error, "the end of this run is not recorded")
        finally:
            self.client.close()
            self._launcher.close()

    def _send_the_rest(self) -> None:
        self._say_whether_on_miss_held()
        self._prefetcher.stop(self.config.timeout)
        start = monotonic()
        self._prefetcher.finish(self.client.allowance())
        self.client.charge(monotonic() - start)
        self._history.mark_complete()
        self.ledger.mark_over()
        for _ in range(self._queue.finish(self.client.allowance())):
            self._counting.error("not stored before exit")
        self.client.charge(self._queue.late_seconds)
        if (end := self.ledger.unsaid_end()) is not None and not self._is_unnoticed:
            self.client.note_at_the_end(end)
        if self._wanted is not None and not self._is_unnoticed:
            self._wanted.write(max(self.client.allowance(), _LOCK_SECONDS))

    def _at_exit(self) -> None:
        try:
            self._finish()
        finally:
            # Ctrl-C is likely where an exit takes long.
            named = any(thread.name.startswith("xcache-") for thread in threading.enumerate())
            if named or not self._prefetcher.finish(0.0):
                # A thread still waits for something and may outlive the interpreter. It must not collect jax's client,
                # whose destructor releases the GIL: a thread that cannot get it back, deep in C++, ends the process.
                gc.disable()
                # The thread may not write to stderr either: the interpreter needs stderr for itself as it shuts down.
                self._trouble.fall_silent(self.config.timeout)
        self._sum_up()

    def _sum_up(self) -> None:
        if not self._is_summed_up and logger.isEnabledFor(logging.INFO):
            self._is_summed_up = True
            logger.info("%s", self.statistics())

    def _finish_before_exit(self) -> None:
        """Register a finalizer in a child that multiprocessing forked: such a child skips atexit."""
        process = sys.modules.get("multiprocessing.process")
        if self._finalized or process is None or process.parent_process() is None:
            return
        self._finalized = True
        from multiprocessing import util

        util.Finalize(None, self._finish, exitpriority=10)

    def _store(self, compiled: Compiled) -> None:
        """Store an executable, on the queue's thread; if that fails, let another program compile it."""
        try:
            with self.ledger.resuming(compiled.program):
                can_be_stored = self._storer.store(compiled)
            if self._wanted is not None and not can_be_stored:
                self._wanted.drop(compiled.request.key.digest)
        except BaseException as error:  # noqa: BLE001 - serialize() may raise anything, on a thread nobody watches
            compiled.program.stored = f"no: {error}"
            if isinstance(error, RefusedError) and error.kind == protocol.SET_ASIDE:
                # The daemon has warned of the crashes; each run of the program would say it again.
                self._counting.reclassify_miss(error.kind, compiled.program.cause)
                logger.info("%s is not stored: %s", compiled.request.module_name, error)
            elif isinstance(error, RefusedError):
                self._trouble.note(error, "the executable is not stored", compiled.request)
            else:
                self._trouble.note(error)
            self._release(compiled.request.key.digest, compiled.lease)

    def _report(self) -> None:
        """Send the counts and the list of wanted keys to the daemon, on the queue's thread."""
        if self._is_unnoticed:
            return
        self._history.send()
        self.aliases.send()
        self.ledger.send()
        unreported = self._counting.take_unreported()
        if unreported:
            try:
                self.client.report(unreported)
            except BaseException as error:  # noqa: BLE001 - nobody watches this thread
                self._counting.put_back(unreported)
                logger.debug("could not report statistics: %s", error)


def _begin_in_child(cache: Cache | None) -> None:
    if cache is not None:
        cache._begin_in_child()
