"""Programs record their runs; what is malformed is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.conversation import talking
from support.places import until

from xcache.wire import commands, ledger, protocol

RUN = "0123456789abcdef"
ROW = [0, "jit_step", "train.py:1", "f32[8]", "ab" * 32, "miss", "new", "yes", "", "[]"]


def message(**changes: object) -> protocol.RecordRun:
    return protocol.RecordRun(RUN, 1.0, False, {"directory": "/home"}, [ROW])._replace(**changes)


@pytest.fixture
def talk(place):
    place.start_daemon()
    with talking(place) as conversation:
        yield conversation


def test_a_run_is_recorded_and_listed(place, talk):
    assert talk.ask(message()) == protocol.Done()
    assert talk.ask(message(ended=True, rows=[])) == protocol.Done()
    (run,) = talk.ask(commands.AskRuns(0)).runs
    assert run["run"] == RUN
    assert run["ended_at"] is not None
    assert talk.ask(commands.AskLedger(run["id"], 0)).rows == [ROW]


def test_numbers_beyond_what_sqlite_holds_find_nothing(talk):
    assert talk.ask(message()) == protocol.Done()
    assert talk.ask(commands.AskLedger(2**63, -5)).rows == []
    assert len(talk.ask(commands.AskRuns(2**63)).runs) == 1


RECORDING = """
import os, signal, subprocess, sys
from xcache.client.client import Client
from xcache.config import config
from xcache.wire import protocol
client = Client(config.load(), "0.0.0", None)
client.record_run(protocol.RecordRun("0123456789abcdef", 1.0, False, {"directory": "/home"}, []))
"""


@pytest.mark.parametrize(
    ("end", "killed_by"),
    [
        ("os._exit(0)", None),
        ("os._exit(3)", None),
        ("client.note_at_the_end(protocol.RecordRun('0123456789abcdef', 1.0, True, {}, [])); os._exit(0)", None),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", "signal 35"),
    ],
)
def test_how_a_process_ended_is_as_the_kernel_says(place, talk, end, killed_by):
    place.run(RECORDING + end)

    def run():
        (found,) = talk.ask(commands.AskRuns(0)).runs
        return found

    if not until(lambda: run()["ended_at"] is not None):
        assert not knows_afterwards()
        return
    assert json.loads(run()["facts"]).get("killed_by") == killed_by
    (size,) = place.query("SELECT size - length(CAST(run || program || facts AS BLOB)) FROM runs")[0]
    place.run(RECORDING.replace("0123", "4567"))
    sizes = place.query("SELECT size - length(CAST(run || program || facts AS BLOB)) FROM runs")
    assert sizes == [(size,)] * 2


def test_a_process_that_only_closed_its_connection_has_not_ended(place, talk):
    closing = "client.close(); print(sys.stdin.readline())"
    with subprocess.Popen(
        [sys.executable, "-c", RECORDING + closing], env=place.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert until(lambda: talk.ask(commands.AskRuns(0)).runs)
        # The daemon answers in the order in which it learns of things.
        assert talk.ask(commands.Sync()) == protocol.Done()
        assert talk.ask(commands.AskRuns(0)).runs[0]["ended_at"] is None
        child.communicate(b"\n")


def knows_afterwards() -> bool:
    release = os.uname().release.split(".")
    return tuple(int("".join(filter(str.isdigit, each)) or 0) for each in release[:2]) >= (6, 15)


MALFORMED = [
    {"run": "short"},
    {"run": "x" * 15 + "/"},
    {"began_at": float("inf")},
    {"began_at": float("nan")},
    {"facts": {str(number): "" for number in range(ledger.MAX_FACTS + 1)}},
    {"facts": {"name": "x" * (ledger.MAX_FACT + 1)}},
    {"rows": [ROW[:-1]]},
    {"rows": [["0", *ROW[1:]]]},
    {"rows": [[ledger.MAX_ROWS, *ROW[1:]]]},
    {"rows": [[-1, *ROW[1:]]]},
    {"rows": [[*ROW[:3], 5, *ROW[4:]]]},
    {"rows": [[*ROW[:4], "no digest", *ROW[5:]]]},
    {"rows": [[*ROW[:9], "x" * (ledger.MAX_TEXT + 1)]]},
    {"rows": [ROW] * (ledger.MAX_SENT_ROWS + 1)},
]


def test_a_malformed_run_is_refused(talk):
    for changes in MALFORMED:
        answer = talk.ask(message(**changes))
        assert isinstance(answer, protocol.Refused), repr(changes)[:200]
        assert answer.kind == "protocol error"
        assert talk.ask(commands.AskRuns(0)).runs == []


def test_every_run_is_listed_however_long_its_texts_are(talk):
    """A character takes up to four bytes in a message, and twelve in JSON."""
    wide = "\N{GRINNING FACE}"
    facts = {f"fact {number}": wide * ledger.MAX_FACT for number in range(ledger.MAX_FACTS - 1)} | {
        "directory": "/home"
    }
    rows = [[number, *[wide * ledger.MAX_TEXT] * 3, "ab" * 32, "miss", "", "", "", "[]"] for number in range(60)]
    for part in range(0, 60, 10):
        assert talk.ask(message(facts=facts, rows=rows[part : part + 10])) == protocol.Done()
    for number in range(99):
        few = {"long": wide * 1300, "directory": "/home"}
        assert talk.ask(message(run=f"{number:016}", facts=few, rows=[])) == protocol.Done()
    runs, before = [], 0
    while found := talk.ask(commands.AskRuns(before)).runs:
        runs += found
        before = found[-1]["id"]
    assert len(runs) == 100
    assert all(json.loads(run["facts"])["directory"] == "/home" for run in runs)
    listed = []
    while found := talk.ask(commands.AskLedger(before, len(listed))).rows:
        listed += found
    assert listed == rows
