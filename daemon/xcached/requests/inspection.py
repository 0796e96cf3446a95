"""The requests that only look: the daemon's status, and the list of entries."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from functools import partial

from xcache._version import __version__
from xcache.config.table import LIMITS
from xcache.wire import commands, protocol
from xcached.caller import Answer, Caller, Handlers, Reply
from xcached.host.reload import LiveSettings
from xcached.requests.leases import Leases
from xcached.requests.trust import Trust
from xcached.store.ledger import Ledger
from xcached.store.listing import entries_by
from xcached.store.shortage import Shortage
from xcached.store.store import Store
from xcached.store.writer import WriterThread


class Inspection:
    """Tells each user of their own entries and compiles, and administrators of all."""

    def __init__(
        self,
        store: Store,
        shortage: Shortage,
        ledger: Ledger,
        settings: LiveSettings,
        writer: WriterThread,
        leases: Leases,
        trust: Trust,
        connections: Callable[[], int],
        remotes: Callable[[], list[dict[str, protocol.Scalar]]],
    ) -> None:
        self._store = store
        self._shortage = shortage
        self._ledger = ledger
        self._settings = settings
        self._writer = writer
        self._leases = leases
        self._trust = trust
        self._connections = connections
        self._remotes = remotes
        self._started = time.monotonic()
        self.handlers: Handlers = {protocol.AskStatus: self._status, commands.AskEntries: self._list}

    def _list(self, caller: Caller, message: commands.AskEntries) -> Answer:
        uid = self._trust.visible_to(caller.uid)
        return self._writer.call(lambda: entries_by(self._store, uid, message), caller.uid)

    def _status(self, caller: Caller, message: protocol.AskStatus) -> Answer:
        totals = self._store.reader.totals()
        settings = self._settings.now
        free, to_stay_free = self._shortage.seen
        facts: dict[str, protocol.Scalar] = {
            "pid": os.getpid(),
            "version": __version__,
            "uptime_seconds": round(time.monotonic() - self._started, 3),
            "connections": self._connections(),
            "entries": totals["entries"],
            "bytes": totals["bytes"],
            **{name: getattr(settings, name) for name in LIMITS},
            **{f"{name}_from": settings.sources[name] for name in LIMITS},
            "free": free,
            "to_stay_free": to_stay_free,
            "namespace": settings.namespace,
            "configuration_problem": self._settings.problem,
            "unrecorded_runs": self._ledger.unrecorded(self._trust.visible_to(caller.uid)),
            "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        compiles = self._leases.compiles(partial(self._trust.may_change, caller.uid))
        return Reply(protocol.Status(facts, compiles, self._remotes()))
