"""Making room: the entries used longest ago go, no more than must, at a cost that does not grow with the store."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import time

import measure_room
import pytest
from support.conversation import key_of
from support.places import digest, put_message
from support.stores import WRITER, Shelf, shelf

from xcache.wire import protocol
from xcached.store.entries import EntryKey, Source
from xcached.store.evictor import Evictor
from xcached.store.limits import Limits
from xcached.store.store import Store

KB = 1000


def content(name: str, size: int) -> bytes:
    return (digest(name.encode()) * (size // 64 + 1)).encode()[:size]


def fill(made: Shelf, names: str, size: int, program_size: int = 10) -> None:
    for name in names:
        answer = made.put(key_of(name), content(name, size), content(f"program of {name}", program_size))
        assert answer == protocol.Stored(True)


def names_in(made: Shelf, names: str) -> str:
    return "".join(name for name in names if made.get(key_of(name)) is not None)


def test_the_oldest_goes_and_no_other(tmp_path):
    with shelf(tmp_path, max_size=50 * KB) as made:
        fill(made, "abcde", 9 * KB)
        assert names_in(made, "abcde") == "abcde"
        fill(made, "f", 9 * KB)
        assert names_in(made, "abcdef") == "bcdef"
        made.check()
        assert dict(made.query("SELECT name, amount FROM statistics"))["evictions"] == 1


def test_no_limit_is_no_limit(tmp_path):
    with shelf(tmp_path, max_size=0) as made:
        fill(made, "abcdefgh", 30 * KB)
        assert names_in(made, "abcdefgh") == "abcdefgh"


def test_an_entry_that_was_used_stays(tmp_path):
    with shelf(tmp_path, max_size=50 * KB) as made:
        fill(made, "abcde", 9 * KB)
        made.writer.note_use(EntryKey(key_of("a"), WRITER.uid), time.time())
        made.sync()
        fill(made, "f", 9 * KB)
        assert names_in(made, "abcdef") == "acdef"


def test_an_entry_that_was_used_a_moment_ago_stays(tmp_path):
    """The daemon writes uses every few seconds; an eviction before that must not forget them."""
    with shelf(tmp_path, max_size=50 * KB) as made:
        fill(made, "abcde", 9 * KB)
        made.writer.note_use(EntryKey(key_of("a"), WRITER.uid), time.time())
        fill(made, "f", 9 * KB)
        assert names_in(made, "abcdef") == "acdef"


def test_programs_are_room_as_well(tmp_path):
    """Where the programs are large, one entry frees enough, and the others must not go with it."""
    with shelf(tmp_path, max_size=100 * KB) as made:
        fill(made, "abcd", 100, program_size=24 * KB)
        fill(made, "e", 100, program_size=24 * KB)
        assert names_in(made, "abcde") == "bcde"
        made.check()


def test_a_shared_program_counts_as_room_once_both_entries_go(tmp_path):
    """Two entries share a large program: with both of them gone there is room, and the next entry stays."""
    with shelf(tmp_path, max_size=100 * KB) as made:
        for name in "ab":
            assert made.put(key_of(name), content(name, 100), content("shared", 24 * KB)) == protocol.Stored(True)
        fill(made, "cde", 100, program_size=24 * KB)
        fill(made, "f", 100, program_size=24 * KB)
        assert names_in(made, "abcdef") == "cdef"
        made.check()


def test_shared_contents_are_freed_with_their_last_entry(tmp_path):
    with shelf(tmp_path, max_size=100 * KB) as made:
        for name in "abcdefgh":
            assert made.put(key_of(name), content("same", 30 * KB), b"program") == protocol.Stored(True)
        assert names_in(made, "abcdefgh") == "abcdefgh"
        fill(made, "xyz", 30 * KB)
        made.check()
        assert made.store.reader.totals()["bytes"] <= 100 * KB
        assert names_in(made, "xyz") == "xyz"


def test_an_entry_larger_than_the_store_may_be_is_refused(tmp_path):
    with shelf(tmp_path, max_size=50 * KB) as made:
        fill(made, "abcde", 9 * KB)
        answer = made.put(key_of("f"), content("f", 51 * KB), b"program")
        assert isinstance(answer, protocol.Refused)
        assert answer.kind == "too large"
        assert names_in(made, "abcdef") == "abcde"
        made.check()


def test_an_entry_too_large_with_its_program_does_not_empty_the_store(tmp_path):
    """If stored, it would evict all others and then itself."""
    with shelf(tmp_path, max_size=50 * KB) as made:
        fill(made, "abcde", 9 * KB)
        answer = made.put(key_of("f"), content("f", 26 * KB), content("program", 26 * KB))
        assert names_in(made, "abcde") == "abcde"
        assert isinstance(answer, protocol.Refused)


def test_overwriting_makes_room_for_the_difference_only(tmp_path):
    with shelf(tmp_path, max_size=50 * KB) as made:
        fill(made, "abcde", 9 * KB)
        assert made.put(key_of("c"), content("C", 8 * KB), b"p", overwrite=True) == protocol.Stored(True)
        assert names_in(made, "abcde") == "abcde"
        made.check()


def test_a_smaller_limit_holds_from_the_start(tmp_path):
    with shelf(tmp_path) as made:
        fill(made, "abcde", 9 * KB)
    with shelf(tmp_path, max_size=30 * KB) as made:
        made.sync()
        assert made.store.reader.totals()["bytes"] <= 30 * KB
        assert names_in(made, "abcde") == "cde"
        made.check()


@pytest.mark.parametrize("seed", range(3))
def test_the_limit_holds_whatever_comes(tmp_path, seed):
    chance = random.Random(seed)
    with shelf(tmp_path, max_size=200 * KB) as made:
        for _ in range(60):
            name = chance.choice("abcdefghij")
            payload = content(chance.choice("abc"), chance.choice([10, KB, 30 * KB, 40 * KB, 90 * KB]))
            program = content(chance.choice("pq"), chance.choice([10, 20 * KB, 50 * KB]))
            answer = made.put(key_of(name), payload, program, overwrite=chance.random() < 0.5)
            assert isinstance(answer, protocol.Stored)
            assert made.store.reader.totals()["bytes"] <= 200 * KB
            if answer.kept:
                assert made.get(key_of(name)) in (payload, None)
            made.check()


def steps_to_evict_one(directory, count: int) -> int:
    """Return the steps of SQLite that make room for one more entry in a store of so many."""
    directory.mkdir()
    store = Store(directory, Limits(count * 4096))
    store_many(store, 0, count)
    store_many(store, count, count + 1)
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    store.database.writing.set_progress_handler(step, 10)
    freed = Evictor(store).evict_some()
    store.database.writing.set_progress_handler(None, 0)
    assert freed is not None and freed.entries == 1
    store.close()
    return steps


def store_many(store: Store, start: int, end: int) -> None:
    with store.transaction():
        for number in range(start, end):
            payload = content(str(number), 100)
            message = put_message(key_of(str(number)), payload, b"")
            sources = (Source(message.digest, 100, payload, None), Source(digest(b""), 0, b"", None))
            store.put(message, *sources, WRITER)


def test_making_room_costs_in_proportion_to_what_goes(tmp_path):
    few, many = (steps_to_evict_one(tmp_path / str(count), count) for count in (100, 3000))
    assert many < 3 * few


def test_no_statement_walks_over_everything(tmp_path):
    """Puts, uses and evictions for every reason: each row is found by an index, and nothing has to be sorted."""
    statements = set()
    with shelf(tmp_path, max_size=50 * KB, max_entries=4, max_age=1000.0, user_quota=49 * KB, min_free="1") as made:
        made.call(lambda store: store.database.writing.set_trace_callback(statements.add))
        # The store has no entry of these, and looks for them all the same.
        made.stale = {(digest(name.encode()), WRITER.uid) for name in ("stale", "another")}
        fill(made, "abcdefgh", 9 * KB)
        made.writer.note_use(EntryKey(key_of("h"), WRITER.uid), time.time())
        made.sync()
        made.call(lambda store: store.database.writing.set_trace_callback(None))
        # These have few rows: one for each limit, user, kind of counter, or sharer up to the most that are counted.
        small = ("totals", "users", "statistics", "CONSTANT ROW", "(subquery-1)", "INDEX 1:")
        asked = [one for one in statements if one.split(" ")[0] in ("SELECT", "UPDATE", "DELETE", "INSERT")]
        assert len(asked) > 20
        with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as database:
            for statement in asked:
                for *_, step in database.execute(f"EXPLAIN QUERY PLAN {statement}"):
                    walks = step.startswith("SCAN") and "USING" not in step and not step.endswith(small)
                    assert not walks and "TEMP B-TREE" not in step, (statement, step)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_put_that_evicts_costs_the_same_in_a_large_store(tmp_path):
    """Counted in steps of SQLite; scripts/measure_room.py does it for a million."""
    counts = (1000, 20_000)
    few, many = (measure_room.measure(tmp_path_of(tmp_path, count), count)["steps"] for count in counts)
    assert many < 1.1 * few


def tmp_path_of(tmp_path, count: int):
    (tmp_path / str(count)).mkdir()
    return tmp_path / str(count)


def test_an_emptied_store_gives_the_disk_back(tmp_path):
    """A user who clears a store wants the room on the disk."""
    from xcached.requests.removals import removed

    with shelf(tmp_path) as made:
        for number in range(100):
            made.begin_put(key_of(str(number)), content(str(number), 30 * KB), b"program")
        made.sync()
        assert (tmp_path / "store.db").stat().st_size + (tmp_path / "store.db-wal").stat().st_size > 3000 * KB
        assert made.call(lambda store: removed(store, store.entries_of(None))).entries == 100
        made.sync()
    assert (tmp_path / "store.db").stat().st_size < 500 * KB


def test_eviction_gives_the_disk_back(tmp_path):
    with shelf(tmp_path, max_size=4000 * KB) as made:
        for number in range(120):
            made.begin_put(key_of(str(number)), content(str(number), 30 * KB), b"program")
        made.put(key_of("huge"), content("huge", 3900 * KB), b"program", compile_seconds=1000.0)
        assert made.get(key_of("huge")) is not None
        assert len(made.keys()) <= 4
    assert (tmp_path / "store.db").stat().st_size < 1500 * KB
