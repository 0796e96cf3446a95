"""The time that a program may lose to its daemon: waits that overlap cost it once, and hits cost nothing."""

from __future__ import annotations

import pytest

from xcache.client import breaker


@pytest.fixture
def allowance(clock):
    """The allowance of a client with a timeout of ten seconds; the clock fixture makes them pass at once."""
    return breaker.Breaker(10.0)


def test_threads_that_wait_together_lose_nothing_to_hits_and_only_their_own_time_to_misses(allowance, clock):
    hit, miss = allowance.begin(), allowance.begin()
    clock.ahead += 2.0
    allowance.end(hit, 2.0)
    clock.ahead += 1.0
    allowance.end(miss, 3.0)
    assert allowance.lost == pytest.approx(3.0, abs=0.1)
    allowance.refund(hit, hit.charged)
    assert allowance.lost == pytest.approx(3.0, abs=0.1)
    allowance.refund(miss, miss.charged)
    assert allowance.lost == pytest.approx(0.0, abs=0.1)
    assert allowance.left() == pytest.approx(10.0, abs=0.1)


def test_waits_together_cost_their_time_although_short_waits_go_on_all_the_time(allowance, clock):
    begun = allowance.begin()

    def pass_time(seconds: float) -> None:
        nonlocal begun
        for _ in range(round(seconds / 0.005)):
            clock.ahead += 0.005
            following = allowance.begin()
            allowance.end(begun, 0.005)
            begun = following

    pass_time(1.0)
    together = [allowance.begin() for _ in range(8)]
    pass_time(0.3)
    for wait in together:
        allowance.end(wait, 0.3)
    pass_time(4.0)
    allowance.charge(0.02)
    assert allowance.lost == pytest.approx(0.32, abs=0.1)


def test_a_refund_leaves_what_others_waited_at_the_same_time(allowance, clock):
    hit = allowance.begin()
    clock.ahead += 1.0
    miss = allowance.begin()
    clock.ahead += 1.0
    allowance.end(miss, 1.0)
    clock.ahead += 1.0
    allowance.end(hit, 3.0)
    assert allowance.lost == pytest.approx(3.0, abs=0.1)
    allowance.refund(hit, 2.5)
    # The half second that was not refunded, and the second of the miss.
    assert allowance.lost == pytest.approx(1.5, abs=0.1)


def test_a_thread_that_begins_to_wait_while_others_wait_may_wait_only_for_what_they_leave(allowance, clock):
    first = allowance.begin()
    clock.ahead += 6.0
    second = allowance.begin()
    assert 6.0 + second.seconds < 10.0
    allowance.end(first, 6.0)
    allowance.end(second, 0.001)
    assert allowance.lost == pytest.approx(6.0, abs=0.1)


def test_a_wait_whose_end_was_never_seen_is_over_when_its_time_is_up(allowance, clock):
    """An exception of the program's, raised anywhere, can prevent that it is seen."""
    allowance.begin()
    clock.ahead += 5.0
    assert allowance.left() < 6.0
    clock.ahead += 5.0
    assert allowance.left() == 10.0
    allowance.charge(1.0)
    assert allowance.lost == 1.0
