"""A clock that jumps by years, back and forth: eviction goes on, statistics stay sane, and nothing is lost."""

from __future__ import annotations

import os
import random
import re
import time

import pytest
from support.acknowledged import Ledger
from support.command_line import Shell
from support.conversation import key_of, talking
from support.load import Client
from support.marks import thorough
from support.verdict import check

from xcache.wire import commands, protocol

YEARS = 10 * 365.25 * 86400
# Python imports a module of this name as it starts. Only the daemon, and the commands, get this clock; the real one
# cannot be set, and the other clock, by which waiting is done, does not jump either when somebody sets this one.
SHIFTED = """
import os, time
_time, _path = time.time, os.environ["SHIFT"]
def shifted():
    with open(_path) as file:
        return _time() + float(file.read() or 0)
time.time = shifted
"""


class Clock:
    """The time that a place's daemon and commands take it to be."""

    def __init__(self, place) -> None:
        self._path = place.root / "shift"
        modules = place.root / "modules"
        modules.mkdir()
        (modules / "sitecustomize.py").write_text(SHIFTED)
        place.env["SHIFT"] = str(self._path)
        place.env["PYTHONPATH"] = os.pathsep.join([str(modules), place.env["PYTHONPATH"]])
        self.now_is(0.0)

    def now_is(self, shift: float) -> None:
        """Set the clock to so many seconds from the real time."""
        aside = self._path.with_suffix(".new")
        aside.write_text(repr(shift))
        aside.rename(self._path)


@pytest.fixture
def clock(place):
    return Clock(place)


def put_many(place, name: str, count: int = 10) -> None:
    with talking(place) as talk:
        for number in range(count):
            assert talk.put(key_of(f"{name} {number}"), os.urandom(10_000)) == protocol.Stored(True)
        assert talk.ask(commands.Sync()) == protocol.Done()


def still_there(place, name: str, count: int = 10) -> int:
    with talking(place) as talk:
        return sum(talk.get(key_of(f"{name} {number}")) is not None for number in range(count))


@pytest.mark.slow
def test_jumps_back_and_forth_between_everything(place, clock, campaign):
    choose = random.Random(f"clock {campaign.seed}")
    ledger = Ledger()
    place.start_daemon(XCACHE_MAX_SIZE="700000")
    shell = Shell(place)
    for number in range(campaign.rounds(3)):
        clock.now_is(choose.choice((-YEARS, 0.0, YEARS, choose.uniform(-YEARS, YEARS))))
        campaign.fault()
        with talking(place) as talk:
            Client(talk, ledger, "worker", choose, evicting=True).do_everything()
            for _ in range(20):
                Client(talk, ledger, "worker", choose, evicting=True).do_something()
            assert talk.ask(commands.Sync()) == protocol.Done()
            status = talk.status()
        assert status["bytes"] <= 700_000
        if number % 3 == 0:
            place.stop()
            place.start_daemon(XCACHE_MAX_SIZE="700000")
        if number % 5 == 0:
            # The clock of these tests decides which entries are oldest, so any entry may have been evicted.
            with talking(place) as talk:
                for key in ledger.all():
                    assert ledger.found(key, talk.get(key), evicting=True) is None
                campaign.checked(len(ledger.all()))
            for command in (["ls"], ["stats"], ["status"]):
                said = shell.run(*command, SHIFT=place.env["SHIFT"])
                assert said.returncode == 0, said.stderr
                assert not re.search(r"(?<!\S)-\d", said.stdout), said.stdout
    ((counted,),) = place.query("SELECT amount FROM statistics WHERE name = 'evictions'")
    ((since,),) = place.query("SELECT amount FROM statistics WHERE name = 'since'")
    assert counted >= ledger.evicted > 0
    assert abs(since - time.time()) < 2 * YEARS
    check(place, Ledger(), campaign, "at the end")
    assert "ERROR" not in place.said()
    campaign.judge()


@pytest.mark.slow
def test_the_age_of_a_daemon_is_not_told_by_a_clock_that_jumps(place, clock):
    place.start_daemon()
    clock.now_is(-YEARS)
    with talking(place) as talk:
        assert 0 <= talk.status()["uptime_seconds"] < 1000
    clock.now_is(YEARS)
    with talking(place) as talk:
        assert 0 <= talk.status()["uptime_seconds"] < 1000


@pytest.mark.slow
@pytest.mark.parametrize("restart", thorough([False, True], usual=[False]), ids=["the same daemon", "the next daemon"])
def test_entries_from_a_far_future_make_room_for_new_ones(place, clock, restart):
    """The clock was years ahead for a while: that must not keep everything newer from staying."""
    clock.now_is(YEARS)
    place.start_daemon(XCACHE_MAX_SIZE="105000")
    put_many(place, "ahead")
    clock.now_is(0.0)
    if restart:
        place.stop()
        place.start_daemon(XCACHE_MAX_SIZE="105000")
    put_many(place, "now", 5)
    put_many(place, "later", 5)
    assert still_there(place, "now", 5) + still_there(place, "later", 5) == 10


@pytest.mark.slow
def test_nothing_is_too_old_because_the_clock_jumped(place, clock):
    """Back and forth, and as one daemon follows another."""
    limits = {"XCACHE_MAX_AGE": "30d"}
    place.start_daemon(**limits)
    put_many(place, "here")
    for number, shift in enumerate((YEARS, 0.0, -YEARS, 0.0)):
        clock.now_is(shift)
        put_many(place, f"put {number}", 1)
    clock.now_is(YEARS)
    place.stop()
    place.start_daemon(**limits)
    assert still_there(place, "here") == 10


@pytest.mark.slow
def test_entries_from_a_far_past_go_first(place, clock):
    clock.now_is(-YEARS)
    place.start_daemon(XCACHE_MAX_SIZE="105000")
    put_many(place, "behind")
    clock.now_is(0.0)
    put_many(place, "now", 5)
    clock.now_is(YEARS)
    put_many(place, "ahead", 5)
    assert still_there(place, "now", 5) + still_there(place, "ahead", 5) == 10
