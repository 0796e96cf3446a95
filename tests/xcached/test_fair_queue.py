"""Users share a thread by the time that their work takes; one who asks for more does not get more."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import Future

import pytest
from support.stores import Shelf

from xcache.wire import protocol
from xcached.fair_queue import FairQueue

ALICE, BOB, CAROL = 1, 2, 3


def order(line: FairQueue[str], seconds: dict[int, float]) -> list[str]:
    """Everything in a line, in the order in which it is served, where each user's work takes so long."""
    served = []
    while (turn := line.take()) is not None:
        served.append(turn.item)
        line.charge(turn.user, seconds[turn.user])
    return served


def test_a_users_own_keeps_its_order_and_users_take_turns():
    line: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3"):
        line.add(ALICE, item)
    line.add(BOB, "b1")
    line.add(CAROL, "c1")
    assert order(line, dict.fromkeys((ALICE, BOB, CAROL), 1.0)) == ["a1", "b1", "c1", "a2", "a3"]


def test_jobs_ten_times_as_long_are_served_a_tenth_as_often():
    line: FairQueue[str] = FairQueue()
    for number in range(40):
        line.add(ALICE, f"a{number}")
        line.add(BOB, f"b{number}")
    served = order(line, {ALICE: 10.0, BOB: 1.0})
    assert [item for item in served[:22] if item.startswith("a")] == ["a0", "a1"]
    assert [item for item in served if item.startswith("a")] == [f"a{number}" for number in range(40)]


def test_absence_earns_nothing_and_leaving_the_line_forgives_nothing():
    line: FairQueue[str] = FairQueue()
    for number in range(100):
        line.add(ALICE, f"a{number}")
        turn = line.take()
        assert turn == (ALICE, f"a{number}")
        line.charge(ALICE, 1.0)
    # Bob was not there for 100 seconds of Alice's work; each gets half from now on.
    for number in range(4):
        line.add(ALICE, f"A{number}")
        line.add(BOB, f"b{number}")
    assert order(line, {ALICE: 1.0, BOB: 1.0}) == ["b0", "A0", "b1", "A1", "b2", "A2", "b3", "A3"]
    line.add(ALICE, "dear")
    line.take()
    line.charge(ALICE, 3.0)
    for number in range(4):
        line.add(BOB, f"b{number}")
        line.add(ALICE, f"a{number}")
    assert order(line, {ALICE: 1.0, BOB: 1.0})[:3] == ["b0", "b1", "b2"]


def test_accounts_of_those_who_have_left_are_not_kept():
    line: FairQueue[str] = FairQueue()
    for user in range(10_000):
        line.add(user, "x")
        line.take()
        line.charge(user, 1e-6)
    # All of them would take more than 100 kB.
    assert len(pickle.dumps(line)) < 20_000


@pytest.fixture
def shelved(tmp_path):
    made = Shelf(tmp_path)
    yield made
    made.close()


def test_a_flood_of_one_users_work_does_not_keep_anothers_waiting(shelved):
    """The writer does at most one more of the flood's jobs before it does the other's."""
    gate, began, done = threading.Event(), threading.Event(), []

    def hold() -> None:
        began.set()
        gate.wait(20)

    def note(who: str) -> protocol.Message:
        done.append(who)
        return protocol.Done()

    shelved.writer.call(hold, ALICE)
    assert began.wait(20)
    flood = [shelved.writer.call(lambda: note("alice"), ALICE) for _ in range(1000)]
    bobs = [shelved.writer.call(lambda: note("bob"), BOB) for _ in range(3)]
    gate.set()
    for answer in (*flood, *bobs):
        answer.result(20)
    first, *_, last = [place for place, who in enumerate(done) if who == "bob"]
    # The first is next, since Alice has paid for the wait; a machine that stands still may make one of Bob's dear.
    assert first == 0
    assert last < 500


def test_a_long_job_leaves_the_others_their_turns_and_keeps_its_users_order(shelved):
    """Clearing a store is such a job. The user's own next job comes after it, another user's in between."""
    done: list[str] = []
    gate = threading.Event()

    def steps():
        gate.wait(20)
        for number in range(3):
            done.append(f"step {number}")
            yield
        return protocol.Done()

    long = shelved.writer.call_by_steps(steps(), ALICE, in_order=True)
    behind: Future[protocol.Message] = shelved.writer.call(lambda: done.append("alice"), ALICE)
    other = shelved.writer.call(lambda: done.append("bob"), BOB)
    gate.set()
    for answer in (long, behind, other):
        answer.result(20)
    assert [item for item in done if item != "bob"] == ["step 0", "step 1", "step 2", "alice"]
    assert done.index("bob") < done.index("step 2")
