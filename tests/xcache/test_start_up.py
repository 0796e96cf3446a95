"""The sums over a ledger count no second twice."""

from __future__ import annotations

import json

import pytest

from xcache import start_up
from xcache.wire.ledger import HIT, MISS, UNUSED, Row


def row(*spans: tuple[str, float, float, str], outcome: str = MISS) -> Row:
    return Row(0, "jit_step", "", "", "", outcome, "", "", "", json.dumps(spans))


def test_a_program_that_is_compiled_while_another_is_traced_counts_once():
    rows = [
        row(("trace", 1.0, 5.0, "MainThread"), ("compile", 6.0, 2.0, "MainThread")),
        row(("trace", 2.0, 0.5, "MainThread"), ("compile", 2.5, 1.0, "MainThread")),
    ]
    assert start_up.seconds_of(rows) == pytest.approx({"trace": 4.0, "compile": 3.0})


def test_threads_of_xcache_work_beside_the_program():
    rows = [row(("load", 0.0, 9.0, "xcache-prefetch"), ("key", 1.0, 0.5, "MainThread"), outcome=HIT)]
    assert start_up.seconds_of(rows) == {"key": 0.5}
    assert start_up.ready_after(rows) == 1.5


def test_two_threads_of_the_program_count_each():
    rows = [row(("compile", 0.0, 2.0, "MainThread")), row(("compile", 0.0, 3.0, "worker"))]
    assert start_up.seconds_of(rows) == {"compile": 5.0}


def test_spans_that_overlap_do_not_count_for_less_than_nothing():
    rows = [row(("trace", 0.0, 1.0, "MainThread"), ("lower", 0.5, 2.0, "MainThread"))]
    assert all(seconds >= 0 for seconds in start_up.seconds_of(rows).values())


@pytest.mark.parametrize("spans", ["", "[", "[1]", '[["trace", "x", 1, "m"]]', "{}", "null"])
def test_spans_that_somebody_altered_count_for_nothing(spans):
    altered = row()._replace(spans=spans)
    assert start_up.spans_of(altered) == []
    assert start_up.of_row(altered)["seconds"] == 0.0


def test_a_run_without_programs_has_sums_of_nothing():
    run = start_up.Run("a", 0, 1, "p.py", {"arguments": "[", "hook": "x"}, 1.0, 2.0, None)
    found = start_up.of_run(run, "running", [])
    assert (found["ready_seconds"], found["stages"], found["outcomes"]) == (0.0, {}, {})
    assert (found["command"], found["seconds_to_hook"]) == ("p.py", 0.0)


def test_what_was_loaded_in_vain_was_not_asked_for():
    assert start_up.asked_for({HIT: 2, MISS: 1, UNUSED: 4}) == 3
