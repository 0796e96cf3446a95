"""The requests about runs: programs record them, commands list them."""

from __future__ import annotations

import os
import signal
from typing import Any

from xcache.wire import commands, ledger, protocol
from xcache.wire.hashing import is_digest
from xcached.caller import Answer, Caller, Handlers, Reply
from xcached.requests.process_ends import ProcessEnd, ProcessEnds
from xcached.requests.trust import Trust
from xcached.requests.watchers import Watchers
from xcached.store.ledger import Ledger
from xcached.store.writer import WriterThread


class RunRequests:
    """Has the writer thread keep the ledgers of runs, and list those that a user may see."""

    def __init__(
        self, ledger: Ledger, writer: WriterThread, trust: Trust, watchers: Watchers, endings: ProcessEnds
    ) -> None:
        self._ledger = ledger
        self._endings = endings
        self._writer = writer
        self._trust = trust
        self._watchers = watchers
        self.handlers: Handlers = {
            protocol.RecordRun: self._record,
            commands.AskRuns: self._list,
            commands.AskLedger: self._list_rows,
        }

    def leave(self, caller: Caller) -> None:
        """Note how a process ended that has not said that it would end, if the kernel says so."""
        process, run = caller.process, caller.process.run
        if not run or process.connections:
            return
        process.run = ""

        def note(_: ProcessEnd, status: int | None) -> None:
            if status is not None:
                self._writer.note(lambda: self._ledger.note_end(caller.uid, run, _killed_by(status)), caller.uid)

        self._endings.tell_status(process, note)

    def _list(self, caller: Caller, message: commands.AskRuns) -> Answer:
        uid, before = self._trust.visible_to(caller.uid), _row_number(message.before)
        return self._writer.call(lambda: self._ledger.runs(uid, before), caller.uid)

    def _list_rows(self, caller: Caller, message: commands.AskLedger) -> Answer:
        uid = self._trust.visible_to(caller.uid)
        asked = commands.AskLedger(_row_number(message.run), _row_number(message.position))
        return self._writer.call(lambda: self._ledger.rows(uid, asked), caller.uid)

    def _record(self, caller: Caller, message: protocol.RecordRun) -> Answer:
        rows = [_row(fields) for fields in message.rows]
        sound = [row for row in rows if row is not None]
        if len(sound) != len(rows) or len(rows) > ledger.MAX_SENT_ROWS or not _is_run(message):
            return Reply(protocol.Refused("protocol error", "the ledger of the run is malformed"))
        self._watchers.note_rows(caller, message.run, sound)
        program = caller.program[: protocol.MAX_NAME]
        caller.process.run = "" if message.ended else message.run
        self._endings.watch(caller.process)
        return self._writer.call(
            lambda: self._ledger.record(caller.uid, caller.pid, program, message, sound), caller.uid
        )


def _killed_by(status: int) -> str:
    """Return the name of the signal that ended a process; empty if it exited."""
    if not os.WIFSIGNALED(status):
        return ""
    number = os.WTERMSIG(status)
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


def _row_number(number: int) -> int:
    """Return a number that SQLite can hold; a message may have any."""
    return max(0, min(number, 2**62))


def _is_run(message: protocol.RecordRun) -> bool:
    return (
        len(message.run) == 16
        and message.run.isalnum()
        and len(message.facts) <= ledger.MAX_FACTS
        and all(len(name) <= 40 and len(text) <= ledger.MAX_FACT for name, text in message.facts.items())
        and abs(message.began_at) < 1e12
    )


def _row(fields: list[Any]) -> ledger.Row | None:
    """Return the row that has these fields, or None if there can be no such row."""
    if len(fields) != len(ledger.Row._fields):
        return None
    position, *texts = row = ledger.Row(*fields)
    sound = (
        type(position) is int
        and 0 <= position < ledger.MAX_ROWS
        and all(type(text) is str and len(text) <= ledger.MAX_TEXT for text in texts)
        and all(not key or is_digest(key) for key in (row.key, row.nearest))
    )
    return row if sound else None
