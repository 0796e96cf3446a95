"""Each end of a process counts as much as is known of it."""

from __future__ import annotations

import time

import pytest
from support.places import digest
from support.stores import Shelf

from xcached.caller import Caller, Load
from xcached.requests.process_ends import ProcessEnd
from xcached.requests.strikes import Strikes
from xcached.store.quarantine import Quarantine

CRASHED, OTHERWISE, UNKNOWN = ProcessEnd
KEY, READER = digest(b"key"), 7


class Judge:
    """Strikes of a store, and processes of one reader that load its only entry."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        quarantine = Quarantine(shelf.store, shelf.directory / "quarantine", lambda reader, writer: True)
        self.strikes = Strikes(shelf.store, shelf.writer, quarantine)

    def end(self, ending: ProcessEnd, *, ahead: bool = False, since: float = 0.0, ended: float = 1.0, key: str = KEY):
        load = Load(key, digest(key.encode()), since, ahead)
        self.strikes.judge(load, Caller(1, READER), ending, ended)

    def forgive(self) -> None:
        self.strikes.forgive(Load(KEY, digest(KEY.encode()), 0.0, False), READER)

    @property
    def rows(self) -> list[int]:
        # Behind whatever these readers have in the line.
        for reader in (READER, READER + 1):
            self.shelf.writer.call(lambda: None, reader).result(20)
        rows = self.shelf.store.database.reading.execute("SELECT count FROM strikes ORDER BY rowid").fetchall()
        return [count for (count,) in rows]


@pytest.fixture
def judge(tmp_path):
    shelf = Shelf(tmp_path)
    yield Judge(shelf)
    shelf.close()


def pass_days(monkeypatch, days: float) -> None:
    now = time.time_ns() + int(days * 24 * 3600 * 10**9)
    monkeypatch.setattr("xcached.requests.strikes.time.time_ns", lambda: now)


def test_an_end_that_is_not_known_counts_where_the_load_was_asked_for(judge):
    judge.end(UNKNOWN)
    judge.end(UNKNOWN, since=2.0, ended=3.0)
    assert judge.rows == [2]
    assert judge.strikes.bars(digest(KEY.encode()), READER)


def test_ahead_it_makes_an_entry_suspected_for_a_day_and_the_second_time_for_good(judge, monkeypatch):
    for _ in range(3):
        judge.end(UNKNOWN, ahead=True)
    assert judge.rows == [0]
    assert judge.strikes.suspects(KEY, READER)
    assert not judge.strikes.suspects(KEY, READER + 1)
    judge.forgive()
    assert judge.strikes.suspects(KEY, READER)
    pass_days(monkeypatch, 1.1)
    assert not judge.strikes.suspects(KEY, READER)
    judge.end(UNKNOWN, ahead=True, since=2.0, ended=3.0)
    pass_days(monkeypatch, 100)
    judge.forgive()
    assert judge.strikes.suspects(KEY, READER)
    assert judge.rows == [0]


def test_a_crash_ahead_outlasts_loads_that_were_asked_for_and_days_and_the_daemon(judge, monkeypatch):
    """They load it when the program has done what loading needs, and prove nothing of the next load ahead."""
    judge.end(CRASHED, ahead=True)
    assert judge.rows == [1]
    judge.forgive()
    assert judge.rows == [0]
    pass_days(monkeypatch, 100)
    judge.end(CRASHED, key=digest(b"other"))
    for one in (judge, Judge(judge.shelf)):
        assert one.strikes.suspects(KEY, READER)
        assert not one.strikes.bars(digest(KEY.encode()), READER)
    judge.strikes.clear(READER)
    assert not judge.strikes.suspects(KEY, READER)


def test_crashes_ahead_alone_bar_nothing(judge):
    for _ in range(5):
        judge.end(CRASHED, ahead=True)
    assert not judge.strikes.bars(digest(KEY.encode()), READER)


@pytest.mark.parametrize("count", [2, 5])
def test_one_strike_is_left_of_a_bar_after_a_day(judge, monkeypatch, count):
    """The program may have crashed by itself; if it was the entry, one more crash a day is what it costs."""
    blob = digest(KEY.encode())
    for _ in range(count):
        judge.end(CRASHED)
    pass_days(monkeypatch, 0.9)
    assert judge.strikes.bars(blob, READER)
    pass_days(monkeypatch, 1.1)
    assert not judge.strikes.bars(blob, READER)
    assert judge.strikes.suspects(KEY, READER)
    judge.end(CRASHED)
    assert judge.strikes.bars(blob, READER)
    pass_days(monkeypatch, 1.1)
    judge.forgive()
    assert judge.rows == []
    judge.end(CRASHED)
    assert not judge.strikes.bars(blob, READER)


def test_programs_that_ended_together_in_a_way_that_is_not_known_count_once(judge):
    for ended in (1.0, 1.1, 1.2):
        judge.end(UNKNOWN, since=0.5, ended=ended)
    assert judge.rows == [1]
    for _ in range(2):
        judge.end(CRASHED, since=0.5)
    assert judge.rows == [3]


def test_another_end_counts_nothing(judge):
    judge.end(OTHERWISE)
    judge.end(OTHERWISE, ahead=True)
    assert judge.rows == []
    assert not judge.strikes.suspects(KEY, READER)


def test_each_reader_has_so_many_strikes_and_another_keeps_its_own(judge, monkeypatch):
    monkeypatch.setattr("xcached.requests.strikes._MOST_ROWS", 3)
    judge.strikes.judge(Load(KEY, digest(b"other"), 0.0, False), Caller(1, READER + 1), CRASHED, 1.0)
    for number in range(5):
        judge.end(CRASHED, key=digest(b"%d" % number))
    assert judge.rows == [1] * 4
    assert judge.strikes.suspects(KEY, READER + 1)
    assert not judge.strikes.suspects(digest(b"1"), READER)
    assert judge.strikes.suspects(digest(b"4"), READER)


def test_a_row_that_was_altered_is_passed_over(judge):
    judge.end(CRASHED)
    assert judge.rows == [1]
    judge.shelf.call(lambda store: _alter(store))
    again = Judge(judge.shelf)
    assert not again.strikes.suspects(KEY, READER)
    again.end(CRASHED)
    assert again.rows == [1]


def _alter(store):
    with store.transaction():
        store.database.writing.execute("UPDATE strikes SET count = 'many'")
