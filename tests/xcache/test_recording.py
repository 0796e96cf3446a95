"""The ledger of a process: what it notes is sent, and sent again after a failure; nothing of it stops a program."""

from __future__ import annotations

import json

from xcache.errors import UnavailableError
from xcache.recording import Ledger
from xcache.wire import ledger
from xcache.wire.ledger import Row


class Daemon:
    """Keeps the messages that it is sent, or fails."""

    def __init__(self) -> None:
        self.heard: list = []
        self.is_down = False

    def __call__(self, message) -> None:
        if self.is_down:
            raise UnavailableError("down")
        self.heard.append(message)

    def rows(self) -> list[Row]:
        return [Row(*fields) for message in self.heard for fields in message.rows]


def test_what_changed_is_sent_once_and_again_after_a_failure():
    daemon = Daemon()
    made = Ledger("on", daemon)
    with made.asking() as program:
        program.module_name = "jit_step"
        with made.stage("compile"):
            pass
    daemon.is_down = True
    made.send()
    daemon.is_down = False
    made.send()
    made.send()
    (row,) = daemon.rows()
    assert (row.module_name, row.outcome) == ("jit_step", ledger.COMPILING)
    assert [span[0] for span in json.loads(row.spans)] == ["compile"]


def test_types_that_cannot_be_printed_cost_no_row():
    daemon = Daemon()
    made = Ledger("on", daemon)

    def fail() -> str:
        raise RuntimeError("no text")

    with made.asking() as program:
        program.shapes = fail
    made.send()
    assert [row.shapes for row in daemon.rows()] == [""]


def test_the_end_is_told_once():
    daemon = Daemon()
    made = Ledger("on", daemon)
    with made.asking():
        pass
    made.mark_over()
    made.send()
    made.send()
    assert [message.ended for message in daemon.heard] == [True]


def test_a_program_within_another_has_a_row_of_its_own():
    daemon = Daemon()
    made = Ledger("on", daemon)
    with made.asking() as outer:
        with made.asking():
            made.tell(module_name="inner")
        made.tell(module_name="outer")
    assert outer.module_name == "outer"
    made.send()
    assert sorted(row.module_name for row in daemon.rows()) == ["inner", "outer"]


def test_a_load_in_vain_has_a_row_of_its_own():
    daemon = Daemon()
    made = Ledger("on", daemon)
    made.note_unused("k" * 64, 1.0, 0.5)
    made.send()
    (row,) = daemon.rows()
    assert (row.module_name, row.key, row.outcome) == ("", "k" * 64, ledger.UNUSED)
    assert [(span[0], span[2], span[3]) for span in json.loads(row.spans)] == [("load", 0.5, "xcache-prefetch")]


def test_nothing_is_kept_where_nothing_is_to_be_recorded():
    daemon = Daemon()
    made = Ledger("on", daemon, is_kept=False)
    with made.asking():
        pass
    made.mark_over()
    made.send()
    assert daemon.heard == []
