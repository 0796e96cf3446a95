"""Limits beside size: how many, how old, how full the disk; and what stays whatever they say."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import pytest
from support.conversation import key_of
from support.places import digest
from support.small_disk import SmallDisk
from support.stores import WRITER, Shelf, shelf

from xcache.wire import commands, protocol
from xcached.store.disk import Disk, usage_of
from xcached.store.entries import EntryKey
from xcached.store.evictor import Freed, Tally
from xcached.store.limits import Limits
from xcached.store.pins import Share

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
        made.writer.note_use(EntryKey(key_of(name), WRITER.uid), time.time())
    made.sync()


def pin(made: Shelf, names: str, share: int = 0) -> protocol.Message:
    entries = [EntryKey(key_of(name), WRITER.uid) for name in names]
    return made.call(lambda store: pinned(made, entries, made.evictor.pins.pin(entries, Share(bytes=share))))


def unpin(made: Shelf, names: str) -> protocol.Message:
    entries = [EntryKey(key_of(name), WRITER.uid) for name in names]
    return made.call(lambda store: pinned(made, entries, made.evictor.pins.unpin(entries)))


def pinned(made: Shelf, entries: list[EntryKey], changed: int) -> commands.Pinned:
    return commands.Pinned(changed, len(entries) - changed, *made.evictor.pins.of_all())


def evictions(made: Shelf) -> float:
    return dict(made.query("SELECT name, amount FROM statistics")).get("evictions", 0)


def test_the_log_counts_as_people_do():
    tally = Tally()
    tally.add(Freed(1, 20, 0, "size"))
    assert str(tally) == "1 entry, 20 bytes (1 by size)"
    tally.add(Freed(1, 20, 0, "quota"))
    assert str(tally) == "2 entries, 40 bytes (1 by quota, 1 by size)"


def test_an_entry_that_took_long_to_compile_stays(tmp_path):
    with shelf(tmp_path, max_size=50 * KB) as made:
        fill(made, "a", compile_seconds=100.0)
        fill(made, "bcdefgh")
        assert names_in(made) == "aefgh"


def test_an_entry_that_is_large_for_what_it_saves_goes(tmp_path):
    with shelf(tmp_path, max_size=50 * KB) as made:
        fill(made, "a", 30 * KB)
        fill(made, "bcd", 9 * KB)
        assert names_in(made) == "bcd"


def test_an_entry_that_is_used_often_stays(tmp_path):
    with shelf(tmp_path, max_size=50 * KB) as made:
        fill(made, "ab")
        use(made, "a", 5)
        fill(made, "cdefgh")
        assert names_in(made) == "aefgh"


def test_an_entry_that_was_used_often_long_ago_goes(tmp_path):
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
def test_a_new_entry_stays_until_those_who_wait_have_it(tmp_path, limit):
    """It is worth less than all others: they stay as well, and it goes a moment later."""
    with shelf(tmp_path, **{limit: 50 * KB}) as made:
        fill(made, "abcde", compile_seconds=100.0)
        with made.busy():
            answer = made.begin_put(key_of("f"), b"f" * 9 * KB, b"program")
            seen = made.begin_call(lambda store: protocol.Stored(store.has(EntryKey(key_of("f"), WRITER.uid))))
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


def test_an_entry_that_nobody_used_for_too_long_goes(tmp_path):
    with shelf(tmp_path, max_age=50 * DAY) as made:
        fill(made, "abcd")
        made.change("UPDATE entries SET last_used_at = last_used_at - ? WHERE used_order <= 2", 51 * DAY)
        made.sync()
        assert names_in(made) == "cd"
        made.check()


def test_an_entry_that_is_used_is_young_again(tmp_path):
    with shelf(tmp_path, max_age=50 * DAY) as made:
        fill(made, "ab")

        def grow_old_and_be_used(store):
            store.database.writing.execute("UPDATE entries SET last_used_at = last_used_at - ?", (51 * DAY,))
            made.writer.note_use(EntryKey(key_of("a"), WRITER.uid), time.time())
            return protocol.Done()

        # In one job, because the writer thread may look for old entries after each.
        made.call(grow_old_and_be_used)
        made.sync()
        assert names_in(made) == "a"


def test_a_clock_that_jumps_ahead_makes_nothing_too_old(tmp_path, monkeypatch):
    """The entry used last before the jump stays, and so do those used not long before it."""
    with shelf(tmp_path) as made:
        fill(made, "abc")
    made.change("UPDATE entries SET last_used_at = last_used_at - ? WHERE used_order = 1", 40 * DAY)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 10 * 365 * DAY)
    with shelf(tmp_path, max_age=50 * DAY) as made:
        made.sync()
        assert names_in(made) == "bc"


def test_a_clock_that_jumps_while_the_daemon_runs_makes_nothing_too_old(tmp_path, monkeypatch):
    with shelf(tmp_path, max_age=50 * DAY) as made:
        fill(made, "abc")
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 10 * 365 * DAY)
        made.sync()
        assert names_in(made) == "abc"


def test_a_clock_that_goes_back_makes_what_is_used_afterwards_no_older(tmp_path, monkeypatch):
    with shelf(tmp_path, max_age=10 * DAY) as made:
        fill(made, "ab")
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now - 11 * DAY)
        made.writer.note_use(EntryKey(key_of("a"), WRITER.uid), made.store.time_of_use())
        fill(made, "c")
        made.sync()
        assert names_in(made) == "abc"


def test_entries_age_while_no_daemon_runs(tmp_path, monkeypatch):
    with shelf(tmp_path) as made:
        fill(made, "ab")
    made.change("UPDATE entries SET last_used_at = last_used_at - ? WHERE used_order = 1", 40 * DAY)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 20 * DAY)
    with shelf(tmp_path, max_age=50 * DAY) as made:
        made.sync()
        assert names_in(made) == "b"


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


def test_bytes_being_written_count_before_the_disk_says_so(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    disk = Disk(lambda: usage_of(tmp_path), str(free // 2))
    assert disk.lacking(free // 4) <= 0
    assert disk.lacking(free // 4 * 3) > 0


def test_free_pages_of_the_database_are_as_good_as_free(tmp_path, monkeypatch):
    small = SmallDisk(tmp_path, monkeypatch, 10**7)
    with shelf(tmp_path) as made:
        fill(made, "abcdef")
        found = []

        def look(store):
            store.let_go([EntryKey(key_of("a"), WRITER.uid)])
            store.database.shrink_journal(0)
            free = made.evictor.shortage.free_page_bytes()
            made.evictor.end_grace()
            small.held = small.size
            full = made.evictor.shortage.available_bytes()
            for to_leave in (full, full + 1):
                made.evictor.set_limits(made.store.limits._replace(min_free=str(to_leave)))
                found.append(made.evictor.evict_some())
            return protocol.Stored(full >= free > 0)

        assert made.call(look) == protocol.Stored(True)
        enough, too_little = found
        assert enough is None
        assert too_little.entries > 0
        assert too_little.reason == "disk"


def test_a_share_of_a_large_disk_is_not_more_than_enough(tmp_path):
    disk = Disk(lambda: usage_of(tmp_path), "90%")
    disk.lacking()
    assert 0 < disk.seen[1] <= 20 * 1024**3


def test_a_pinned_entry_stays(tmp_path):
    with shelf(tmp_path, max_size=50 * KB, max_entries=4, max_age=50 * DAY) as made:
        fill(made, "ab")
        assert isinstance(pin(made, "a"), commands.Pinned)
        made.change("UPDATE entries SET last_used_at = last_used_at - ? WHERE pinned", 51 * DAY)
        fill(made, "cdefgh")
        assert names_in(made) == "afgh"
        assert unpin(made, "a") == commands.Pinned(1, 0, 0, 0)
        made.sync()
        assert names_in(made) == "fgh"


def test_a_pinned_entry_that_is_replaced_stays_pinned(tmp_path):
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
        # The users that are there are under the quota, and are not looked at again.
        made.store.limits = made.store.limits._replace(user_quota=quota)
        made.store.grown.clear()
        answer = pin(made, "abc", share)
        assert isinstance(answer, protocol.Refused) and answer.kind == "store full"
        assert made.query("SELECT count(*) FROM entries WHERE pinned") == [(0,)]
        assert pin(made, "ab", share) == commands.Pinned(
            2, 0, 2, made.query("SELECT sum(footprint) FROM entries WHERE pinned")[0][0]
        )


def test_a_quota_is_kept_among_ones_own(tmp_path):
    with shelf(tmp_path, user_quota=50 * KB) as made:
        fill(made, "a", compile_seconds=100.0)
        fill(made, "bcdefgh")
        assert names_in(made) == "aefgh"


@pytest.mark.parametrize("limit", ["max_size", "user_quota"])
def test_all_that_is_stale_goes_before_anything_else_does(tmp_path, limit):
    """This holds even if more has to go than one step evicts."""
    others = {name: digest(name.encode()) for name in ("program", *protocol.DESCRIBED_COMPONENTS)}
    with shelf(tmp_path) as made:
        for number in range(100):
            fill(made, [f"live {number}"], 5000, compile_seconds=0.1, components=others)
        for number in range(150):
            dear = {
                "components": others | {"toolchain": digest(b"stale")},
                "details": {name: name for name in protocol.DESCRIBED_COMPONENTS} | {"toolchain": "stale"},
            }
            fill(made, [f"stale {number}"], 5000, compile_seconds=100.0, **dear)
        made.stale = {(digest(b"stale"), WRITER.uid)}
        total = made.store.reader.totals()["bytes"]
        made.limit(**{limit: total - total // 250 * 120})
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
        left = [made.call(lambda store: commands.Removed(store.totals_now()["entries"], 0)).entries for _ in range(3)]
        assert left[0] > 0
        made.sync()
        assert made.store.reader.totals()["bytes"] <= 10 * KB
        made.check()


def test_a_stopping_daemon_does_not_first_empty_a_store_that_is_far_too_large(tmp_path):
    """The command that stops the daemon waits for it; the next daemon evicts the rest."""
    with shelf(tmp_path) as made:
        for number in range(200):
            made.begin_put(key_of(str(number)), b"executable", b"program")
        made.sync()
        with made.busy():
            # Together with the end, so that it has no time for it before.
            made.begin_call(lambda store: made.evictor.set_limits(Limits(max_entries=1)) or protocol.Done())
            made.writer.close()
    with shelf(tmp_path) as made:
        assert 100 < len(made.keys()) < 200
    with shelf(tmp_path, max_entries=1) as made:
        made.sync()
        assert len(made.keys()) == 1
