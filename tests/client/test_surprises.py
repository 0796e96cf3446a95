"""A program that wants something else than was foreseen: what it did not expect is asked for, and decides."""

from __future__ import annotations

import pytest
from foreseeing import Program, SlowlyTold, two_processors
from places import until

__all__ = ["two_processors"]


def test_a_program_of_another_name_is_known_by_what_it_asks_for_first():
    program = Program("", "xyz")
    program.prefetcher.start()
    assert until(lambda: program.questions == [None])
    assert program.take("x") is None
    assert until(lambda: program.loads == ["y", "z"])
    assert program.take("y") == "executable y"
    assert program.questions == [None, "x"]


def test_a_program_that_wants_something_else_is_not_loaded_for_any_longer():
    program = Program("abcdef", "vwxyz")
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    assert program.take("v") is None
    assert program.take("w") is None
    program.may_go_on.set()
    assert until(lambda: program.loads == ["a", "x", "y", "z"])


def test_what_a_surprise_makes_foreseen_goes_before_the_rest():
    program = Program("abcdef", "vewxyz")
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    assert program.take("v") is None
    program.may_go_on.set()
    assert until(lambda: program.loads == ["a", *"ewxyz", *"bcdf"])


@pytest.mark.parametrize(("taken", "left", "loaded"), [("y", "abWX", "WX"), ("b", "ayCD", "CD")])
def test_what_is_asked_for_next_tells_which_prediction_is_right(taken, left, loaded):
    program = Program("abCD", "vyWX")
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a", "b"])
    assert program.take("v") is None
    assert until(lambda: program.loads == ["a", "b", "y"])
    assert program.take(taken) == f"executable {taken}"
    assert set(program.prefetcher._places) == set(left)
    assert until(lambda: program.loads == ["a", "b", "y", *loaded])


def test_what_both_have_does_not_tell_which_prediction_is_right():
    program = Program("abCD", "vbWX")
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a", "b"])
    assert program.take("v") is None
    assert until(lambda: "W" in program.prefetcher._places)
    assert program.take("b") == "executable b"
    assert until(lambda: program.loads == ["a", "b", "W", "X", "C", "D"])


def test_what_is_left_of_a_prediction_that_was_wrong_decides_nothing():
    program = Program("abCD", "vyWX")
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a", "b"])
    assert program.take("v") is None
    assert until(lambda: program.loads == ["a", "b", "y"])
    program.may_go_on.clear()
    assert program.take("y") == "executable y"
    assert until(lambda: program.loads == ["a", "b", "y", "W"])
    assert program.take("b") == "executable b"
    program.may_go_on.set()
    assert until(lambda: program.loads == ["a", "b", "y", "W", "X"])


def test_what_was_asked_for_while_the_answer_was_on_its_way_is_no_surprise():
    program = SlowlyTold("abC", "axyz")
    program.prefetcher.start()
    assert program.asked.wait(20)
    assert program.take("a") is None
    program.may_be_told.set()
    assert until(lambda: program.loads == ["b"])
    assert program.take("b") == "executable b"
    assert until(lambda: program.loads == ["b", "C"])
    assert program.questions == [None]


def test_what_takes_long_waits_again_after_a_surprise():
    program = Program("abCd")
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    assert program.take("b") is None
    assert program.take("v") is None
    program.may_go_on.set()
    assert until(lambda: program.loads == ["a", "d"])
    assert program.take("a") == "executable a"
    assert until(lambda: program.loads == ["a", "d", "C"])
