"""Loading ahead: what is predicted is loaded in order on other threads, and taken over where the program is faster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from places import until

from xcache import prefetch
from xcache.entries import Entry
from xcache.prefetch import Foreseen, Item, Loaded, Prefetcher

OPTIONS, DEVICES = b"options", (0,)


def item(key: str, entry: Entry | None = None) -> Item:
    # What has a capital letter takes its time, and what has a digit some.
    seconds = 10.0 if key.isupper() else 0.1 if key.isdigit() else 0.005
    return Item(key, OPTIONS, DEVICES, "cpu", seconds, ("f", "p", "t"), entry)


PROGRAMS: list[Program] = []


class Program:
    """What a prefetcher is told, and what it did."""

    def __init__(self, *runs: str, memory: int = 100) -> None:
        # Each run is a string of one-letter keys.
        self.runs = runs
        self.questions: list[str | None] = []
        self.loads: list[str] = []
        self.soon: list[str] = []
        self.dropped = 0
        self.entries = False
        self.beginning = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.prefetcher = Prefetcher(self, memory, self._drop)
        PROGRAMS.append(self)

    def predict(self, key: str | None) -> Foreseen:
        self.questions.append(key)
        found = self.runs[0] if key is None else next((run.split(key)[1] for run in self.runs if key in run), "")
        entries = [Entry(f"entry {key}", 1.0, key.encode(), b"") if self.entries else None for key in found]
        return Foreseen(list(map(item, found, entries)), self.beginning)

    def load(self, wanted: Item, soon: Sequence[Item], is_over: Callable[[], bool]) -> Loaded | None:
        self.loads.append(wanted.key)
        self.soon.append("".join(other.key for other in soon))
        assert self.may_go_on.wait(20)
        return None if wanted.key == "!" else Loaded(f"executable {wanted.key}", None, 0.1, 1)

    def pause(self) -> None:
        """Nobody is told."""

    def _drop(self, count: int) -> None:
        self.dropped += count

    def take(self, key: str, options: bytes = OPTIONS, devices: tuple[int, ...] = DEVICES) -> object:
        loaded = self.prefetcher.take(key, options, devices)
        return None if loaded is None else loaded.executable


class SlowlyTold(Program):
    """One whose predictions come when it may be told."""

    def __init__(self, *runs: str) -> None:
        self.asked, self.may_be_told = threading.Event(), threading.Event()
        super().__init__(*runs)

    def predict(self, key: str | None) -> Foreseen:
        self.asked.set()
        assert self.may_be_told.wait(20)
        return super().predict(key)


@pytest.fixture(autouse=True)
def two_processors(monkeypatch):
    monkeypatch.setattr(prefetch, "_threads_to_spare", lambda: 1)
    yield
    # Whose threads would be met by the next test.
    while PROGRAMS:
        program = PROGRAMS.pop()
        program.may_go_on.set()
        assert program.prefetcher.finish(20)


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
