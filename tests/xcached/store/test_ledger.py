"""The rows of runs and their ledgers: the newest replace older ones, each user has a share, and old runs go first."""

from __future__ import annotations

import pytest
from support.stores import Shelf, shelf

from xcache.wire import commands, protocol
from xcache.wire.ledger import MISS, Row
from xcached.store.ledger import Ledger

KEY, MB = "ab" * 32, 1024**2


def row(position: int, **changes: object) -> Row:
    return Row(position, "jit_step", "train.py:1", "f32[8]", KEY, MISS, "new", "yes", "", "[]")._replace(**changes)


def record(made: Shelf, run: str, *rows: Row, uid: int = 1, ended: bool = False, facts: str = "") -> None:
    message = protocol.RecordRun(f"{run:0>16}", 1.0, ended, {"directory": facts}, [])
    assert made.call(lambda store: Ledger(store).record(uid, 7, "train.py", message, rows)) == protocol.Done()


def listed(made: Shelf, uid: int | None = None, before: int = 0) -> list[dict[str, protocol.Scalar]]:
    found = made.call(lambda store: Ledger(store).runs(uid, before))
    assert isinstance(found, commands.Runs)
    return found.runs


def rows_of(made: Shelf, run: int, uid: int | None = None, position: int = 0) -> list[Row]:
    found = made.call(lambda store: Ledger(store).rows(uid, commands.AskLedger(run, position)))
    assert isinstance(found, commands.LedgerRows)
    return [Row(*fields) for fields in found.rows]


@pytest.fixture
def made(tmp_path):
    with shelf(tmp_path, max_ledger=MB) as made:
        yield made
        made.check()


def test_rows_replace_those_of_the_same_position(made):
    record(made, "a", row(0), row(1, outcome="compiling"))
    record(made, "a", row(1, cause="evicted: size"), row(2), ended=True)
    (found,) = listed(made)
    assert (found["program"], found["pid"], found["began_at"]) == ("train.py", 7, 1.0)
    assert found["ended_at"] is not None
    assert rows_of(made, found["id"]) == [row(0), row(1, cause="evicted: size"), row(2)]


def test_a_run_is_as_large_as_its_rows(made):
    record(made, "a", row(0, shapes="f32[8]" * 100), row(1))
    record(made, "a", row(0), facts="/home")
    texts = " || ".join(name for name in Row._fields if name != "position")
    ((rows, count),) = made.query(f"SELECT sum(length({texts})), count(*) FROM ledger")  # noqa: S608 - our own words
    ((size, own),) = made.query("SELECT size, length(run || program || facts) FROM runs")
    assert size == rows + own + 40 * (count + 1)


def test_a_user_sees_only_their_own_runs_and_root_sees_all(made):
    record(made, "a", row(0), uid=1)
    record(made, "b", row(0), uid=2)
    assert [each["uid"] for each in listed(made)] == [2, 1]
    (own,) = listed(made, uid=1)
    assert rows_of(made, own["id"], uid=1) == [row(0)]
    assert rows_of(made, own["id"], uid=2) == []


def test_runs_and_rows_come_in_pages(made):
    for number in range(protocol.MAX_LISTED_RUNS + 5):
        record(made, str(number))
    first = listed(made)
    assert len(first) == protocol.MAX_LISTED_RUNS
    assert len(listed(made, before=first[-1]["id"])) == 5
    record(made, "long", *(row(position) for position in range(protocol.MAX_LISTED_ROWS + 3)))
    newest = listed(made)[0]["id"]
    assert len(rows_of(made, newest)) == protocol.MAX_LISTED_ROWS
    assert [each.position for each in rows_of(made, newest, position=protocol.MAX_LISTED_ROWS)] == [60, 61, 62]


def test_the_oldest_runs_of_the_user_with_the_most_go_first(tmp_path):
    with shelf(tmp_path, max_ledger=100_000) as made:
        record(made, "small", row(0), uid=1)
        for number in range(30):
            record(made, str(number), *(row(position, shapes="x" * 1000) for position in range(10)), uid=2)
        assert made.query("SELECT sum(size) <= 100000 FROM runs") == [(1,)]
        assert [each["uid"] for each in listed(made)][-1] == 1
        assert made.query("SELECT max(run) FROM runs WHERE uid = 2") == [(f"{29:0>16}",)]
        assert made.query("SELECT count(*) FROM ledger WHERE run NOT IN (SELECT id FROM runs)") == [(0,)]
        made.check()


def test_a_user_keeps_only_so_many_runs(made):
    for number in range(1010):
        record(made, str(number))
    assert made.query("SELECT count(*), min(run) FROM runs") == [(1000, f"{10:0>16}")]


def test_nothing_is_kept_where_the_setting_says_so(tmp_path):
    with shelf(tmp_path, max_ledger=0) as made:
        record(made, "a", row(0))
        assert listed(made) == []


def test_clearing_forgets_the_runs_of_a_user(made):
    record(made, "a", row(0), uid=1)
    record(made, "b", row(0), uid=2)
    made.call(lambda store: Ledger(store).clear(1))
    assert [each["uid"] for each in listed(made)] == [2]
    made.call(lambda store: Ledger(store).clear(None))
    assert listed(made) == []
