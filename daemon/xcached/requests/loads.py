"""Handles the messages about loads: one begins, one is over, an entry could not be loaded."""

from __future__ import annotations

import time
from collections.abc import Callable

from xcache.wire import protocol
from xcached.caller import Answer, Caller, Handlers, Load, Reply
from xcached.requests.process_ends import ProcessEnds
from xcached.requests.strikes import Strikes
from xcached.store.entries import EntryKey
from xcached.store.quarantine import Quarantine
from xcached.store.writer import WriterThread


class Loads:
    """Knows what each connection is loading, and passes the end of a process during a load to the strikes."""

    def __init__(
        self,
        endings: ProcessEnds,
        strikes: Strikes,
        quarantine: Quarantine,
        writer: WriterThread,
        note_use: Callable[[EntryKey], None],
    ) -> None:
        """``note_use`` notes the use of an entry that a prediction brought."""
        self._note_use = note_use
        self._endings = endings
        self._strikes = strikes
        self._quarantine = quarantine
        self._writer = writer
        self.handlers: Handlers = {
            protocol.Loading: self._begin,
            protocol.Loaded: self._end,
            protocol.Complain: self._complain,
        }

    def leave(self, caller: Caller) -> None:
        """If a connection ended during a load, judge that load when the end of the process is known."""
        load, caller.loading = caller.loading, None
        if load is not None:
            now = time.monotonic()
            self._endings.tell(caller.process, lambda ending: self._strikes.judge(load, caller, ending, now))
        if caller.process.connections == 0:
            self._endings.forget(caller.process)

    def close(self) -> None:
        """Judge nothing more, because the daemon is leaving."""
        self._endings.close()

    def _begin(self, caller: Caller, message: protocol.Loading) -> None:
        self._end_load(caller)
        # Count only entries it was given: a client that made them up could keep the writer thread busy.
        if caller.process.was_given(message.key, message.digest):
            caller.loading = Load(message.key, message.digest, time.monotonic(), message.ahead)
            if (writer := caller.process.use(message.key, message.digest)) is not None:
                self._note_use(EntryKey(message.key, writer))

    def _end(self, caller: Caller, message: protocol.Loaded) -> None:
        self._end_load(caller)

    def _end_load(self, caller: Caller) -> None:
        """Note that the process survived a load, whether or not it succeeded."""
        load, caller.loading = caller.loading, None
        if load is not None and not load.ahead:
            self._strikes.forgive(load, caller.uid)

    def _complain(self, caller: Caller, message: protocol.Complain) -> Answer:
        # A reader may complain once of each entry. Complaints of what an earlier daemon gave are ignored.
        if not caller.process.take_back(message.key, message.digest):
            return Reply(protocol.Done())
        steps = self._quarantine.examine(message.key, message.digest, caller.uid, message.reason, whole=message.whole)
        return self._writer.call_by_steps(steps, caller.uid)
