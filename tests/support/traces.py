"""The part of the Trace Event Format that ``xcache trace`` uses, as a check."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any


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
        _check_nesting(each)


def _check_nesting(slices: Iterable[tuple[int, int]]) -> None:
    around: list[int] = []
    for start, end in sorted(slices, key=lambda each: (each[0], -each[1])):
        while around and around[-1] <= start:
            around.pop()
        assert not around or end <= around[-1]
        around.append(end)
