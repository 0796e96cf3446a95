"""Compiles in progress: who does each, here or on another machine, and who waits for it."""

from __future__ import annotations

import time

from xcache.wire import protocol
from xcached.caller import Caller, Later
from xcached.requests.fleet import Elsewhere


class Waiter:
    """A client that waits for another client's compile."""

    def __init__(self, caller: Caller, wanted: protocol.Get, until: float, missing: protocol.Missing | None) -> None:
        """``missing``: the answer with a lease, should it turn out that nobody compiles."""
        self.caller = caller
        self.wanted = wanted
        self.missing = missing
        self.answer = Later()
        self.since = time.monotonic()
        self.until = until
        self.lease: Lease | None = None
        """The lease it waits for; None when the wait is over or the client is gone."""


class Lease:
    """One compile: the client that does it, and the clients that wait for it in order of arrival."""

    def __init__(self, number: int, wanted: protocol.Get, holder: Caller) -> None:
        self.number = number
        self.key = wanted.key
        self.module_name = wanted.module_name[: protocol.MAX_NAME]
        self.holder = holder
        self.since = time.monotonic()
        self.is_current = True
        self.waiters: dict[Waiter, None] = {}

    @property
    def elsewhere(self) -> Elsewhere | None:
        """The holder, if that is another machine, or may be one; such a lease has a waiter."""
        return self.holder if isinstance(self.holder, Elsewhere) else None

    def tell(self, waiter: Waiter, now: float) -> None:
        """Tell a waiter what it waits for, and how long that may still take."""
        holder, elsewhere = self.holder, self.elsewhere
        program = f"{holder.program} on {elsewhere.host}" if elsewhere and elsewhere.host else holder.program
        waiter.answer.say(protocol.Wait(holder.pid, program, now - self.since, max(0.0, waiter.until - now)))
