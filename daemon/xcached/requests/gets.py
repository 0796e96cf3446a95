"""The requests for one entry: a look-up, which may end in a lease, and the return of a lease."""

from __future__ import annotations

import time

from xcache.wire import ledger, protocol
from xcache.wire.hashing import is_digest
from xcached.caller import Answer, Caller, Handlers, Reply
from xcached.requests.fetches import Fetches
from xcached.requests.leases import Leases
from xcached.requests.lookup import Lookup
from xcached.store.reader import Traces

# Every request has such an answer: a tuple, because a union would be made each time.
_TIMED = (protocol.Found, protocol.Missing)


class Gets:
    """Hands out the entry, or else the lease to make it."""

    def __init__(self, lookup: Lookup, leases: Leases, fetches: Fetches | None) -> None:
        self._lookup = lookup
        self._leases = leases
        self._fetches = fetches
        self.handlers: Handlers = {protocol.Get: self._get, protocol.Release: self._release}

    def _get(self, caller: Caller, message: protocol.Get) -> Answer:
        start = time.monotonic()
        answer = self._answer(caller, message)
        if isinstance(answer, Reply) and isinstance(answer.message, _TIMED):
            # For the ledger of the client's run.
            return Reply(answer.message._replace(seconds=time.monotonic() - start), answer.descriptors)
        return answer

    def _answer(self, caller: Caller, message: protocol.Get) -> Answer:
        if not is_digest(message.key):
            # No entry can have such a key, so no lease is needed either.
            return Reply(protocol.Missing(0))
        found = self._lookup.find(caller, message)
        if isinstance(found, Reply):
            return found
        if self._fetches is not None:
            fetched = self._fetches.fetch(
                caller,
                message,
                again=lambda: self._answer(caller, message),
                then=lambda rejected: self._answer_from_here(caller, message, rejected),
            )
            if fetched is not None:
                return fetched
        return self._lease(caller, message, found)

    def _answer_from_here(self, caller: Caller, message: protocol.Get, rejected: str) -> Answer:
        """Answer after the remote stores were asked; ``rejected`` says why an entry of theirs cannot be used."""
        found = self._lookup.find(caller, message)
        return found if isinstance(found, Reply) else self._lease(caller, message, found, rejected)

    def _lease(self, caller: Caller, message: protocol.Get, found: Traces, rejected: str = "") -> Answer:
        def missing(lease: int) -> protocol.Missing:
            cause, nearest = self._lookup.why_missing(caller, message, found)
            return protocol.Missing(lease, ledger.with_detail("rejected", rejected) if rejected else cause, nearest)

        return self._leases.ask(caller, message, missing)

    def _release(self, caller: Caller, message: protocol.Release) -> None:
        self._leases.release(caller, message.key, message.lease)
