"""The keys that programs wanted are stored by run, and predicted to the next similar run."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
from support.conversation import key_of, talking
from support.places import digest

from xcache.wire import commands, framing, protocol

OPTIONS = {digest(b"some"): b"some", digest(b"others"): b"others"}


def wanted(name: str, options: bytes = b"some", **changes: object) -> dict[str, object]:
    item = {"key": key_of(name), "options": digest(options), "devices": "0 1", "platform": "cpu", "seconds": 0.5}
    return item | changes


def remember(talk, program: str, *names: str, arguments: str = "a") -> None:
    message = protocol.Remember(program, arguments, [wanted(name) for name in names], OPTIONS)
    assert talk.ask(message) == protocol.Done()


def predicted(talk, program: str, *, arguments: str = "a") -> list[str]:
    found = talk.ask(protocol.Predict(program, arguments))
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
    found = talk.ask(protocol.Predict("train.py", "x"))
    made_with = " ".join(digest(name) for name in (b"flags", b"platform", b"toolchain"))
    told = [
        item | {"made_with": 0} | {"digest": digest(name), "compile_seconds": 1.0, "stored_size": 1, "offset": 0}
        for item, name in zip(items, (b"b", b"a"), strict=True)
    ]
    assert found == protocol.Prediction(told, OPTIONS, {key_of("a"): b"a", key_of("b"): b"b"}, [], [made_with], [], b"")


def test_the_first_entries_of_a_prediction_come_along_up_to_a_limit(talk):
    large = [os.urandom(protocol.INLINE_LIMIT + number) for number in range(1, 12)]
    small = [bytes([number]) * 30_000 for number in range(30)]
    for number, payload in enumerate(large):
        talk.put(key_of(f"large {number}"), payload)
    for number, payload in enumerate(small):
        talk.put(key_of(str(number)), payload)
    remember(talk, "train.py", *(f"large {number}" for number in range(11)), *map(str, range(30)))
    found = talk.ask(protocol.Predict("train.py", "a"))
    assert len(found.items) == 41
    assert found.files == [key_of(f"large {number}") for number in range(protocol.MAX_PREDICTED_FILES)]
    contents = []
    for descriptor in talk.descriptors:
        with open(descriptor, "rb") as file:
            contents.append(file.read())
    talk.descriptors.clear()
    assert contents == large[: protocol.MAX_PREDICTED_FILES]
    assert found.payloads == {key_of(str(n)): payload for n, payload in enumerate(small[: 512 * 1024 // 30_000])}
    # A reader can complain of an entry that came along, as of one that it asked for.
    assert talk.ask(protocol.Complain(key_of("3"), digest(small[3]), "a test", False)) == protocol.Done()
    assert talk.get(key_of("3")) is None
    assert key_of("3") not in talk.ask(protocol.Predict("train.py", "a")).payloads


@pytest.mark.thorough
def test_a_long_run_is_told_with_as_much_as_there_is_room_for(talk):
    """One frame holds it all, and no more is looked up than takes a moment."""
    names = [f"n{number}" for number in range(2000)]
    for name in names[:400]:
        talk.put(key_of(name), name.encode() * 500)
    for name in names[400:]:
        talk.put(key_of(name), name.encode())
    remember(talk, "train.py", *names)
    found = talk.ask(protocol.Predict("train.py", "a"))
    assert [item["key"] for item in found.items] == keys(names[:500])
    assert found.payloads[key_of("n0")] == b"n0" * 500
    assert protocol.MAX_FRAME / 2 < len(framing.encode(1, found)) < protocol.MAX_FRAME


def test_a_list_that_fills_a_frame_by_itself_is_not_told(talk):
    items = [wanted("a", platform="p" * 4999) for _ in range(200)]
    assert talk.ask(protocol.Remember("train.py", "a", items, OPTIONS)) == protocol.Done()
    assert len(talk.ask(protocol.Predict("train.py", "a")).items) == 200
    items = [wanted("a", platform="p" * 4999, devices="d" * 32) for _ in range(201)]
    assert talk.ask(protocol.Remember("train.py", "a", items, OPTIONS)) == protocol.Done()
    assert talk.ask(protocol.Predict("train.py", "a")).items == []


def test_the_last_run_with_the_same_arguments_goes_before_others(talk):
    remember(talk, "train.py", *"abc", arguments="first")
    remember(talk, "train.py", *"def", arguments="second")
    assert predicted(talk, "train.py", arguments="first") == keys("abc")
    assert predicted(talk, "train.py", arguments="second") == keys("def")
    assert predicted(talk, "train.py", arguments="third") == keys("def")
    assert predicted(talk, "serve.py", arguments="first") == []
    remember(talk, "train.py", *"ab", arguments="first")
    assert predicted(talk, "train.py", arguments="first") == keys("ab")


def test_a_program_that_changed_is_told_what_it_wanted_last(talk):
    remember(talk, "train.py", *"abc")
    remember(talk, "train.py", *"def")
    assert predicted(talk, "train.py") == keys("def")
    remember(talk, "train.py", *"abc")
    assert predicted(talk, "train.py") == keys("abc")


def test_a_run_replaces_those_that_it_is_like(talk, place):
    remember(talk, "train.py", *"abcdef")
    remember(talk, "train.py", *"ab")
    assert predicted(talk, "train.py") == keys("ab")
    remember(talk, "train.py", *"xbcdef")
    assert place.query("SELECT count(*) FROM histories") == [(1,)]


def test_only_some_runs_of_one_program_are_kept(talk, place):
    for number in range(12):
        remember(talk, "train.py", f"{number}")
    remember(talk, "other.py", "a")
    assert place.query("SELECT count(*) FROM histories WHERE program = 'train.py'") == [(8,)]
    assert place.query("SELECT count(*) FROM wanted") == [(9,)]
    assert predicted(talk, "other.py") == keys("a")


def test_a_prediction_names_only_keys_that_are_in_the_store(talk):
    remember(talk, "train.py", *"axb")
    assert predicted(talk, "train.py") == keys("ab")
    assert talk.ask(commands.Remove(keys("a"))).entries == 1
    assert predicted(talk, "train.py") == keys("b")


def test_old_runs_are_forgotten(talk, place):
    for number in range(205):
        remember(talk, f"{number}.py", "a")
    assert predicted(talk, "0.py") == []
    assert predicted(talk, "204.py") == keys("a")
    assert place.query("SELECT count(*) FROM histories") == [(200,)]
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
    assert place.query("SELECT count(*) FROM histories") == [(0,)]
