"""The trace of a run is sound: of the Trace Event Format, with slices that nest on each thread."""

from __future__ import annotations

import json
from typing import Any

from support.traces import check

from xcache.cli.trace import _events as events
from xcache.start_up import Run
from xcache.wire import ledger
from xcache.wire.ledger import Row


def row(*spans: tuple[str, float, float, str], outcome: str = ledger.HIT, name: str = "jit_f") -> Row:
    return Row(0, name, "", "", "k", outcome, "", "", "", json.dumps(spans))


def of(*rows: Row) -> dict[str, Any]:
    run = Run("a" * 16, 0, 7, "train.py", {"hook": "0.5"}, 0.0, 9.0, 9.0)
    return {"traceEvents": events(run, list(rows)), "displayTimeUnit": "ms"}


def test_threads_of_one_name_whose_work_overlaps_have_lines_of_their_own():
    ahead = ledger.LOADING_AHEAD
    document = of(
        row(("load", 1.0, 0.5, ahead), ("lookup", 2.0, 0.1, "MainThread"), ("daemon", 2.02, 0.06, ledger.DAEMON)),
        row(("load", 1.2, 0.5, ahead)),
        row(("load", 1.4, 0.1, ahead), outcome=ledger.UNUSED, name=""),
    )
    check(document)
    names = {event["tid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    found = {(names[event["tid"]], event["name"]) for event in document["traceEvents"] if event["ph"] == "X"}
    assert found == {
        ("MainThread", "start and imports"),
        ("MainThread", "lookup jit_f"),
        ("xcached", "daemon jit_f"),
        ("xcache-prefetch", "load jit_f"),
        ("xcache-prefetch (2)", "load jit_f"),
        ("xcache-prefetch (3)", "load not asked for"),
    }


def test_the_daemon_is_a_process_of_its_own():
    document = of(row(("lookup", 2.0, 0.1, "MainThread"), ("daemon", 2.02, 0.06, ledger.DAEMON)))
    (daemon,) = (event for event in document["traceEvents"] if event["name"] == "daemon jit_f")
    assert daemon["pid"] != 7


def test_ends_are_rounded_so_that_slices_still_nest():
    document = of(row(("trace", 1.0000004, 0.0000012, "MainThread"), ("lower", 1.0000014, 0.0000002, "MainThread")))
    check(document)
