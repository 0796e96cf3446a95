"""Limits beside size: how many, how old, how full the disk; and what stays whatever they say."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable

import pytest
from conversation import key_of
from places import digest
from stores import WRITER, Shelf, shelf

from xcache import protocol
from xcached.ageing import AgeClock
from xcached.disk import Disk
from xcached.store import Entry

KB = 1000
DAY = 86400.0


def fill(made: Shelf, names: Iterable[str], size: int = 9 * KB, **changes: object) -> None:
    for name in names:
        content = (digest(name.encode()) * (size // 64 + 1)).encode()[:size]
        assert made.put(key_of(name), content, b"program of " + name.encode(), **changes) == protocol.Stored(True)


def names_in(made: Shelf, names: str = "abcdefghij") -> str:
    return "".join(name for name in names if made.get(key_of(name)) is not None)


def use(made: Shelf, name: str, times: int = 1) -> None:
    for _ in range(times):
        made.writer.note_use(Entry(key_of(name), WRITER.uid), time.time())
    made.sync()


def pin(made: Shelf, names: str, share: int = 0) -> protocol.Message:
    entries = [Entry(key_of(name), WRITER.uid) for name in names]
    return made.call(lambda store: protocol.Pinned(len(entries), *made.room.pin(entries, share)))


def unpin(made: Shelf, names: str) -> protocol.Message:
    entries = [Entry(key_of(name), WRITER.uid) for name in names]
    return made.call(lambda store: protocol.Pinned(len(entries), *made.room.unpin(entries)))


def evictions(made: Shelf) -> float:
    return dict(made.query("SELECT name, amount FROM statistics")).get("evictions", 0)


def test_what_took_long_to_compile_stays(tmp_path):
    with shelf(tmp_path, max_size=50 * KB) as made:
        fill(made, "a", compile_seconds=100.0)
        fill(made, "bcdefgh")
        assert names_in(made) == "aefgh"


def test_what_is_large_for_what_it_saves_goes(tmp_path):
    with shelf(tmp_path, max_size=50 * KB) as made:
        fill(made, "a", 30 * KB)
        fill(made, "bcd", 9 * KB)
        assert names_in(made) == "bcd"


def test_what_is_used_often_stays(tmp_path):
    with shelf(tmp_path, max_size=50 * KB) as made:
        fill(made, "ab")
        use(made, "a", 5)
        fill(made, "cdefgh")
        assert names_in(made) == "aefgh"


def test_what_was_used_often_long_ago_goes(tmp_path):
    with shelf(tmp_path, max_size=50 * KB) as made:
        fill(made, "abcde")
        use(made, "a", 20)
        for _ in range(60):
            use(made, "b", 5)
            use(made, "c", 5)
        fill(made, "fghi")
        assert names_in(made) == "bcghi"


def test_how_much_it_was_used_is_known_when_it_comes_back(tmp_path):
    with shelf(tmp_path) as made:
        fill(made, "ab")
        use(made, "a", 5)
        made.remove(key_of("a"))
        fill(made, "a")
        (uses,), (others,) = made.query("SELECT uses FROM entries ORDER BY uses DESC")
        assert uses > 3 * others
        assert others == 1


def test_overwriting_is_a_use(tmp_path):
    with shelf(tmp_path) as made:
        fill(made, "a")
        fill(made, "a", overwrite=True)
        ((uses,),) = made.query("SELECT uses FROM entries")
        assert 1 < uses <= 2


@pytest.mark.parametrize("limit", ["max_size", "user_quota"])
def test_what_has_just_come_stays_until_who_waits_for_it_has_it(tmp_path, limit):
    """It is worth less than all others: they stay as well, and it goes a moment later."""
    with shelf(tmp_path, **{limit: 50 * KB}) as made:
        fill(made, "abcde", compile_seconds=100.0)
        with made.busy():
            answer = made.begin_put(key_of("f"), b"f" * 9 * KB, b"program")
            seen = made.begin_call(lambda store: protocol.Stored(store.has(Entry(key_of("f"), WRITER.uid))))
        assert answer.result(20) == seen.result(20) == protocol.Stored(True)
        made.sync()
        assert names_in(made) == "abcde"
        assert evictions(made) == 1


def test_no_more_entries_than_there_may_be(tmp_path):
    with shelf(tmp_path, max_entries=3) as made:
        fill(made, "abcdefgh")
        assert names_in(made) == "fgh"
        made.check()
        assert evictions(made) == 5


def test_what_nobody_has_used_for_too_long_goes(tmp_path):
    with shelf(tmp_path, max_age=50 * DAY) as made:
        fill(made, "abcd")
        made.change("UPDATE entries SET used_clock = used_clock - ? WHERE used_order <= 2", 51 * DAY)
        made.sync()
        assert names_in(made) == "cd"
        made.check()


def test_what_is_used_is_young_again(tmp_path):
    with shelf(tmp_path, max_age=50 * DAY) as made:
        fill(made, "ab")
        made.change("UPDATE entries SET used_clock = used_clock - ?", 51 * DAY)
        use(made, "a")
        made.sync()
        assert names_in(made) == "a"


def clock_after(absence: float, max_age: float) -> float:
    """How much older a daemon that comes now takes the entries to be."""
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE clocks (name TEXT PRIMARY KEY, amount REAL)")
    with_age = [("age", 1000.0), ("seen at", time.time() - absence)]
    database.executemany("INSERT INTO clocks VALUES (?, ?)", with_age)
    age = AgeClock(database, max_age).now() - 1000.0
    database.close()
    return age


def test_entries_age_while_no_daemon_runs():
    assert 3 * DAY <= clock_after(3 * DAY, 90 * DAY) < 3 * DAY + 100


@pytest.mark.parametrize("max_age", [0.0, 7 * DAY])
def test_a_clock_that_jumps_ahead_makes_nothing_too_old(max_age):
    assert clock_after(10 * 365 * DAY, max_age) < (max_age or 31 * DAY)


def test_a_clock_that_jumps_back_makes_nothing_younger():
    assert 0 <= clock_after(-10 * 365 * DAY, 7 * DAY) < 100


def test_the_clock_of_ages_goes_on_where_the_last_daemon_left_it(tmp_path):
    with shelf(tmp_path) as made:
        fill(made, "a")
        use(made, "a")
        before = made.store.age_clock.now()
    made.change("UPDATE clocks SET amount = amount - ? WHERE name = 'seen at'", DAY)
    with shelf(tmp_path) as made:
        assert before + DAY - 5 < made.store.age_clock.now() < before + DAY + 100


def test_a_disk_that_is_too_full_has_no_room_and_everything_goes(tmp_path):
    """Somebody wants the whole disk to stay free."""
    with shelf(tmp_path) as made:
        fill(made, "abc", 40 * KB)
        fill(made, "def", 4 * KB)
    whole = os.statvfs(tmp_path)
    with shelf(tmp_path, min_free=str(whole.f_blocks * whole.f_frsize)) as made:
        answer = made.put(key_of("g"), b"g" * 40 * KB, b"program")
        assert isinstance(answer, protocol.Refused)
        assert answer.kind == "disk full"
        assert names_in(made) == ""
        made.check()


def test_a_disk_with_enough_room_is_left_alone(tmp_path):
    with shelf(tmp_path, min_free="1") as made:
        fill(made, "abc", 40 * KB)
        assert names_in(made) == "abc"
        assert evictions(made) == 0


def test_what_is_being_written_counts_before_the_disk_says_so(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    disk = Disk(tmp_path, str(free // 2))
    assert disk.lacking(free // 4) <= 0
    assert disk.lacking(free // 4 * 3) > 0


def test_free_pages_of_the_database_are_as_good_as_free(tmp_path, monkeypatch):
    with shelf(tmp_path) as made:
        fill(made, "abcdef")
        found = []

        def look(store):
            store.let_go([Entry(key_of("a"), WRITER.uid)])
            free = made.room.free_pages()
            made.room.begin()
            for lacking in (free, free + 1):
                with monkeypatch.context() as patch:
                    patch.setattr(made.room._disk, "lacking", lambda needed=0, lacking=lacking: lacking)
                    found.append(made.room.step())
            return protocol.Stored(free > 0)

        assert made.call(look) == protocol.Stored(True)
        enough, too_little = found
        assert enough is None
        assert too_little.entries > 0
        assert too_little.reason == "disk"


def test_a_share_of_a_large_disk_is_not_more_than_enough(tmp_path):
    disk = Disk(tmp_path, "90%")
    disk.lacking()
    assert 0 < disk._to_leave <= 20 * 1024**3


def test_what_is_pinned_stays(tmp_path):
    with shelf(tmp_path, max_size=50 * KB, max_entries=4, max_age=50 * DAY) as made:
        fill(made, "ab")
        assert isinstance(pin(made, "a"), protocol.Pinned)
        made.change("UPDATE entries SET used_clock = used_clock - ? WHERE pinned", 51 * DAY)
        fill(made, "cdefgh")
        assert names_in(made) == "afgh"
        assert unpin(made, "a") == protocol.Pinned(1, 0, 0)
        made.sync()
        assert names_in(made) == "fgh"


def test_what_is_pinned_and_replaced_stays_pinned(tmp_path):
    with shelf(tmp_path, max_size=50 * KB) as made:
        fill(made, "a")
        pin(made, "a")
        fill(made, "a", overwrite=True)
        fill(made, "bcdefgh")
        assert names_in(made) == "aefgh"


def test_pins_hold_after_a_restart_and_go_with_a_removal(tmp_path):
    with shelf(tmp_path, max_size=50 * KB) as made:
        fill(made, "a")
        pin(made, "a")
    with shelf(tmp_path, max_size=50 * KB) as made:
        fill(made, "bcdefgh")
        assert names_in(made) == "aefgh"
        made.remove(key_of("a"))
        fill(made, "a")
        assert made.query("SELECT count(*) FROM entries WHERE pinned") == [(0,)]


def test_a_store_full_of_pins_refuses_and_goes_on(tmp_path):
    with shelf(tmp_path, max_size=50 * KB) as made:
        fill(made, "abcde")
        pin(made, "abcde")
        answer = made.put(key_of("f"), b"f" * 9 * KB, b"program")
        assert isinstance(answer, protocol.Refused)
        assert answer.kind == "store full"
        assert names_in(made) == "abcde"
        unpin(made, "a")
        fill(made, "g")
        assert names_in(made) == "bcdeg"
        made.check()


def test_pins_up_to_the_number_of_entries(tmp_path):
    with shelf(tmp_path, max_entries=2) as made:
        fill(made, "ab")
        pin(made, "ab")
        answer = made.put(key_of("c"), b"c", b"program")
        assert isinstance(answer, protocol.Refused) and answer.kind == "store full"


@pytest.mark.parametrize(("quota", "share"), [(20 * KB, 0), (0, 20 * KB)], ids=["quota", "share"])
def test_nobody_pins_more_than_they_may_have(tmp_path, quota, share):
    with shelf(tmp_path) as made:
        fill(made, "abc")
        made.store.grown.clear()
        made.store.user_quota = quota
        answer = pin(made, "abc", share)
        assert isinstance(answer, protocol.Refused) and answer.kind == "store full"
        assert made.query("SELECT count(*) FROM entries WHERE pinned") == [(0,)]
        assert pin(made, "ab", share) == protocol.Pinned(2, 2, 18 * KB + 2 * len("program of a"))


def test_a_quota_is_kept_among_ones_own(tmp_path):
    with shelf(tmp_path, user_quota=50 * KB) as made:
        fill(made, "a", compile_seconds=100.0)
        fill(made, "bcdefgh")
        assert names_in(made) == "aefgh"


@pytest.mark.parametrize("limit", ["max_size", "user_quota"])
def test_all_that_is_stale_goes_before_anything_else_does(tmp_path, limit):
    """Also where more goes at once than is taken out in one step."""
    others = {name: digest(name.encode()) for name in ("program", *protocol.DESCRIBED_COMPONENTS)}
    with shelf(tmp_path) as made:
        for number in range(100):
            fill(made, [f"live {number}"], 5000, compile_seconds=0.1, components=others)
        for number in range(150):
            dear = others | {"toolchain": digest(b"stale")}
            fill(made, [f"stale {number}"], 5000, compile_seconds=100.0, components=dear)
        made.room.stale = lambda: {digest(b"stale")}
        total = made.store.reading.totals()["bytes"]
        limits = {"max_size": 0, "user_quota": 0, "max_age": 0.0, limit: total - total // 250 * 120}
        made.store.limit(**limits)
        made.sync()
        left = [made.get(key_of(f"stale {number}")) for number in range(150)]
        assert 0 < len([one for one in left if one is not None]) < 40
        assert all(made.get(key_of(f"live {number}")) for number in range(100))
        made.check()


def test_making_much_room_lets_others_in_between(tmp_path):
    """A limit that is far less than before is reached step by step, and nobody has to wait for all of it."""
    with shelf(tmp_path) as made:
        for number in range(600):
            made.begin_put(key_of(str(number)), str(number).encode() * 100, b"program")
    with shelf(tmp_path, max_size=10 * KB) as made:
        # There is always somebody else who wants something.
        left = [made.call(lambda store: protocol.Removed(store.totals_now()["entries"], 0)).entries for _ in range(3)]
        assert left[0] > 0
        made.sync()
        assert made.store.reading.totals()["bytes"] <= 10 * KB
        made.check()


def test_who_leaves_does_not_first_empty_a_store_that_is_far_too_large(tmp_path):
    """Whoever stops the daemon waits for it; the next one has the rest."""
    with shelf(tmp_path) as made:
        for number in range(200):
            made.begin_put(key_of(str(number)), b"executable", b"program")
        made.sync()
        with made.busy():
            # Together with the end, so that it has no time for it before.
            made.begin_call(lambda store: made.room.limit(1, "0") or protocol.Done())
            made.writer._jobs.put(None)
    with shelf(tmp_path) as made:
        assert 100 < len(made.keys()) < 200
    with shelf(tmp_path, max_entries=1) as made:
        made.sync()
        assert len(made.keys()) == 1
