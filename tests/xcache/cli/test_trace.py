"""The trace of a run is sound: of the Trace Event Format, with slices that nest on each thread."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from xcache.cli.trace import _events as events
from xcache.start_up import Run
from xcache.wire import ledger
from xcache.wire.ledger import Row


def check(document: Mapping[str, Any]) -> None:
    """Check a trace against the part of the format that it uses.

    Viewers drop slices that overlap on one thread without one lying within the other.
    """
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    named: dict[tuple[int, int], str] = {}
    processes = set()
    slices: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in document["traceEvents"]:
        assert (type(event["pid"]), type(event["tid"]), type(event["name"])) == (int, int, str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            if event["name"] == "thread_name":
                named[event["pid"], event["tid"]] = event["args"]["name"]
            else:
                processes.add(event["pid"])
        else:
            assert event["ph"] == "X"
            assert (type(event["ts"]), type(event["dur"])) == (int, int)
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert all(type(value) is str for value in event["args"].values())
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(slices) <= set(named)
    assert {process for process, _ in slices} <= processes
    assert len(set(named.values())) == len(named)
    for each in slices.values():
        assert_nested(each)


def assert_nested(slices: Iterable[tuple[int, int]]) -> None:
    around: list[int] = []
    for start, end in sorted(slices, key=lambda each: (each[0], -each[1])):
        while around and around[-1] <= start:
            around.pop()
        assert not around or end <= around[-1]
        around.append(end)


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
