"""The requests about what a program would find, before it runs: by its user's rights, and without side effects."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from xcache.wire import commands, protocol
from xcache.wire.commands import HERE, MISSING
from xcache.wire.hashing import is_digest
from xcached.caller import Answer, Caller, Handlers, Reply, Work
from xcached.requests.lookup import Lookup

if TYPE_CHECKING:
    from xcached.tiers.sharing import Sharing

_NO_KEYS = protocol.Refused("protocol error", f"a key is malformed, or there are more than {commands.MAX_KEYS}")


class PresenceRequests:
    """Looks keys up as for a program, and has the tiers asked for the rest."""

    def __init__(self, lookup: Lookup, sharing: Sharing | None) -> None:
        self._lookup = lookup
        self._sharing = sharing
        self._asking: dict[Caller, list[Future[protocol.Message]]] = {}
        self.handlers: Handlers = {commands.AskPresence: self._ask, commands.Fetch: self._fetch}

    def _ask(self, caller: Caller, message: commands.AskPresence) -> Work:
        found = yield from self._found_here(caller, message.keys)
        if found is None or self._sharing is None:
            return _answer(found)
        return self._asked(caller, self._sharing.presence.ask(caller.uid, message.keys, found, message.seconds))

    def _fetch(self, caller: Caller, message: commands.Fetch) -> Work:
        found = yield from self._found_here(caller, message.keys)
        if found is None or self._sharing is None:
            return _answer(found)
        return self._asked(caller, self._sharing.presence.fetch(caller.uid, message.keys, found, message.seconds))

    def _asked(self, caller: Caller, answer: Future[protocol.Message]) -> Answer:
        """Have a request end with its connection."""
        if self._give_up not in caller.at_end:
            caller.at_end.append(self._give_up)
        self._asking[caller] = [other for other in self._asking.get(caller, ()) if not other.done()] + [answer]
        return answer

    def _give_up(self, caller: Caller) -> None:
        for answer in self._asking.pop(caller, ()):
            answer.cancel()

    def _found_here(self, caller: Caller, keys: list[str]) -> Generator[None, None, list[list[str]] | None]:
        """Return how each key is here, as in ``Presence.entries``; None if that is too much to ask."""
        if len(keys) > commands.MAX_KEYS or not all(map(is_digest, keys)):
            return None
        found = []
        for key in keys:
            reason = self._lookup.why_not_here(caller, key)
            found.append([HERE, "", ""] if reason is None else [MISSING, "", reason])
            yield
        return found


def _answer(found: list[list[str]] | None) -> Answer:
    return Reply(_NO_KEYS if found is None else commands.Presence(found, {}))
