"""Recorded requests: what the simulator needs, in a file that stays bounded, and never in the way."""

from __future__ import annotations

import json
import os

import pytest
from conversation import key_of, talking
from places import digest, get_message
from simulate_traces import recorded

from xcache import protocol
from xcached import trace


def ask_for_some(place, **environment) -> None:
    child = place.start_daemon(**environment)
    with talking(place) as talk:
        assert talk.get(key_of("a")) is None
        assert talk.put(key_of("a"), b"a" * 100, b"program") == protocol.Stored(True)
        assert talk.get(key_of("a")) == b"a" * 100
        assert talk.get(key_of("b")) is None
        assert talk.ask(protocol.Sync()) == protocol.Done()
        assert child.poll() is None


def test_every_request_is_recorded(place):
    path = place.root / "trace.jsonl"
    ask_for_some(place, XCACHE_TRACE=str(path))
    noted = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["op"], one["size"], one["hit"]) for one in noted] == [
        ("get", 0, False),
        ("put", 107, False),
        ("get", 100, True),
        ("get", 0, False),
    ]
    assert {one["key"] for one in noted} == {key_of("a")[:16], key_of("b")[:16]}
    requests = recorded(path)
    assert [(request.size, request.seconds) for request in requests] == [(107, 1.0)] * 2


def test_who_waits_for_another_makes_one_request(place):
    path = place.root / "trace.jsonl"
    place.start_daemon(XCACHE_TRACE=str(path))
    with talking(place) as holder, talking(place) as waiter:
        assert holder.ask(get_message(key_of("a"), 20)).lease
        request = waiter.say(get_message(key_of("a"), 20))
        assert isinstance(waiter.answer(request), protocol.Wait)
        assert holder.put(key_of("a"), b"a" * 100, b"program") == protocol.Stored(True)
        while isinstance(answer := waiter.answer(request), protocol.Wait):
            pass
        assert answer.payload == b"a" * 100
        assert holder.ask(protocol.Sync()) == protocol.Done()
    assert [json.loads(line)["op"] for line in path.read_text().splitlines()] == ["get", "get", "put"]


def test_what_comes_with_a_prediction_is_recorded(place):
    """Nobody asks for it any more."""
    path = place.root / "trace.jsonl"
    ask_for_some(place, XCACHE_TRACE=str(path))
    before = len(recorded(path))
    item = {"key": key_of("a"), "options": digest(b""), "devices": "", "platform": "cpu", "seconds": 0.1}
    with talking(place) as talk:
        assert talk.ask(protocol.Remember("a.py", "", [item], {digest(b""): b""})) == protocol.Done()
        assert talk.ask(protocol.Predict("a.py", "", None)).payloads == {key_of("a"): b"a" * 100}
        assert talk.ask(protocol.Sync()) == protocol.Done()
    assert len(recorded(path)) == before + 1


def test_nothing_is_recorded_unless_it_is_asked_for(place):
    ask_for_some(place)
    assert sorted(path.name for path in place.root.iterdir()) == ["s", "stderr", "store"]


@pytest.mark.parametrize("what", ["a folder", "a pipe", "nowhere"])
def test_what_cannot_be_written_is_left_with_one_line(place, what):
    path = place.root / "trace"
    if what == "a folder":
        path.mkdir()
    elif what == "a pipe":
        os.mkfifo(path)
    else:
        path = path / "trace"
    ask_for_some(place, XCACHE_TRACE=str(path))
    with talking(place) as talk:
        assert talk.get(key_of("a")) is not None
        assert talk.ask(protocol.Sync()) == protocol.Done()
    assert place.said().count("not recorded any more") == 1


def test_the_file_stays_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "_MOST_BYTES", 1000)
    made = trace.Trace(tmp_path / "trace")
    for _ in range(50):
        made.note("get", key_of("a"), 1, 1.0, hit=True)
        made.write()
    assert 900 <= (tmp_path / "trace").stat().st_size <= 1000
