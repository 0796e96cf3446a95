"""The request for one entry's program and components, of users who may not read the store of a whole machine."""

from __future__ import annotations

from xcache.wire import commands, protocol
from xcache.wire.hashing import is_digest
from xcached.caller import Answer, Caller, Handlers, Reply
from xcached.requests.lookup import Lookup
from xcached.store.store import Store


class Programs:
    """Hands out the program of an entry to those who may load the entry, and to nobody else."""

    def __init__(self, store: Store, lookup: Lookup) -> None:
        self._store = store
        self._lookup = lookup
        self.handlers: Handlers = {commands.AskProgram: self._program}

    def _program(self, caller: Caller, message: commands.AskProgram) -> Answer:
        nothing = Reply(protocol.Refused("no entry", "there is no such entry that you may load"))
        hits = self._lookup.readable(caller, message.key) if is_digest(message.key) else []
        found = self._store.reader.program_of(message.key, hits[0].writer_uid) if hits else None
        if found is None:
            return nothing
        if found.content is not None:
            return Reply(found)
        place = self._store.files.open(found.blob)
        return nothing if place is None else Reply(found, (place.descriptor,))
