"""The worth of entries, and evictions: no more than needed, the least worth first."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from xcached.store.eviction import Candidate, Excess, Usage, choose, time_passed, used, worth

sizes = st.lists(st.integers(0, 100))
uses = st.floats(0, 1e6)
times = st.floats(0, 1e6)
seconds = st.floats(0, 1e6)
bytes_of_one = st.integers(0, 2**40)


@given(sizes, st.integers(-10, 500), st.integers(-2, 20))
def test_the_first_go_and_no_more_than_needed(sizes, too_large, too_many):
    candidates = [Candidate(str(n), size) for n, size in enumerate(sizes)]
    chosen = choose(candidates, Excess(too_large, too_many))
    assert chosen == [candidate.subject for candidate in candidates[: len(chosen)]]
    freed = sum(sizes[: len(chosen)])
    assert (freed >= too_large and len(chosen) >= too_many) or len(chosen) == len(candidates)
    # The last one was needed as well.
    assert not chosen or freed - sizes[len(chosen) - 1] < too_large or len(chosen) - 1 < too_many


@given(sizes, st.integers(1, 500))
def test_no_more_candidates_are_looked_at_than_go(sizes, excess):
    looked_at = []

    def candidates():
        for n, size in enumerate(sizes):
            looked_at.append(str(n))
            yield Candidate(str(n), size)

    assert choose(candidates(), Excess(excess)) == looked_at


def test_a_shared_program_is_free_with_the_last_entry_that_has_it():
    candidates = [Candidate(name, 10, "shared", 100, 2) for name in "abc"]
    assert choose(candidates, Excess(50)) == ["a", "b"]
    assert choose(candidates, Excess(121)) == ["a", "b", "c"]


@given(uses, times, seconds, bytes_of_one)
def test_whatever_is_known_has_a_worth(uses, time, seconds, size):
    assert math.isfinite(worth(Usage(uses, time), seconds, size))


@given(st.floats(1, 1e6), times, st.floats(0.1, 1e5), st.integers(0, 10**9), st.floats(0, 100), st.integers(1, 100))
def test_a_use_makes_it_worth_more(before, time, seconds, size, later, often):
    usage = Usage(before, time)
    assert worth(used(usage, time + later, often), seconds, size) > worth(usage, seconds, size)


@given(st.lists(st.tuples(st.floats(1, 1e4), st.floats(0, 50), st.floats(0.1, 1e4), bytes_of_one), min_size=2))
def test_unused_entries_keep_their_order_however_much_time_goes_by(rows):
    """The order in the index equals the order by expected use at any time, because all uses halve alike."""

    def by_expected_use(now: float) -> list[float]:
        return [worth(Usage(uses * 2 ** (time - now), now), seconds, size) for uses, time, seconds, size in rows]

    kept = [worth(Usage(uses, time), seconds, size) for uses, time, seconds, size in rows]
    for now in (60.0, 90.0):
        assert all(abs(one - other) < 1e-6 for one, other in zip(kept, by_expected_use(now), strict=True))


def test_long_compiles_are_worth_more_and_large_entries_less():
    usage = Usage(1, 0)
    assert worth(usage, 10.0, 100_000) > worth(usage, 1.0, 100_000)
    assert worth(usage, 1.0, 100_000) > worth(usage, 1.0, 10_000_000)


def test_an_entry_that_loads_as_slowly_as_it_compiles_is_worth_next_to_nothing():
    usage = Usage(1, 0)
    assert worth(usage, 1.0, 140_000_000) < worth(usage, 2.0, 140_000_000) - 3


def test_a_use_counts_half_after_some_requests_for_each_entry():
    now = sum(time_passed(1000) for _ in range(4000))
    assert abs(now - 1) < 1e-6
    assert used(Usage(8, 0), now).uses == 1 + 8 * 2**-now


def test_time_that_seems_to_go_back_makes_nothing_worth_more():
    """A store whose clock was lost has uses of what is a later time."""
    assert used(Usage(3, 100.0), 1.0) == Usage(4, 1.0)
