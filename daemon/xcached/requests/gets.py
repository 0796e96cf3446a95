"""The requests for one entry: a look-up, which may end in a lease, and the return of a lease."""

from __future__ import annotations

import time

from xcache.wire import protocol
from xcache.wire.hashing import is_digest
from xcached.caller import Answer, Caller, Handlers, Reply
from xcached.requests.leases import Leases
from xcached.requests.lookup import Lookup


class Gets:
    """Hands out the entry, or else the lease to make it."""

    def __init__(self, lookup: Lookup, leases: Leases) -> None:
        self._lookup = lookup
        self._leases = leases
        self.handlers: Handlers = {protocol.Get: self._get, protocol.Release: self._release}

    def _get(self, caller: Caller, message: protocol.Get) -> Answer:
        start = time.monotonic()
        answer = self._answer(caller, message)
        if isinstance(answer, Reply) and isinstance(answer.message, protocol.Found | protocol.Missing):
            # For the ledger of the client's run.
            said = answer.message._replace(seconds=round(time.monotonic() - start, 6))
            return answer._replace(message=said)
        return answer

    def _answer(self, caller: Caller, message: protocol.Get) -> Answer:
        if not is_digest(message.key):
            # No entry can have such a key, so no lease is needed either.
            return Reply(protocol.Missing(0))
        found = self._lookup.find(caller, message)
        if isinstance(found, Reply):
            return found
        answer = self._leases.ask(caller, message)
        if not isinstance(answer, Reply) or not isinstance(answer.message, protocol.Missing):
            return answer
        cause, nearest = self._lookup.why_missing(caller, message, found)
        return Reply(answer.message._replace(cause=cause, nearest=nearest))

    def _release(self, caller: Caller, message: protocol.Release) -> None:
        self._leases.release(caller, message.key, message.lease)
