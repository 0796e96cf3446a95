"""Watchers are told what programs do; they cost others nothing, and keep no daemon from leaving."""

from __future__ import annotations

import contextlib
import os

import pytest
from support.conversation import Conversation, key_of
from support.leasing import KEY, begin_to_wait, take
from support.places import digest, until

from xcache.wire import commands, ledger, protocol

MISS = [0, "jit_step", "train.py:1", "f32[8]", KEY, "miss", "other flags", "", "", "[]"]
RUN = "0123456789abcdef"


class Watching:
    """A connection that watches."""

    def __init__(self, talk: Conversation) -> None:
        self.talk = talk
        self.request = talk.say(commands.Watch())
        # The first notice has no news of the time before.
        self.first = self.next()

    def next(self) -> commands.Seen:
        """Return the next notice."""
        request, seen = self.talk.hear()
        assert request == self.request
        assert isinstance(seen, commands.Seen), seen
        return seen

    def until(self, condition) -> commands.Seen:
        """Return the first of the next notices for which the condition holds."""
        for _ in range(40):
            if condition(seen := self.next()):
                return seen
        raise AssertionError(seen)


@pytest.fixture
def watching(speakers):
    return Watching(speakers())


def record(rows: list[list[int | str]], run: str = RUN) -> protocol.RecordRun:
    return protocol.RecordRun(run, 1.0, False, {}, rows)


def test_the_first_notice_comes_at_once_and_leaves_out_the_watchers(place, watching, speakers):
    facts = watching.first.facts
    assert (facts["pid"], facts["entries"], facts["bytes"]) == (place.daemon_pid(), 0, 0)
    assert (facts["connected"], facts["compiling"], facts["hits"], facts["misses"]) == (0, 0, 0, 0)
    assert (watching.first.programs, watching.first.doing, watching.first.missed) == ([], [], [])
    speakers()
    speakers()
    (program,) = watching.until(lambda seen: seen.programs).programs
    assert (program["pid"], program["program"], program["connections"]) == (os.getpid(), "test.py", 2)


def test_what_programs_do_is_seen(watching, speakers):
    holder, waiter, loader = speakers(), speakers(), speakers()
    take(holder)
    begin_to_wait(waiter)
    assert loader.put(key_of("b"), b"executable", module_name="jit_loaded") == protocol.Stored(True)
    assert loader.get(key_of("b")) == b"executable"
    loader.say(protocol.Loading(key_of("b"), digest(b"executable"), False))
    seen = watching.until(lambda seen: len(seen.doing) == 3)
    compiling, waiting, loading = seen.doing
    assert (compiling["kind"], compiling["module_name"], compiling["key"]) == ("compiling", "jit_f", KEY)
    assert (waiting["kind"], waiting["of_pid"], waiting["key"]) == ("waiting", os.getpid(), KEY)
    assert (loading["kind"], loading["module_name"], loading["ahead"]) == ("loading", "jit_loaded", False)
    assert compiling["waiting"] == 1
    assert (seen.facts["compiling"], seen.facts["waiting"], seen.facts["entries"]) == (1, 1, 1)
    later = watching.next().doing[0]
    assert later["seconds"] > compiling["seconds"] >= 0
    assert holder.put(KEY, b"executable") == protocol.Stored(True)
    loader.say(protocol.Loaded())
    watching.until(lambda seen: not seen.doing)


def test_hits_and_misses_are_told_once_and_to_every_watcher(watching, speakers):
    other, program = Watching(speakers()), speakers()
    program.ask(protocol.Report({"hits": 2.0, "misses": 1, "requests": 3}))
    program.ask(record([MISS, [1, "jit_hit", *MISS[2:5], "hit", *MISS[6:]]]))
    for watcher in (watching, other):
        seen = watcher.until(lambda seen: seen.facts["hits"])
        assert (seen.facts["hits"], seen.facts["misses"], seen.facts["left_out"]) == (2, 1, 0)
        (missed,) = seen.missed or watcher.next().missed
        assert missed == {
            "pid": os.getpid(),
            "uid": os.getuid(),
            "program": "test.py",
            "run": RUN,
            **ledger.Row(*MISS)._asdict(),
        }
        assert [(row["hits"], row["misses"]) for row in seen.programs] == [(2, 1)]
        seen = watcher.next()
        assert (seen.facts["hits"], seen.facts["misses"], seen.missed) == (0, 0, [])


@pytest.mark.parametrize("count", [float("nan"), float("inf"), -1e300, 2**63])
def test_a_count_that_is_none_is_not_counted(watching, speakers, count):
    program = speakers()
    assert program.ask(protocol.Report({"hits": count})) == protocol.Done()
    program.ask(protocol.Report({"hits": 1}))
    assert watching.until(lambda seen: seen.facts["hits"]).facts["hits"] == 1


def test_a_slow_watcher_delays_nobody_and_is_told_later_what_there_was_room_for(speakers):
    watcher, program = Watching(speakers()), speakers()
    # Each notice is about as large as it can be, so that a few of them fill the socket.
    text = "x" * ledger.MAX_TEXT
    rows = [[position, text, text, text, KEY, "miss", text, text, KEY, text] for position in range(100)]
    for number in range(8):
        assert program.ask(record(rows, f"{number:016}")) == protocol.Done()
        assert program.ask(protocol.Report({"hits": 1})) == protocol.Done()
        until(lambda: False, 0.25)
    hits = missed = left_out = 0
    while hits < 8 or missed + left_out < 8 * len(rows):
        seen = watcher.next()
        assert len(seen.missed) <= protocol.MAX_SEEN_MISSES
        hits, missed = hits + seen.facts["hits"], missed + len(seen.missed)
        left_out += seen.facts["left_out"]
    assert (hits, missed + left_out) == (8, 8 * len(rows))


def test_the_largest_notice_fits_into_a_frame(speakers):
    wide = "\N{PILE OF POO}"
    talks = [speakers() for _ in range(3)]
    watcher = Watching(talks[0])
    for number in range(protocol.MAX_SEEN_DOING + 50):
        message = protocol.Get(key_of(str(number)), 60.0, wide * protocol.MAX_NAME, digest(b"program"))
        assert isinstance(talks[1].ask(message), protocol.Missing)
    text = wide * ledger.MAX_TEXT
    rows = [[position, text, text, text, KEY, "miss", text, text, KEY, text] for position in range(10)]
    for number in range(10):
        assert talks[2].ask(record(rows, f"{number:016}")) == protocol.Done()
    seen = watcher.until(lambda seen: seen.missed)
    assert len(seen.doing) == protocol.MAX_SEEN_DOING
    assert seen.facts["compiling"] == protocol.MAX_SEEN_DOING + 50


def test_a_user_has_few_watchers_and_one_that_ends_makes_room(speakers):
    talks = [speakers() for _ in range(8)]
    for talk in talks:
        Watching(talk)
    last = speakers()
    answer = last.ask(commands.Watch())
    assert isinstance(answer, protocol.Refused)
    assert answer.kind == "too many watchers"
    # A second one on the same connection takes the place of the first.
    assert isinstance(talks[0].ask(commands.Watch()), commands.Seen)
    talks[1].close()
    assert until(lambda: isinstance(last.ask(commands.Watch()), commands.Seen))


def test_a_watched_daemon_leaves_when_it_is_idle_and_when_it_is_told_to(place):
    for environment in ({"XCACHE_IDLE_EXIT": "1s"}, {}):
        child = place.start_daemon(**environment)
        with contextlib.closing(Conversation(place)) as talk:
            talk.greet()
            Watching(talk)
            if not environment:
                child.terminate()
            assert until(lambda: child.poll() is not None)  # noqa: B023 - called at once
        assert child.returncode == 0
        assert "could be told" not in place.said()
