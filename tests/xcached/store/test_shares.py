"""Users who share a store: nobody takes more than a fair share, in bytes, rows, pins or the word of what it cost."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable

import pytest
from sqlite_utils import Database
from support.conversation import key_of
from support.places import digest
from support.stores import Shelf, shelf

from xcache.wire import commands, protocol
from xcached.store import database, schema
from xcached.store.entries import EntryKey
from xcached.store.histories import Histories
from xcached.store.limits import LEAST_ROOM
from xcached.store.pins import Share

KB = 1000
MB = 1000 * KB


def fill(made: Shelf, names: Iterable[str], size: int, **changes: object) -> None:
    for name in names:
        content = (digest(name.encode()) * (size // 64 + 1)).encode()[:size]
        assert made.put(key_of(name), content, b"p", **changes) == protocol.Stored(True)


def by_user(made: Shelf) -> dict[int, int]:
    return dict(made.query("SELECT writer_uid, count(*) FROM entries GROUP BY writer_uid"))


def test_the_user_with_most_bytes_makes_the_room(tmp_path):
    """It does so however long it claims that its entries took to compile."""
    with shelf(tmp_path, max_size=500 * KB, shared=True) as made:
        fill(made, [f"small {number}" for number in range(15)], 10 * KB, uid=1, compile_seconds=0.01)
        fill(made, [f"dear {number}" for number in range(100)], 10 * KB, uid=2, compile_seconds=9e15)
        made.sync()
        assert by_user(made)[1] == 15
        assert 25 <= by_user(made)[2] <= 35
        made.check()


def test_the_user_with_most_entries_makes_the_room(tmp_path):
    with shelf(tmp_path, max_entries=20, shared=True) as made:
        fill(made, "abcde", 100, uid=1, compile_seconds=0.01)
        fill(made, [f"dear {number}" for number in range(40)], 100, uid=2, compile_seconds=1e6)
        made.sync()
        assert by_user(made) == {1: 5, 2: 15}


def test_nobody_goes_below_a_fair_share_for_another(tmp_path):
    """Entries that are too large for what one may have take the place of one's own."""
    with shelf(tmp_path, max_size=100 * KB, shared=True) as made:
        fill(made, "abcd", 10 * KB, uid=1, compile_seconds=0.01)
        fill(made, "efg", 10 * KB, uid=2, compile_seconds=0.01)
        fill(made, "h", 90 * KB, uid=2, compile_seconds=100.0)
        made.sync()
        assert by_user(made)[1] == 4
        made.check()


@pytest.mark.parametrize("limit", [{"max_size": 500 * KB}, {"max_entries": 50}])
def test_pins_beyond_a_fair_share_lapse_where_others_would_go_below_theirs(tmp_path, limit):
    """One user pinned a quarter of the store before the others came."""
    with shelf(tmp_path, shared=True, **limit) as made:
        names = [f"1 {number}" for number in range(12)]
        fill(made, names, 10 * KB, uid=1)
        entries = [EntryKey(key_of(name), 1) for name in names]
        assert made.call(lambda _: made.evictor.pins.pin(entries, Share()) and None) == protocol.Done()
        for uid in range(2, 7):
            fill(made, [f"{uid} {number}" for number in range(10)], 10 * KB, uid=uid)
        made.sync()
        left = by_user(made)
        assert min(left.values()) >= 8
        assert left[1] < 12
        # The rest of the pins hold.
        assert made.query("SELECT count(*) FROM entries WHERE pinned AND writer_uid = 1") == [(left[1],)]
        made.check()


def test_pins_of_several_do_not_close_the_store_to_another(tmp_path):
    with shelf(tmp_path, max_size=500 * KB, shared=True) as made:
        for uid in range(1, 5):
            names = [f"{uid} {number}" for number in range(12)]
            fill(made, names, 10 * KB, uid=uid)
            entries = [EntryKey(key_of(name), uid) for name in names]
            assert (
                made.call(lambda _, entries=entries: made.evictor.pins.pin(entries, Share()) and None)
                == protocol.Done()
            )
        fill(made, [f"5 {number}" for number in range(6)], 10 * KB, uid=5)
        made.sync()
        assert by_user(made)[5] >= 5


def test_the_stated_compile_time_has_a_limit(tmp_path):
    with shelf(tmp_path) as made:
        fill(made, "a", 10, compile_seconds=9e15)
        assert made.query("SELECT compile_seconds FROM entries") == [(86400.0,)]


WIDE = {
    "module_name": "\N{SNOWMAN}" * 5000,
    "device_kind": "\N{SNOWMAN}" * 5000,
    "platform": "\N{SNOWMAN}" * 5000,
    "jaxlib_version": "\N{SNOWMAN}" * 5000,
}


def fill_with_text(made: Shelf, count: int) -> None:
    for number in range(count):
        details = {name: f"{name} {number}".ljust(5000, "\N{SNOWMAN}") for name in protocol.DESCRIBED_COMPONENTS}
        components = {name: digest(text.encode()) for name, text in {"program": "", **details}.items()}
        fill(made, [str(number)], 5, components=components, details=details, **WIDE)


def test_texts_are_counted(tmp_path):
    """Tiny entries with wide texts once made a database of a gigabyte where 12 MB were counted."""
    with shelf(tmp_path, max_size=1 * MB) as made:
        fill_with_text(made, 100)
        made.sync()
        assert 10 < len(made.keys()) < 20
        made.check()
        ((pages,),) = made.query("SELECT page_count - freelist_count FROM pragma_page_count(), pragma_freelist_count()")
        assert pages * 4096 < 2 * MB


def test_texts_count_against_a_quota(tmp_path):
    with shelf(tmp_path, user_quota=1 * MB) as made:
        fill_with_text(made, 100)
        made.sync()
        assert 10 < len(made.keys()) < 20


def test_a_quota_is_one_of_entries_too(tmp_path):
    with shelf(tmp_path, user_quota=20 * LEAST_ROOM) as made:
        fill(made, map(str, range(40)), 5)
        made.sync()
        assert len(made.keys()) == 20


def remember(made: Shelf, uid: int, program: str, count: int = 20) -> None:
    items = [
        {"key": key_of(f"{program} {number}"), "options": digest(b"o"), "devices": "0", "platform": "x" * 2000,
         "seconds": 0.5} for number in range(count)
    ]  # fmt: skip
    message = protocol.Remember(program, "a", items, {digest(b"o"): b"o"})
    assert made.call(lambda store: Histories(store).remember(uid, message)) == protocol.Done()


def test_histories_take_a_share_of_the_store_and_the_largest_user_forgets_first(tmp_path):
    with shelf(tmp_path, max_size=20 * MB) as made:
        for number in range(3):
            remember(made, 1, f"small {number}")
        for number in range(60):
            remember(made, 2, f"program {number}")
        sizes = dict(made.query("SELECT uid, sum(size) FROM histories GROUP BY uid"))
        assert sum(sizes.values()) <= 1 * MB
        assert made.query("SELECT count(*) FROM histories WHERE uid = 1") == [(3,)]
        assert made.query("SELECT program FROM histories ORDER BY id DESC LIMIT 1") == [("program 59",)]
        assert made.query("SELECT count(*) FROM wanted WHERE history NOT IN (SELECT id FROM histories)") == [(0,)]
        made.check()


def test_histories_are_as_large_as_they_say(tmp_path):
    with shelf(tmp_path) as made:
        remember(made, 1, "program")
        texts = "60 + length(program || arguments || options)"
        wanted = "SELECT sum(60 + length(CAST(key || options || devices || platform AS BLOB))) FROM wanted"
        sizes = made.query(f"SELECT size, {texts} + ({wanted}) FROM histories")  # noqa: S608 - our own words
        assert all(size == there for size, there in sizes) and sizes


def test_clearing_forgets_histories(place, talk):
    item = {"key": key_of("a"), "options": digest(b"o"), "devices": "0", "platform": "cpu", "seconds": 0.5}
    assert talk.ask(protocol.Remember("p", "a", [item], {digest(b"o"): b"o"})) == protocol.Done()
    assert place.query("SELECT count(*) FROM histories") == [(1,)]
    assert isinstance(talk.ask(commands.Clear()), commands.Removed)
    assert place.query("SELECT count(*) FROM histories") == place.query("SELECT count(*) FROM wanted") == [(0,)]


def test_collecting_garbage_forgets_histories_that_are_too_large(tmp_path):
    with shelf(tmp_path) as made:
        for number in range(60):
            remember(made, 2, f"program {number}")
    with shelf(tmp_path, max_size=10 * MB) as made:
        made.call(lambda store: Histories(store).trim())
        assert made.query("SELECT sum(size) < 500000 AND count(*) > 5 FROM histories") == [(1,)]


def test_a_reader_that_stays_does_not_make_the_journal_grow_without_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "MOST_JOURNAL_BYTES", 500 * KB)
    with shelf(tmp_path) as made:
        fill(made, "a", 10)
        with contextlib.closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM entries").fetchall()
            answers = [made.put(key_of(str(number)), b"x" * 20 * KB, str(number).encode()) for number in range(100)]
            kinds = [answer.kind for answer in answers if isinstance(answer, protocol.Refused)]
            assert set(kinds) == {"store busy"} and len(kinds) > 50
            assert (tmp_path / "store.db-wal").stat().st_size < 1500 * KB
            assert len(made.keys()) == 101 - len(kinds)
        fill(made, "b", 10)
        made.check()


def test_a_store_of_the_version_before_counts_its_rows(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        schema.migrations.apply(Database(connection, execute_plugins=False), stop_before="m007_judged_anew")
        connection.execute("INSERT INTO not_cacheable VALUES ('k', 1, 'm', 'a sort', 1.0)")
        connection.execute("INSERT INTO runs VALUES (1, 1, 'p', 'a', '{}', 1.0)")
        connection.execute("INSERT INTO wanted VALUES (1, 0, 'key', 'o', 'd', 'cpu', 1.0)")
        connection.execute("INSERT INTO users VALUES (7, 0, 0)")
        connection.execute("INSERT INTO compile_times VALUES ('gone', 5.0, 3.0, 0.5)")
    with shelf(tmp_path) as made:
        assert made.query("SELECT * FROM compile_times") == [("gone", 7, 5.0, 3.0, 0.5, None)]
        assert made.query("SELECT name FROM sqlite_master WHERE name = 'idx_wanted_key'") == []
        assert made.query("SELECT size FROM histories") == [(len("pa{}keyodcpu") + 2 * 60,)]
        made.check()
        fill(made, "a", 10)
        made.check()
