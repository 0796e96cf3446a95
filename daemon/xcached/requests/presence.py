"""The requests about what a program would find, before it runs: by its user's rights, and without side effects."""

from __future__ import annotations

from collections.abc import Generator
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
        self.handlers: Handlers = {commands.AskPresence: self._ask, commands.Fetch: self._fetch}

    def _ask(self, caller: Caller, message: commands.AskPresence) -> Work:
        found = yield from self._found_here(caller, message.keys)
        if found is None or self._sharing is None:
            return _answer(found)
        return self._sharing.presence.ask(message.keys, found, message.seconds)

    def _fetch(self, caller: Caller, message: commands.Fetch) -> Work:
        found = yield from self._found_here(caller, message.keys)
        if found is None or self._sharing is None:
            return _answer(found)
        return self._sharing.presence.fetch(message.keys, found, message.seconds)

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
