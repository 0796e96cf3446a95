"""Counters: nothing is lost or told twice, whichever thread counts."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcache.counters import Counting
from xcache.statistics import Statistics

# The client keeps account of the lost seconds itself.
COUNTERS = [
    name
    for name, field in Statistics.__dataclass_fields__.items()
    if field.type in ("int", "float") and name != "lost_seconds"
]
EVENTS = st.one_of(
    st.sampled_from(COUNTERS).map(lambda name: ("add", name)),
    st.sampled_from(["callback", "too: strange", ""]).map(lambda reason: ("uncacheable", reason)),
    st.sampled_from(["connection lost", "a:b"]).map(lambda kind: ("error", kind)),
    st.sampled_from(["later"]).map(lambda reason: ("reclassify_miss", reason)),
    st.just(("take_unreported", "")),
)


@given(st.lists(EVENTS))
def test_the_totals_are_the_sum_of_what_was_told_and_what_was_not(events):
    counting, told = Counting(), {}
    for call, argument in [*events, ("take_unreported", "")]:
        if call == "take_unreported":
            for name, amount in counting.take_unreported().items():
                told[name] = told.get(name, 0) + amount
        elif call == "add":
            counting.add(**{argument: 1})
        else:
            getattr(counting, call)(argument)
    assert counting.take_unreported() == {}
    total = counting.snapshot()
    for name in COUNTERS:
        assert getattr(total, name) == told.get(name, 0)
    for group in ("uncacheable", "errors"):
        expected = {name.partition(":")[2]: n for name, n in told.items() if name.startswith(f"{group}:")}
        assert getattr(total, group) == expected


def test_every_request_ends_one_way():
    counting = Counting()
    for _ in range(3):
        counting.add(requests=1)
        counting.add(misses=1)
    counting.reclassify_miss("cannot be serialized", "new")
    counting.uncacheable("python callback")
    counting.add(requests=1)
    counting.add(hits=1, saved_seconds=0.5)
    counting.lowering("skipped")
    total = counting.snapshot()
    assert total.requests == total.hits + total.misses + sum(total.uncacheable.values()) == 5
    assert str(total) == (
        "1 hit, 2 misses, 0.5 s saved; lowerings: 1 skipped; uncacheable: 1 cannot be serialized, 1 python callback"
    )


def test_a_snapshot_does_not_change():
    counting = Counting()
    counting.error("x")
    before = counting.snapshot()
    counting.error("x")
    assert before.errors == {"x": 1}
    with pytest.raises(AttributeError):
        before.hits = 5


def test_eight_threads_count_and_one_tells():
    counting, told = Counting(), []
    gate = threading.Barrier(9)

    def count() -> None:
        gate.wait()
        for _ in range(2000):
            counting.add(requests=1, load_seconds=0.5)
            counting.error("x")

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    gate.wait()
    while any(thread.is_alive() for thread in threads):
        told.append(counting.take_unreported())
        assert counting.snapshot().requests >= sum(part.get("requests", 0) for part in told)
    told.append(counting.take_unreported())
    assert counting.snapshot().requests == sum(part.get("requests", 0) for part in told) == 16000
    assert counting.snapshot().errors == {"x": sum(part.get("errors:x", 0) for part in told)} == {"x": 16000}
    assert counting.snapshot().load_seconds == 8000.0
