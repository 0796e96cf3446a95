"""Threads load predicted executables in order, and the program takes over what they have not begun."""

from __future__ import annotations

import threading
import types

import pytest
from support.foreseeing import CLIENT, DEVICES, PROGRAMS, TARGET, Program, SlowlyTold, loading
from support.places import until

from xcache.prefetch import prefetcher, processors


@pytest.fixture(autouse=True)
def two_processors(monkeypatch):
    monkeypatch.setattr(processors, "threads_to_spare", lambda: 1)
    monkeypatch.setattr(processors.Processors, "are_taken", lambda _: False)
    yield
    # The next test would meet their threads.
    while PROGRAMS:
        program = PROGRAMS.pop()
        program.may_begin.set()
        program.may_go_on.set()
        assert program.prefetcher.finish(20)


def test_the_executables_of_last_time_are_loaded_in_that_order_and_taken():
    program = Program("abc")
    program.prefetcher.start()
    assert until(lambda: program.is_done(*"abc"))
    assert [program.take(key) for key in "abc"] == [f"executable {key}" for key in "abc"]
    assert program.loads == ["a", "b", "c"]
    assert program.asked == 1
    # It was taken: a program that wants it again loads it.
    assert program.take("a") is None


def test_loads_that_the_program_does_not_use_are_reported():
    program = Program("abc")
    program.prefetcher.start()
    assert until(lambda: program.is_done(*"abc"))
    assert program.take("b") == "executable b"
    assert program.unused == []
    program.prefetcher.end()
    assert program.unused == ["a", "c"]


def test_an_executable_whose_load_has_not_begun_is_left_to_the_program():
    program = Program("abc")
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    assert program.take("b") is None
    program.may_go_on.set()
    assert program.take("a") == "executable a"
    assert until(lambda: program.loads == ["a", "c"])


def test_while_all_processors_are_busy_only_cheap_executables_are_loaded_ahead(monkeypatch):
    monkeypatch.setattr(processors.Processors, "are_taken", lambda _: True)
    program = Program("1a2b")
    program.entries = True
    program.prefetcher.start()
    assert until(lambda: program.is_done("a", "b") and not loading())
    assert program.loads == ["a", "b"]
    # The program loads the others from what came with the prediction.
    assert program.take("1") == "entry 1"
    monkeypatch.setattr(processors.Processors, "are_taken", lambda _: False)
    assert program.take("a") == "executable a"
    assert until(lambda: program.is_done("2"))
    assert program.take("2") == "executable 2"


def test_a_load_that_xla_has_begun_is_waited_for():
    program = Program("a")
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    taking = threading.Thread(target=lambda: found.append(program.take("a")))
    found: list[object] = []
    taking.start()
    program.may_go_on.set()
    taking.join(20)
    assert found == ["executable a"]


def test_while_the_program_waits_for_a_load_the_next_one_begins():
    """The processor of the waiting thread is free; afterwards there is one thread again."""
    program = Program("123")
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["1"])
    taking = threading.Thread(target=program.take, args=("1",))
    taking.start()
    assert until(lambda: program.loads == ["1", "2"])
    assert len(loading()) == 2
    program.may_go_on.set()
    taking.join(20)
    assert until(lambda: program.is_done("2", "3"))
    assert program.loads == ["1", "2", "3"]


def test_the_wait_for_a_load_is_bounded_and_the_load_reported_as_unused():
    program = Program("a")
    program.entries, program.patience = True, 0.01
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    assert program.take("a") == "entry a"
    program.may_go_on.set()
    assert until(program.is_over)
    assert until(lambda: program.unused == ["a"])


@pytest.mark.parametrize("entries", [False, True])
def test_before_there_is_a_backend_nothing_has_begun_and_nothing_is_waited_for(entries):
    program = Program("abc")
    program.entries = entries
    program.may_begin.clear()
    program.prefetcher.start()
    assert until(lambda: program.fetches == ["a"])
    # It would wait for ever.
    assert [program.take(key) for key in "ab"] == (["entry a", "entry b"] if entries else [None, None])
    program.may_begin.set()
    assert until(lambda: program.is_done("c"))
    assert program.loads == ["c"]


def test_expensive_loads_wait_for_the_first_predicted_request():
    program = Program("aBcD")
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a", "c"])
    assert program.take("a") == "executable a"
    assert until(lambda: program.loads == ["a", "c", "B", "D"])


def test_costly_loads_go_before_cheap_ones():
    # Only digits are dear, and only upper case has to be trusted first.
    program = Program("ab1c")
    program.prefetcher.start()
    assert until(lambda: program.loads == ["1", "a", "b", "c"])


def test_an_unloaded_entry_that_came_with_the_prediction_is_taken_as_it_is():
    program = Program("ab")
    program.entries = True
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    assert program.take("b") == "entry b"
    program.may_go_on.set()
    assert program.take("a") == "executable a"
    assert program.take("b") is None


def test_entries_that_come_with_the_prediction_are_bounded_in_bytes():
    program = Program("abcd", memory=2)
    program.entries = True
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    assert [program.take(key) for key in "bcd"] == ["entry b", None, None]


def test_an_unused_entry_that_came_with_the_prediction_is_dropped(monkeypatch):
    monkeypatch.setattr(prefetcher, "_KEEP_SECONDS", 0.2)
    program = Program("A")
    program.entries = True
    program.prefetcher.start()
    assert until(lambda: set(program.kept) == {"entry A"})
    assert until(lambda: not program.kept)
    assert (program.loads, program.dropped) == ([], 0)


def test_two_surprises_in_a_row_end_the_loading_ahead():
    program = Program("abcdef")
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    assert [program.take(key) for key in "vw"] == [None, None]
    program.may_go_on.set()
    assert until(lambda: not loading())
    assert (program.loads, program.asked) == (["a"], 1)


def test_a_single_surprise_does_not_end_loading_ahead():
    program = Program("abc")
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    assert [program.take(key) for key in "vbw"] == [None, None, None]
    program.may_go_on.set()
    assert until(lambda: program.is_done("a", "c"))


def test_a_repeated_request_is_no_surprise():
    program = Program("abcd")
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    assert [program.take("b") for _ in range(3)] == [None, None, None]
    program.may_go_on.set()
    assert until(lambda: program.loads == ["a", "c", "d"])


def test_expensive_loads_wait_again_after_a_surprise():
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


def test_a_request_before_the_prediction_arrives_is_no_surprise():
    program = SlowlyTold("abc")
    program.prefetcher.start()
    assert program.is_asked.wait(20)
    assert [program.take(key) for key in "xya"] == [None, None, None]
    program.may_be_told.set()
    assert until(lambda: program.loads == ["b", "c"])


OTHER_CLIENT = types.SimpleNamespace(name="another client")


@pytest.mark.parametrize(
    "differs",
    [{"options": b"others"}, {"client": OTHER_CLIENT}, {"devices": (types.SimpleNamespace(id=0),)}, {"devices": ()}],
    ids=["options", "client", "a device of the same number", "no devices"],
)
def test_an_executable_for_other_options_another_client_or_its_devices_is_not_taken(differs):
    program = Program("a")
    program.prefetcher.start()
    assert until(lambda: program.is_done("a"))
    assert program.take("a", TARGET._replace(**differs)) is None
    assert until(program.is_over)


def test_an_executable_loaded_ahead_does_not_keep_its_client_alive():
    program = Program("aBcD")
    program.prefetcher.start()
    assert until(lambda: program.is_done("a", "c"))
    program.clients[:] = [OTHER_CLIENT]
    program.prefetcher.look()
    assert until(program.is_over)
    assert program.take("c") is None
    # It is not yet loaded, and so for no client.
    assert program.take("D") is None
    assert until(lambda: program.is_done("B"))


def test_executables_of_a_client_that_is_gone_are_dropped(monkeypatch):
    monkeypatch.setattr(prefetcher, "_CHECK_SECONDS", 0.01)
    program = Program("ab")
    program.prefetcher.start()
    assert until(lambda: program.is_done("a", "b"))
    program.clients[:] = [OTHER_CLIENT]
    assert until(program.is_over)


def test_an_executable_loaded_after_its_client_went_is_dropped():
    program = Program("ab")
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    program.clients[:] = [OTHER_CLIENT]
    # While the thread is at the next one, nobody else looks for clients that have gone.
    program.may_begin.clear()
    program.may_go_on.set()
    assert until(lambda: program.fetches == ["a", "b"])
    assert not program.kept
    assert program.take("a") is None
    assert CLIENT is not OTHER_CLIENT
    assert len(DEVICES) == 1


def test_an_executable_that_could_not_be_loaded_is_left_to_the_program():
    program = Program("!a")
    program.prefetcher.start()
    assert until(lambda: program.is_done("a"))
    assert program.take("!") is None
    assert program.take("a") == "executable a"


def test_a_load_that_runs_out_of_memory_drops_everything_and_ends_loading_ahead():
    program = Program("ab*cd")
    program.prefetcher.start()
    assert until(lambda: "*" in program.loads and program.is_over())
    assert program.take("c") is None
    assert program.loads == ["a", "b", "*"]


def test_giving_up_frees_memory_once_and_waits_for_loads_in_progress():
    program = Program("abc")
    assert not program.prefetcher.give_up(20)
    program = Program("abc")
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    made: list[bool] = []
    giving_up = threading.Thread(target=lambda: made.append(program.prefetcher.give_up(20)))
    giving_up.start()
    assert until(program.prefetcher.is_over)
    assert made == []
    program.may_go_on.set()
    giving_up.join(20)
    assert (made, program.loads) == ([True], ["a"])
    assert until(program.is_over)
    assert not program.prefetcher.give_up(20)


def test_executables_held_are_bounded_in_bytes():
    program = Program("abcdef", memory=2)
    program.prefetcher.start()
    assert until(lambda: program.is_done("a", "b"))
    assert program.take("a") == "executable a"
    assert until(lambda: program.is_done("b", "c"))
    assert program.take("f") is None
    program.prefetcher.finish(20)
    assert program.loads == ["a", "b", "c"]


def test_executables_nobody_asks_for_are_dropped(monkeypatch):
    monkeypatch.setattr(prefetcher, "_KEEP_SECONDS", 0.1)
    program = Program("abc")
    program.prefetcher.start()
    assert until(lambda: program.dropped == 3)
    assert program.take("a") is None
    # The thread has gone as well.
    assert until(program.is_over)


def test_finish_waits_for_the_load_in_progress_and_begins_nothing():
    program = Program("abc")
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    assert not program.prefetcher.finish(0.01)
    program.may_go_on.set()
    assert program.prefetcher.finish(20)
    assert not loading()
    assert program.loads == ["a"]


def test_finish_waits_for_a_prediction():
    """Threads that still run when the interpreter shuts down may crash it."""
    program = SlowlyTold("a")
    program.prefetcher.start()
    assert program.is_asked.wait(20)
    assert not program.prefetcher.finish(0.01)
    program.may_be_told.set()
    assert program.prefetcher.finish(20)
    assert not loading()
    assert program.fetches == []


@pytest.mark.parametrize(("memory", "spare"), [(0, 1), (100, 0)], ids=["no memory", "no processor to spare"])
def test_nothing_is_loaded_ahead_where_it_is_off(monkeypatch, memory, spare):
    monkeypatch.setattr(processors, "threads_to_spare", lambda: spare)
    program = Program("abc", memory=memory)
    program.prefetcher.start()
    assert program.take("a") is None
    assert (program.asked, program.loads) == (0, [])


def test_a_program_that_joins_all_its_threads_waits_for_no_more_than_a_load():
    program = Program("abc")
    program.may_go_on.clear()
    program.prefetcher.start()
    assert until(lambda: program.loads == ["a"])
    (thread,) = loading()
    joining = threading.Thread(target=thread.join)
    joining.start()
    assert until(program.prefetcher.is_over)
    program.may_go_on.set()
    joining.join(20)
    assert not thread.is_alive()
    assert program.loads == ["a"]
    assert until(program.is_over)


def test_no_thread_stays_for_executables_that_are_held():
    before = threading.active_count()
    program = Program("abcD")
    program.prefetcher.start()
    assert until(lambda: program.is_done(*"abc"))
    assert until(lambda: threading.active_count() == before)
    assert program.take("a") == "executable a"
    # The loader loads the rest, too, once the program has come for something.
    assert until(lambda: program.is_done("D"))
    assert until(lambda: threading.active_count() == before)
    assert program.is_done(*"bcD")
