"""The simulator: the same for the same seed, and a bound that nobody exceeds."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_bound import most_saved
from simulate_policies import POLICIES, replay
from simulate_traces import MADE_UP, Makers, Request, make
from support.places import REPOSITORY

objects = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 50)), min_size=3, max_size=3)
orders = st.lists(st.integers(0, 2), min_size=1, max_size=9)


def requests_of(objects, order) -> list[Request]:
    return [Request(str(n), objects[n][0], float(objects[n][1])) for n in order]


def best(requests: list[Request], capacity: int) -> float:
    """Return the most that any policy could save, even one that knows the future."""
    last: dict[str, int] = {}
    kept = []
    for at, request in enumerate(requests):
        if request.key in last:
            kept.append((last[request.key], at, request.size, request.seconds))
        last[request.key] = at

    def fits(chosen) -> bool:
        return all(
            sum(size for begin, end, size, _ in chosen if begin <= at < end) <= capacity for at in range(len(requests))
        )

    ways = itertools.chain.from_iterable(itertools.combinations(kept, count) for count in range(len(kept) + 1))
    return max(sum(seconds for *_, seconds in way) for way in ways if fits(way))


@settings(max_examples=60)
@given(objects, orders, st.integers(1, 40))
def test_nobody_saves_more_than_the_bound(objects, order, capacity):
    requests = requests_of(objects, order)
    bound = most_saved(requests, capacity) + 1e-6
    assert best(requests, capacity) <= bound
    for policy in POLICIES.values():
        assert replay(requests, capacity, policy).saved <= bound


@given(objects, orders)
def test_with_room_for_everything_everybody_saves_all_there_is(objects, order):
    requests = requests_of(objects, order)
    saved = sum(request.seconds for request in requests) - sum({r.key: r.seconds for r in requests}.values())
    assert abs(most_saved(requests, 1000) - saved) < 1e-6
    for policy in POLICIES.values():
        assert abs(replay(requests, 1000, policy).saved - saved) < 1e-6


@pytest.mark.parametrize("name", MADE_UP)
def test_made_up_requests_follow_from_the_seed(name):
    some = list(itertools.islice(MADE_UP[name](Makers("1")), 3000))
    assert some == list(itertools.islice(MADE_UP[name](Makers("1")), 3000))
    assert some != list(itertools.islice(MADE_UP[name](Makers("2")), 3000))


@pytest.mark.thorough
@pytest.mark.slow
def test_the_policy_that_is_used_saves_more_than_lru_and_lfu():
    """This tests two kinds of traces together; docs/eviction.md has all of them."""
    saved = dict.fromkeys(("LRU", "LFU", "xcache"), 0.0)
    for name in ("scans", "shifting"):
        requests = make(name, 1)
        capacity = sum({request.key: request.size for request in requests}.values()) // 10
        for policy in saved:
            saved[policy] += replay(requests, capacity, POLICIES[policy]).saved
    assert saved["xcache"] > 1.05 * saved["LRU"]
    assert saved["xcache"] > 1.1 * saved["LFU"]


def simulate(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Return what the simulator prints when scripts/simulate runs it."""
    return subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / "simulate_tables.py", *arguments],
        env={"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'daemon'}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_an_unknown_kind_is_refused_in_one_line():
    done = simulate("no-such-kind")
    assert (done.returncode, done.stdout) == (2, "")
    assert "invalid choice: 'no-such-kind'" in done.stderr.splitlines()[-1]
