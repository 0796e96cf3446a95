"""Ask for an entry, or take one that was loaded ahead, and load it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xcache import executables
from xcache.causes import of_error
from xcache.client.contents import Absent, HeldLease, SealedEntry
from xcache.clock import monotonic
from xcache.errors import DamagedError, UncacheableError, UnloadableError, is_no_room
from xcache.prefetch.prefetcher import LoadedAhead, Prefetcher
from xcache.request import Outcome, Request
from xcache.signals import reraise_if_the_programs
from xcache.wire import envelope, protocol
from xcache.wire.ledger import AHEAD, HIT, LOADING_AHEAD

if TYPE_CHECKING:
    from xcache.aliases import Aliases
    from xcache.announcing import Announcer
    from xcache.client.client import Client
    from xcache.config.config import Config
    from xcache.counters import Counting
    from xcache.prefetch.history import History
    from xcache.recording import Ledger
    from xcache.trouble import Trouble

logger = logging.getLogger("xcache")

# A look-up asks once more after an unusable entry: another program may have stored a fresh one, or be compiling it.
_ATTEMPTS = 2


class Lookup:
    """Looks up the executables of one process."""

    def __init__(
        self,
        client: Client,
        prefetcher: Prefetcher,
        announcer: Announcer,
        history: History,
        aliases: Aliases,
        counting: Counting,
        ledger: Ledger,
        trouble: Trouble,
        report_soon: Callable[[], None],
        config: Config,
    ) -> None:
        self._client = client
        self._prefetcher = prefetcher
        self._announcer = announcer
        self._history = history
        self._aliases = aliases
        self._counting = counting
        self._ledger = ledger
        self._trouble = trouble
        self._report_soon = report_soon
        self._config = config
        # Complaints about entries that a look-up by alias found, until the program is looked up again.
        self._complaints: dict[str, tuple[protocol.Complain, ...]] = {}

    def keep_complaints(self, key: str, absent: Absent) -> None:
        """Keep what a look-up complains about for the next one of the same key."""
        self._complaints[key] = absent.complaints

    def look_up(self, request: Request, lease: HeldLease, *, may_wait: bool) -> Outcome | Absent:
        """Return the executable, or why there is none; ``may_wait`` for another program that compiles it."""
        wanted = protocol.Get(
            request.key.digest,
            self._config.max_wait if may_wait else 0.0,
            request.module_name[: protocol.MAX_NAME],
            request.key.components["program"],
        )
        complaints = self._complaints.pop(wanted.key, ())
        if complaints:
            wanted = wanted._replace(unusable=complaints[-1].digest)
        try:
            self._announcer.announce(request)
            for _ in range(_ATTEMPTS):
                start = monotonic()
                ahead = self._prefetcher.take(wanted.key, request.target) if request.target else None
                if isinstance(ahead, LoadedAhead):
                    self._counting.add(prefetched=1)
                    self._ledger.tell(outcome=AHEAD)
                    began = ahead.load_began
                    self._ledger.note("load", began, began + ahead.load_seconds, LOADING_AHEAD)
                    self._ledger.note("lookup", start, monotonic())
                    return self._hit(request, ahead.entry, ahead.executable, start, ahead.load_seconds)
                try:
                    found = ahead or self._client.get(wanted, lease)
                    waited_from = monotonic() - found.waited
                    self._ledger.note("lookup", start, waited_from)
                    self._ledger.note_daemon(start, waited_from, found.daemon_seconds)
                    if found.waited:
                        self._counting.add(wait_seconds=found.waited)
                        self._ledger.note("wait", waited_from, monotonic())
                    if isinstance(found, Absent):
                        cause = _cause_of(complaints) if found.cause == "unusable" else found.cause
                        return found._replace(cause=cause, complaints=complaints)
                    # The wait for another program's compile is counted separately from the time the cache took.
                    return self._load(request, found, start + found.waited)
                except DamagedError as error:
                    self._trouble.note(error, "it is compiled or looked up again", request)
                    complaints += (protocol.Complain(wanted.key, error.digest, str(error)[:1000], error.whole),)
                    wanted = wanted._replace(unusable=error.digest)
        except UncacheableError:
            raise
        except BaseException as error:  # noqa: BLE001 - no trouble of the cache may reach the program
            reraise_if_the_programs(error)
            self._trouble.note(error)
            return Absent(0, cause=_cause_of(complaints) if complaints else of_error(error), complaints=complaints)
        return Absent(lease=0, cause=_cause_of(complaints), complaints=complaints)

    def _load(self, request: Request, entry: SealedEntry, start: float) -> Outcome | Absent:
        """Load an entry's executable; raise DamagedError if it cannot be used."""
        name, key = request.module_name, request.key.digest
        raw = envelope.open_sealed(key, entry.digest, entry.sealed)
        load_start = monotonic()
        try:
            with self._client.loading(key, entry.digest):
                executable = self._prefetcher.with_room(lambda: request.load(raw), self._config.timeout)
            self._ledger.tell(outcome=HIT)
            self._ledger.note("load", load_start, monotonic())
        except BaseException as error:  # noqa: BLE001 - whatever XLA throws, the program compiles
            reraise_if_the_programs(error)
            failure = UnloadableError(f"{name} could not be loaded: {error}", entry.digest)
            if not is_no_room(error):
                raise failure from None
            # Running out of memory, here or on the device, says nothing about the entry.
            self._trouble.note(failure)
            return Absent(lease=0, cause="unusable")
        return self._hit(request, entry, executable, start, monotonic() - load_start)

    def _hit(self, request: Request, entry: SealedEntry, executable: Any, start: float, load_seconds: float) -> Outcome:
        name, key = request.module_name, request.key.digest
        now = monotonic()
        self._counting.add(
            requests=1,
            hits=1,
            bytes_read=len(entry.sealed),
            load_seconds=load_seconds,
            saved_seconds=entry.compile_seconds - (now - start),
        )
        if entry.wait is not None:
            # Refund the wait for the daemon, as far as the hit has saved the program that time.
            charged = entry.wait.charged
            worth = min(charged, charged + entry.compile_seconds - (now - start))
            if worth > 0:
                self._client.refund(entry.wait, worth)
        self._history.note(key, request.target, request.platform, load_seconds)
        if request.alias is not None:
            self._aliases.note(request.alias)
        self._report_soon()
        executables.remember(executable, executables.FirstGeneration(key, entry.digest, entry.sealed))
        logger.debug("hit: %s %s (%.3f s instead of %.3f s)", name, key[:12], now - start, entry.compile_seconds)
        return Outcome(executable, "hit", entry.compile_seconds, now - start)


def _cause_of(complaints: tuple[protocol.Complain, ...]) -> str:
    """Return the cause of a miss after these complaints: the daemon sets aside what is damaged."""
    return "set aside" if complaints and not complaints[-1].whole else "unusable"
