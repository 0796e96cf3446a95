"""Users who share a store: what one of them has beside entries is bounded by itself, and costs no other user any."""

from __future__ import annotations

import os
from typing import Any

import pytest
from support.conversation import key_of
from support.places import digest
from support.small_disk import SmallDisk
from support.stores import Shelf, shelf

from xcache.wire import commands, protocol
from xcached.caller import Caller, Load, Process
from xcached.requests import strikes
from xcached.requests.process_ends import ProcessEnd
from xcached.requests.strikes import Strikes
from xcached.store import disk, quarantine, store
from xcached.store.entries import EntryKey
from xcached.store.histories import Histories
from xcached.store.quarantine import Quarantine
from xcached.toolchains import rows
from xcached.toolchains.installations import HERE, Installation
from xcached.toolchains.rows import ToolchainRows

KB = 1000
ALICE, BOB = 1, 2


def fill(made: Shelf, uid: int, count: int, size: int, **changes: Any) -> None:
    for number in range(count):
        answer = made.put(key_of(f"{uid} {number}"), os.urandom(size), b"p", uid=uid, **changes)
        assert answer == protocol.Stored(True)


def entries_of(made: Shelf, uid: int) -> int:
    ((count,),) = made.query(f"SELECT count(*) FROM entries WHERE writer_uid = {uid}")  # noqa: S608 - a number
    return count


def mark(made: Shelf, uid: int, names: list[str], text: str = "because") -> None:
    def work(store: store.Store) -> None:
        with store.transaction():
            for name in names:
                store.mark_not_cacheable(protocol.MarkNotCacheable(key_of(name), text, text), uid)

    made.call(work)


def marks_of(made: Shelf, uid: int) -> list[str]:
    return [key for (key,) in made.query(f"SELECT key FROM not_cacheable WHERE writer_uid = {uid} ORDER BY rowid")]  # noqa: S608


def remember(made: Shelf, uid: int, program: str, count: int, platform: str = "cpu") -> None:
    item = {"options": digest(b"o"), "devices": "0", "platform": platform, "seconds": 0.5}
    items = [item | {"key": key_of(f"{program} {number}")} for number in range(count)]
    message = protocol.Remember(program, "a", items, {digest(b"o"): b"o"})
    made.call(lambda store: Histories(store).remember(uid, message))


def announce(made: Shelf, uid: int, name: str) -> None:
    files = tuple(
        protocol.InstalledFile(f"/{name}/{number}/{'x' * 3000}", 1, 1, 1, digest(b"x")) for number in range(50)
    )
    installation = Installation(digest(name.encode()), uid, files, HERE, 1.0)
    message = protocol.Announce(installation.toolchain, "cpu", "1", "x" * 9000, [])
    made.call(lambda store: ToolchainRows(store).save(installation, message))


def set_aside(made: Shelf, uid: int, name: str, size: int) -> None:
    made.put(key_of(name), os.urandom(size), b"p", uid=uid)
    judge = Quarantine(made.store, made.directory / "quarantine", lambda reader, writer: True)
    made.call(lambda store: judge.set_aside(EntryKey(key_of(name), uid), "x" * 500))


WAYS = {
    "marks": lambda made: mark(made, BOB, [str(number) for number in range(2500)], "x" * 500),
    "histories": lambda made: [remember(made, BOB, f"program {number}", 20, "x" * 500) for number in range(30)],
    "installations": lambda made: [announce(made, BOB, f"toolchain {number}") for number in range(5)],
    "quarantine": lambda made: [set_aside(made, BOB, f"damaged {number}", 20 * KB) for number in range(5)],
    "counters": lambda made: made.writer.note_counts({f"errors:{'x' * 150} {number}": 1 for number in range(900)}),
}


@pytest.mark.parametrize("way", WAYS)
def test_nobodys_rows_cost_another_user_an_entry(tmp_path, way):
    with shelf(tmp_path, max_size=1000 * KB, shared=True) as made:
        fill(made, ALICE, 48, 20 * KB)
        WAYS[way](made)
        made.sync()
        assert made.query("SELECT amount > 40000 FROM totals WHERE name = 'other_bytes'") == [(1,)]
        assert entries_of(made, ALICE) == 48
        made.check()


def test_marks_take_room_from_the_entries_of_ones_own_store(tmp_path):
    with shelf(tmp_path, max_size=1000 * KB) as made:
        fill(made, ALICE, 48, 20 * KB)
        WAYS["marks"](made)
        made.sync()
        assert entries_of(made, ALICE) < 48
        made.check()


def test_a_user_forgets_marks_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_MOST_MARKS", 3)
    with shelf(tmp_path, shared=True) as made:
        mark(made, ALICE, ["a", "b"])
        mark(made, BOB, list("cdefg"))
        mark(made, ALICE, ["h", "i"])
        assert marks_of(made, ALICE) == [key_of(name) for name in "bhi"]
        assert marks_of(made, BOB) == [key_of(name) for name in "efg"]
        made.check()


def test_how_often_an_entry_was_used_is_remembered_of_its_writer(tmp_path, monkeypatch):
    """Another user can neither push that out nor say something else under the same key."""
    monkeypatch.setattr(store, "_MOST_ROWS", 3)
    monkeypatch.setattr(store, "_REMOVALS_PER_TRIM", 1)
    with shelf(tmp_path, shared=True) as made:
        fill(made, ALICE, 2, 10)
        made.put(key_of("1 0"), b"bob's", b"p", uid=BOB)
        for _ in range(5):
            made.writer.note_use(EntryKey(key_of("1 0"), BOB), 1.0)
        fill(made, BOB, 10, 10)
        made.sync()
        made.call(lambda store: store.let_go(store.entries_of(None)) and None)
        of_whom = dict(made.query("SELECT writer_uid, count(*) FROM compile_times GROUP BY writer_uid"))
        assert of_whom == {ALICE: 2, BOB: 3}
        fill(made, ALICE, 1, 10)
        ((uses,),) = made.query(f"SELECT uses FROM entries WHERE writer_uid = {ALICE}")  # noqa: S608 - a number
        assert 1 < uses <= 2


def test_no_more_is_remembered_of_what_went_than_a_user_has(tmp_path, monkeypatch):
    """Nobody has rows by the ten thousand for entries that are put and removed again."""
    monkeypatch.setattr(store, "_LEAST_ROWS", 3)
    monkeypatch.setattr(store, "_REMOVALS_PER_TRIM", 1)
    with shelf(tmp_path, shared=True) as made:
        for uid, left in ((ALICE, 6), (BOB, 1)):
            fill(made, uid, 10, 10)
            gone = [EntryKey(key_of(f"{uid} {number}"), uid) for number in range(left, 10)]
            made.call(lambda store, gone=gone: store.let_go(gone) and None)
        of_whom = dict(made.query("SELECT writer_uid, count(*) FROM compile_times GROUP BY writer_uid"))
        assert of_whom == {ALICE: 4, BOB: 3}
        made.check()


def test_a_user_forgets_changes_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_MOST_INVALIDATIONS", 3)
    with shelf(tmp_path, shared=True) as made:
        for uid, reason in [(ALICE, "hers"), *((BOB, f"his {number}") for number in range(5)), (ALICE, "hers")]:
            made.call(
                lambda store, u=uid, r=reason: ToolchainRows(store).invalidated(r * 900, commands.Removed(2, 20), u)
            )
        noted = made.query(
            "SELECT uid, substr(reason, 1, 5), entries, length(reason) FROM invalidations ORDER BY rowid"
        )
        assert noted == [(ALICE, "hersh", 4, 500), *((BOB, f"his {number}", 2, 500) for number in (2, 3, 4))]


def test_the_user_who_has_most_set_aside_forgets_first(tmp_path, monkeypatch):
    monkeypatch.setattr(quarantine, "_MOST_KEPT_ROWS", 5)
    with shelf(tmp_path, shared=True) as made:
        set_aside(made, ALICE, "hers", 10)
        for number in range(7):
            set_aside(made, BOB, f"his {number}", 10)
        kept = made.query("SELECT writer_uid, key FROM quarantined ORDER BY id")
        assert kept == [(ALICE, key_of("hers")), *((BOB, key_of(f"his {number}")) for number in (3, 4, 5, 6))]
        monkeypatch.setattr(quarantine, "_MOST_KEPT_BYTES", 50 * KB)
        set_aside(made, ALICE, "large", 30 * KB)
        set_aside(made, BOB, "larger", 40 * KB)
        kept = made.query("SELECT writer_uid, key FROM quarantined ORDER BY id")
        assert kept == [(ALICE, key_of("hers")), (ALICE, key_of("large"))]
        assert len(list((tmp_path / "quarantine").iterdir())) == 2
        made.check()


def test_small_entries_count_for_the_disk_as_what_they_take_there(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_ASK_EVERY_SECONDS", 0.0)
    small = SmallDisk(tmp_path, monkeypatch, 10_000 * KB)
    with shelf(tmp_path, min_free=str(5000 * KB), shared=True) as made:
        fill(made, ALICE, 5, 40 * KB, compile_seconds=0.01)
        fill(made, BOB, 300, 5, compile_seconds=1000.0)
        # Others fill the disk: one step shows who pays.
        small.held = small.size
        made.call(lambda store: made.evictor.end_grace() or (made.evictor.evict_some() and None))
        assert entries_of(made, ALICE) == 5
        assert entries_of(made, BOB) < 300
        small.held = 0


def test_items_without_texts_take_room_of_the_histories(tmp_path):
    with shelf(tmp_path, shared=True) as made:
        remember(made, BOB, "p", 1000, "")
        ((size, texts),) = made.query(
            "SELECT size, (SELECT sum(length(key || options || devices || platform)) FROM wanted) FROM histories"
        )
        assert size > texts + 50 * 1000


def test_an_announcement_is_weighed_in_bytes():
    letter, snowman = (
        Installation(digest(b"t"), BOB, (protocol.InstalledFile(f"/{text * 100}", 1, 1, 1, digest(b"x")),), HERE, 1.0)
        for text in ("x", "\N{SNOWMAN}")
    )
    assert snowman.weight == letter.weight + 200


def test_the_row_of_a_toolchain_is_cut_in_bytes(tmp_path):
    with shelf(tmp_path) as made:
        files = (protocol.InstalledFile(f"/{chr(0x2603) * 100}/a", 1, 1, 1, digest(b"x")),)
        installation = Installation(digest(b"t"), BOB, files, HERE, 1.0)
        message = protocol.Announce(digest(b"t"), *["\N{SNOWMAN}" * 9000] * 3, [])
        made.call(lambda store: ToolchainRows(store).save(installation, message))
        ((described, listed),) = made.query(
            "SELECT length(CAST(platform || jaxlib_version || description AS BLOB)), length(CAST(files AS BLOB))"
            " FROM toolchains, installations"
        )
        assert described <= 500 + 500 + 4096
        assert described + listed < installation.weight + 100
        (found,) = ToolchainRows(made.store).installations()
        assert found.files == files


def test_unknown_ends_of_one_users_processes_do_not_make_anothers_count_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(strikes, "_MOST_ROWS", 2)
    with shelf(tmp_path) as made:
        judge = Quarantine(made.store, tmp_path / "quarantine", lambda reader, writer: True)
        counted = Strikes(made.store, made.writer, judge)

        def end(uid: int, pid: int, name: str) -> None:
            caller = Caller(pid, uid, Process(pid, uid))
            counted.judge(Load(key_of(name), digest(name.encode()), 1.0, False), caller, ProcessEnd.UNKNOWN, 2.0)

        end(ALICE, 1, "hers")
        for number in range(5):
            end(BOB, 10 + number, f"his {number}")
        # It was loading at the same moment as her first one.
        end(ALICE, 2, "hers")
        assert not counted.bars(digest(b"hers"), ALICE)
        made.sync()
