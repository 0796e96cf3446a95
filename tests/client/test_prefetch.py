"""Loading ahead: what is predicted is loaded in order on other threads, and taken over where the program is faster."""

from __future__ import annotations

import threading

import pytest
from foreseeing import DEVICES, OPTIONS, Program, SlowlyTold, two_processors
from places import until

from xcache import prefetch

__all__ = ["two_processors"]


def test_what_was_wanted_last_time_is_loaded_in_that_order_and_taken():
    program = Program("abc")
    program.prefetcher.start()
    assert until(lambda: len(program.loads) == 3)
    assert [program.take(key) for key in "abc"] == [f"executable {key}" for key in "abc"]
    assert program.loads == ["a", "b", "c"]
    assert program.questions == [None]
    # It was taken: whoever wants it again loads it.
    assert program.take("a") is None


def test_what_has_not_begun_is_left_to_the_program():
    program = Program("abc")
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    assert program.take("b") is None
    program.may_go_on.set()
    assert program.take("a") == "executable a"
    assert until(lambda: program.loads == ["a", "c"])


def test_what_is_being_loaded_is_waited_for():
    program = Program("a")
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    release = threading.Timer(0.2, program.may_go_on.set)
    release.start()
    assert program.take("a") == "executable a"
    release.join()


def test_what_takes_long_is_loaded_when_the_program_is_known_to_be_the_one_that_was_foreseen():
    program = Program("aBcD")
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a", "c"])
    assert program.take("a") == "executable a"
    assert until(lambda: program.loads == ["a", "c", "B", "D"])
    another = Program("", "xYz")
    another.prefetcher.start()
    assert another.take("x") is None
    assert until(lambda: another.loads == ["z"])
    assert another.take("z") == "executable z"
    assert until(lambda: another.loads == ["z", "Y"])


def test_what_the_program_would_have_to_wait_for_goes_before_what_is_cheap():
    # Of these only what is in lower case is loaded on trust; digits are dear.
    program = Program("ab1c", "xyY1")
    program.prefetcher.start()
    assert until(lambda: len(program.loads) == 4)
    assert program.loads == ["1", "a", "b", "c"]
    another = Program("", "xyY1")
    another.prefetcher.start()
    assert another.take("x") is None
    # Not before what has to wait itself, and would be wanted sooner.
    assert until(lambda: another.loads == ["y", "1"])
    another.take("y")
    assert until(lambda: another.loads == ["y", "1", "Y"])


def test_what_came_with_the_prediction_and_is_not_loaded_is_taken_as_it_is():
    program = Program("ab")
    program.entries = True
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    assert program.prefetcher.take("b", OPTIONS, DEVICES).digest == "entry b"
    program.may_go_on.set()
    assert program.take("a") == "executable a"
    assert program.prefetcher.take("b", OPTIONS, DEVICES) is None


def test_nothing_is_loaded_on_processors_that_others_want():
    """Who begins in a crowd has what came with the prediction, and loads it itself."""
    program = Program("ab")
    program.entries, program.beginning = True, 1000
    program.prefetcher.start()
    assert until(lambda: program.prefetcher._places)
    assert program.prefetcher.take("b", OPTIONS, DEVICES).digest == "entry b"
    assert program.prefetcher.take("a", OPTIONS, DEVICES).digest == "entry a"
    assert program.loads == []
    assert program.prefetcher.finish(20)


def test_what_nobody_may_load_and_nobody_comes_for_is_forgotten(monkeypatch):
    monkeypatch.setattr(prefetch, "_KEEP_SECONDS", 0.2)
    program = Program("ab")
    program.beginning = 1000
    program.prefetcher.start()
    assert until(lambda: program.questions and not program.prefetcher._threads)
    assert (program.prefetcher._places, program.loads, program.dropped) == ({}, [], 0)


def test_what_is_asked_while_an_answer_holds_nothing_is_asked_all_the_same():
    """As by a program that has another name now, and is known by its first key."""
    program = SlowlyTold("", "abc")
    program.prefetcher.start()
    assert program.asked.wait(20)
    assert program.take("a") is None
    program.may_be_told.set()
    assert until(lambda: program.loads == ["b", "c"])
    assert program.questions == [None, "a"]


def test_what_is_cheap_and_here_is_said_to_be_loaded_along_with_its_like():
    program = Program("ab1c")
    program.entries = True
    program.prefetcher.start()
    assert until(lambda: len(program.loads) == 4)
    assert dict(zip(program.loads, program.soon, strict=True)) == {"1": "", "a": "bc", "b": "c", "c": ""}


def test_what_has_to_be_fetched_first_is_said_to_be_loaded_alone():
    program = Program("abc")
    program.prefetcher.start()
    assert until(lambda: len(program.loads) == 3)
    assert program.soon == ["", "", ""]


def test_what_comes_along_takes_no_more_than_the_memory_that_it_may():
    program = Program("abcd", memory=2)
    program.entries = True
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    taken = [program.prefetcher.take(key, OPTIONS, DEVICES) for key in "bcd"]
    assert [entry and entry.digest for entry in taken] == ["entry b", None, None]


def test_what_came_along_and_nobody_began_with_is_let_go(monkeypatch):
    monkeypatch.setattr(prefetch, "_KEEP_SECONDS", 0.2)
    program = Program("A")
    program.entries = True
    program.prefetcher.start()
    assert until(lambda: program.prefetcher._places and program.prefetcher._places["A"].item.entry is None)
    assert (program.loads, program.dropped) == ([], 0)


def test_what_is_asked_for_again_is_no_surprise():
    program = Program("abcd")
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    assert program.take("b") is None
    assert program.take("b") is None
    assert program.take("b") is None
    program.may_go_on.set()
    assert until(lambda: program.loads == ["a", "c", "d"])
    assert program.questions == [None]


@pytest.mark.parametrize("differs", [{"options": b"others"}, {"devices": (1,)}])
def test_what_was_loaded_with_other_options_or_onto_other_devices_is_not_taken(differs):
    program = Program("a")
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    assert program.take("a", **differs) is None


def test_what_could_not_be_loaded_is_left_to_the_program():
    program = Program("!a")
    program.prefetcher.start()
    assert until(lambda: program.loads == ["!", "a"])
    assert program.take("!") is None
    assert program.take("a") == "executable a"


def test_what_is_taken_wakes_nobody_who_has_nothing_to_do(monkeypatch):
    """A thread that is woken wants the interpreter, which the program needs for itself."""
    program = Program("abcd")
    program.prefetcher.start()
    assert until(lambda: len(program.loads) == 4)
    assert program.take("a") == "executable a"
    woken, notify_all = [], program.prefetcher._changed.notify_all
    monkeypatch.setattr(program.prefetcher._changed, "notify_all", lambda: woken.append(True))
    assert [program.take(key) for key in "bc"] == ["executable b", "executable c"]
    assert woken == []
    # With the last one there is nothing left to wait for.
    assert program.take("d") == "executable d"
    assert woken == [True]
    monkeypatch.setattr(program.prefetcher._changed, "notify_all", notify_all)


def test_no_more_is_held_than_the_memory_that_it_may_take():
    program = Program("abcdef", memory=2)
    program.prefetcher.start()
    assert until(lambda: len(program.loads) == 2)
    assert program.take("a") == "executable a"
    assert until(lambda: len(program.loads) == 3)
    assert program.take("f") is None
    program.prefetcher.finish(20)
    assert program.loads == ["a", "b", "c"]


def test_what_nobody_comes_for_is_let_go(monkeypatch):
    monkeypatch.setattr(prefetch, "_KEEP_SECONDS", 0.1)
    program = Program("abc")
    program.prefetcher.start()
    assert until(lambda: program.dropped == 3)
    assert program.take("a") is None
    # The thread has gone as well.
    assert until(lambda: "xcache-prefetch" not in [thread.name for thread in threading.enumerate()])


def test_the_end_waits_for_what_is_being_loaded_and_begins_nothing():
    program = Program("abc")
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    release = threading.Timer(0.2, program.may_go_on.set)
    release.start()
    program.prefetcher.finish(20)
    assert program.may_go_on.is_set()
    release.join()
    assert until(lambda: "xcache-prefetch" not in [thread.name for thread in threading.enumerate()])
    assert program.loads == ["a"]


def test_the_end_waits_for_a_prediction_as_well():
    """Threads that are still there when the interpreter goes may bring it down."""
    program = SlowlyTold("a")
    program.prefetcher.start()
    assert program.asked.wait(20)
    assert not program.prefetcher.finish(0.01)
    release = threading.Timer(0.2, program.may_be_told.set)
    release.start()
    # Less than a thread rests for: what was foreseen meanwhile is nothing to wait for.
    assert program.prefetcher.finish(prefetch._KEEP_SECONDS / 8)
    assert "xcache-prefetch" not in [thread.name for thread in threading.enumerate()]
    assert program.loads == []
    release.join()


@pytest.mark.parametrize(("memory", "spare"), [(0, 1), (100, 0)], ids=["no memory", "no processor to spare"])
def test_nothing_is_loaded_ahead_where_that_is_switched_off(monkeypatch, memory, spare):
    monkeypatch.setattr(prefetch, "_threads_to_spare", lambda: spare)
    program = Program("abc", memory=memory)
    program.prefetcher.start()
    assert program.take("a") is None
    assert (program.questions, program.loads) == ([], [])
