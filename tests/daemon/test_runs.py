"""What programs wanted: remembered run by run, and told to the next run that is like it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable

import pytest
from conversation import key_of, talking
from places import digest, until

from xcache import framing, protocol
from xcached import foresight
from xcached.caller import Caller

# Says how many begin as well, and stays until nothing more is to be read.
ANOTHER = """
import sys
from xcache import config, protocol
from xcache.client import Client
client = Client(config.load(), "test")
print(client.predict(protocol.Predict("train.py", "a", None))[0].beginning, flush=True)
sys.stdin.read()
"""
OPTIONS = {digest(b"some"): b"some", digest(b"others"): b"others"}


def wanted(name: str, options: bytes = b"some", **changes: object) -> dict[str, object]:
    item = {"key": key_of(name), "options": digest(options), "devices": "0 1", "platform": "cpu", "seconds": 0.5}
    return item | changes


def remember(talk, program: str, *names: str, arguments: str = "a") -> None:
    message = protocol.Remember(program, arguments, [wanted(name) for name in names], OPTIONS)
    assert talk.ask(message) == protocol.Done()


def predicted(talk, program: str, *, arguments: str = "a", key: str | None = None) -> list[str]:
    found = talk.ask(protocol.Predict(program, arguments, key))
    assert isinstance(found, protocol.Prediction), found
    return [str(item["key"]) for item in found.items]


@pytest.fixture
def talk(place):
    place.start_daemon()
    with talking(place) as conversation:
        for name in "abcdef":
            conversation.put(key_of(name), name.encode())
        yield conversation


def keys(names: Iterable[str]) -> list[str]:
    return [key_of(name) for name in names]


def test_a_run_is_told_as_it_was(talk):
    items = [wanted("b"), wanted("a", b"others", devices="", seconds=0.25)]
    assert talk.ask(protocol.Remember("train.py", "x", items, OPTIONS)) == protocol.Done()
    found = talk.ask(protocol.Predict("train.py", "x", None))
    around = " ".join(digest(name) for name in (b"flags", b"platform", b"toolchain"))
    told = [
        item | {"around": 0} | {"digest": digest(name), "compile_seconds": 1.0, "stored_size": 1}
        for item, name in zip(items, (b"b", b"a"), strict=True)
    ]
    assert found == protocol.Prediction(told, OPTIONS, {key_of("a"): b"a", key_of("b"): b"b"}, [], [around], 0)


def test_of_what_is_told_what_is_wanted_first_comes_along_and_only_so_much_of_it(talk):
    large = [os.urandom(protocol.INLINE_LIMIT + number) for number in range(1, 12)]
    small = [bytes([number]) * 30_000 for number in range(30)]
    for number, payload in enumerate(large):
        talk.put(key_of(f"large {number}"), payload)
    for number, payload in enumerate(small):
        talk.put(key_of(str(number)), payload)
    remember(talk, "train.py", *(f"large {number}" for number in range(11)), *map(str, range(30)))
    found = talk.ask(protocol.Predict("train.py", "a", None))
    assert len(found.items) == 41
    assert found.files == [key_of(f"large {number}") for number in range(protocol.MAX_PREDICTED_FILES)]
    contents = []
    for descriptor in talk.descriptors:
        with open(descriptor, "rb") as file:
            contents.append(file.read())
    talk.descriptors.clear()
    assert contents == large[: protocol.MAX_PREDICTED_FILES]
    assert found.payloads == {key_of(str(n)): payload for n, payload in enumerate(small[: 512 * 1024 // 30_000])}
    # What came along can be complained of, as what was asked for.
    assert talk.ask(protocol.Complain(key_of("3"), digest(small[3]), "a test")) == protocol.Done()
    assert talk.get(key_of("3")) is None
    assert key_of("3") not in talk.ask(protocol.Predict("train.py", "a", None)).payloads


def test_a_long_run_is_told_with_as_much_as_there_is_room_for(talk):
    """One frame holds it all: the longer the list, the less comes along."""
    names = [f"n{number}" for number in range(2000)]
    for name in names[:400]:
        talk.put(key_of(name), name.encode() * 500)
    for name in names[400:]:
        talk.put(key_of(name), name.encode())
    remember(talk, "train.py", *names)
    found = talk.ask(protocol.Predict("train.py", "a", None))
    assert [item["key"] for item in found.items] == keys(names)
    assert found.payloads[key_of("n0")] == b"n0" * 500
    assert len(framing.encode(1, found)) > protocol.MAX_FRAME * 3 / 4


def test_a_list_that_fills_a_frame_by_itself_is_not_told(talk):
    items = [wanted("a", platform="p" * 4999) for _ in range(200)]
    assert talk.ask(protocol.Remember("train.py", "a", items, OPTIONS)) == protocol.Done()
    assert len(talk.ask(protocol.Predict("train.py", "a", None)).items) == 200
    items = [wanted("a", platform="p" * 4999, devices="d" * 32) for _ in range(201)]
    assert talk.ask(protocol.Remember("train.py", "a", items, OPTIONS)) == protocol.Done()
    assert talk.ask(protocol.Predict("train.py", "a", None)).items == []


def test_who_begins_is_told_how_many_others_do(talk, place):
    def beginning() -> int:
        return talk.ask(protocol.Predict("train.py", "a", None)).beginning

    assert (beginning(), beginning()) == (0, 0)
    with talking(place) as of_the_same_process:
        assert of_the_same_process.ask(protocol.Predict("train.py", "a", None)).beginning == 0
        assert beginning() == 0
    command = [sys.executable, "-c", ANOTHER]
    with subprocess.Popen(command, env=place.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "1\n"
        assert beginning() == 1
        other.communicate(timeout=20)
    assert until(lambda: beginning() == 0, 5.0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors to keep two programs apart")
def test_who_may_not_use_the_same_processors_does_not_count(talk, place):
    def one_on(processor: int) -> subprocess.Popen[str]:
        source = f"import os; os.sched_setaffinity(0, {{{processor}}})\n" + ANOTHER
        command = [sys.executable, "-c", source]
        return subprocess.Popen(command, env=place.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    first, second, *_ = sorted(os.sched_getaffinity(0))
    said = []
    with contextlib.ExitStack() as stack:
        for processor in (first, second, first):
            other = stack.enter_context(one_on(processor))
            # Left in this order: each is told to end, and then waited for.
            stack.callback(other.stdin.close)
            said.append(other.stdout.readline())
    assert said == ["0\n", "0\n", "1\n"]


def test_who_began_a_while_ago_is_at_no_beginning_any_more(monkeypatch):
    """However often it asks, and on whichever connection."""
    now = [1000.0]
    monkeypatch.setattr(foresight.time, "monotonic", lambda: now[0])
    foreseen = foresight.Foresight(None, None, None)
    long_here, new = Caller(os.getpid(), 0), Caller(os.getpid(), 0)
    assert foreseen._others_that_begin(long_here) == 0
    now[0] += 9
    assert foreseen._others_that_begin(Caller(os.getpid(), 0, long_here.process)) == 0
    assert foreseen._others_that_begin(new) == 1
    now[0] += 2
    assert foreseen._others_that_begin(new) == 0
    assert foreseen._others_that_begin(long_here) == 1


def test_the_last_run_with_the_same_arguments_goes_before_others(talk):
    remember(talk, "train.py", *"abc", arguments="first")
    remember(talk, "train.py", *"def", arguments="second")
    assert predicted(talk, "train.py", arguments="first") == keys("abc")
    assert predicted(talk, "train.py", arguments="second") == keys("def")
    assert predicted(talk, "train.py", arguments="third") == keys("def")
    assert predicted(talk, "serve.py", arguments="first") == []
    remember(talk, "train.py", *"ab", arguments="first")
    assert predicted(talk, "train.py", arguments="first") == keys("ab")


def test_a_run_is_found_by_what_was_asked_for(talk):
    remember(talk, "old.py", *"abc")
    remember(talk, "new.py", *"cde")
    # What comes next: of the one where something does.
    assert predicted(talk, "renamed.py", key=key_of("a")) == keys("bc")
    assert predicted(talk, "renamed.py", key=key_of("b")) == keys("c")
    assert predicted(talk, "renamed.py", key=key_of("c")) == keys("de")
    assert predicted(talk, "renamed.py", key=key_of("e")) == []
    assert predicted(talk, "renamed.py", key=key_of("f")) == []


def test_a_program_s_own_runs_go_before_others(talk):
    remember(talk, "train.py", *"abc")
    remember(talk, "other.py", *"aef")
    assert predicted(talk, "train.py", key=key_of("a"), arguments="new") == keys("bc")
    assert predicted(talk, "renamed.py", key=key_of("a")) == keys("ef")


def test_what_came_after_something_that_is_not_in_the_store_is_told(talk):
    remember(talk, "train.py", *"axbc")
    assert predicted(talk, "renamed.py", key=key_of("x")) == keys("bc")


def test_a_program_that_changed_is_known_again_when_it_changes_back(talk):
    remember(talk, "train.py", *"abc")
    remember(talk, "train.py", *"def")
    assert predicted(talk, "train.py") == keys("def")
    assert predicted(talk, "train.py", key=key_of("a")) == keys("bc")
    remember(talk, "train.py", *"abc")
    assert predicted(talk, "train.py") == keys("abc")
    assert predicted(talk, "train.py", key=key_of("d")) == keys("ef")


def test_a_run_that_was_soon_over_leaves_the_one_that_went_on(talk, place):
    remember(talk, "train.py", *"abcdef")
    remember(talk, "train.py", *"ab")
    assert predicted(talk, "train.py") == keys("ab")
    assert predicted(talk, "train.py", key=key_of("c")) == keys("def")
    remember(talk, "train.py", *"xbcdef")
    assert place.query("SELECT count(*) FROM runs") == [(1,)]


def test_of_one_program_only_some_runs_are_kept(talk, place):
    for number in range(12):
        remember(talk, "train.py", f"{number}")
    remember(talk, "other.py", "a")
    assert place.query("SELECT count(*) FROM runs WHERE program = 'train.py'") == [(8,)]
    assert place.query("SELECT count(*) FROM wanted") == [(9,)]
    assert predicted(talk, "other.py") == keys("a")


def test_what_is_not_in_the_store_is_not_told(talk):
    remember(talk, "train.py", *"axb")
    assert predicted(talk, "train.py") == keys("ab")
    assert talk.ask(protocol.Remove(keys("a"))).entries == 1
    assert predicted(talk, "train.py") == keys("b")


def test_old_runs_are_forgotten(talk, place):
    for number in range(205):
        remember(talk, f"{number}.py", "a")
    assert predicted(talk, "0.py") == []
    assert predicted(talk, "204.py") == keys("a")
    assert place.query("SELECT count(*) FROM runs") == [(200,)]
    assert place.query("SELECT count(*) FROM wanted") == [(200,)]


@pytest.mark.parametrize(
    ("items", "options"),
    [
        ([{}], OPTIONS),
        ([wanted("a", seconds=1)], OPTIONS),
        ([wanted("a", more=1)], OPTIONS),
        ([wanted("a", devices="0 " * 5000)], OPTIONS),
        ([wanted("a", b"unknown")], OPTIONS),
        ([wanted("a")] * 2001, OPTIONS),
        ([wanted("a")], OPTIONS | {"x": b"x" * (1 << 18)}),
    ],
)
def test_a_run_that_cannot_be_is_refused(talk, place, items, options):
    assert isinstance(talk.ask(protocol.Remember("train.py", "a", items, options)), protocol.Refused)
    assert place.query("SELECT count(*) FROM runs") == [(0,)]
