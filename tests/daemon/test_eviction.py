"""Which entries go: no more than are needed, the oldest first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from xcached.eviction import Candidate, least_recently_used

sizes = st.lists(st.integers(0, 100))


@given(sizes, st.integers(-10, 500))
def test_the_oldest_go_and_no_more_than_needed(sizes, excess):
    candidates = [Candidate(str(n), size) for n, size in enumerate(sizes)]
    chosen = least_recently_used(candidates, excess)
    assert chosen == [candidate.entry for candidate in candidates[: len(chosen)]]
    freed = sum(sizes[: len(chosen)])
    assert freed >= excess or len(chosen) == len(candidates)
    # The last one was needed as well.
    assert not chosen or freed - sizes[len(chosen) - 1] < excess


@given(sizes, st.integers(1, 500))
def test_no_more_candidates_are_looked_at_than_go(sizes, excess):
    looked_at = []

    def candidates():
        for n, size in enumerate(sizes):
            looked_at.append(str(n))
            yield Candidate(str(n), size)

    assert least_recently_used(candidates(), excess) == looked_at
