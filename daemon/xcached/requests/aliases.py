"""The requests about aliases: which program a jaxpr of a certain structure was lowered to."""

from __future__ import annotations

from xcache.wire import protocol
from xcache.wire.checks import alias_of
from xcached.caller import Answer, Caller, Handlers, Reply
from xcached.requests.lookup import Lookup
from xcached.store.aliases import AliasRows
from xcached.store.writer import WriterThread


class AliasRequests:
    """Answers questions from the database at once; the writer thread makes the changes."""

    def __init__(self, rows: AliasRows, lookup: Lookup, writer: WriterThread) -> None:
        self._rows = rows
        self._lookup = lookup
        self._writer = writer
        self.handlers: Handlers = {
            protocol.AskAlias: self._ask,
            protocol.RememberAliases: self._remember,
            protocol.DropAlias: self._drop,
        }

    def _ask(self, caller: Caller, message: protocol.AskAlias) -> Answer:
        return Reply(self._lookup.alias(caller, message.structure) or protocol.NoAlias())

    def _remember(self, caller: Caller, message: protocol.RememberAliases) -> Answer:
        aliases = [alias_of(fields) for fields in message.aliases]
        sound = [alias for alias in aliases if alias is not None]
        if len(sound) != len(aliases) or len(sound) > protocol.MAX_ALIASES:
            return Reply(protocol.Refused("protocol error", "the list of aliases is malformed"))
        return self._writer.call(lambda: self._rows.remember(caller.uid, sound), caller.uid)

    def _drop(self, caller: Caller, message: protocol.DropAlias) -> Answer:
        return self._writer.call(lambda: self._rows.drop(caller.uid, message.structure), caller.uid)
