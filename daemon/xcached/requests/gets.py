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
        of_remotes = ""
        if self._fetches is not None:
            fetched = self._fetches.fetch(
                caller,
                message,
                again=lambda: self._answer(caller, message),
                then=lambda of_remotes: self._answer_from_here(caller, message, of_remotes),
            )
            if not isinstance(fetched, str):
                return fetched
            of_remotes = fetched
        return self._lease(caller, message, found, of_remotes)

    def _answer_from_here(self, caller: Caller, message: protocol.Get, of_remotes: str) -> Answer:
        """Answer after the remote stores were asked."""
        found = self._lookup.find(caller, message)
        return found if isinstance(found, Reply) else self._lease(caller, message, found, of_remotes)

    def _lease(self, caller: Caller, message: protocol.Get, found: Traces, of_remotes: str) -> Answer:
        """Answer that there is no entry; ``of_remotes`` is what the remote stores are to blame for it."""

        def missing(lease: int) -> protocol.Missing:
            cause, nearest = self._lookup.why_missing(caller, message, found)
            return protocol.Missing(lease, _with_remotes(cause, of_remotes), nearest)

        return self._leases.ask(caller, message, missing)

    def _release(self, caller: Caller, message: protocol.Release) -> None:
        self._leases.release(caller, message.key, message.lease)


def _with_remotes(cause: str, of_remotes: str) -> str:
    """Return the cause of a miss here, and what remote stores are to blame for."""
    if ledger.kinds_of(of_remotes) == ["rejected"]:
        # That is the entry which was asked for, so nothing else matters but trouble with the one that was here.
        return cause if cause in ("unusable", "set aside") else of_remotes
    return f"{cause}; {of_remotes}" if of_remotes and cause in ("new", "other program") else cause
