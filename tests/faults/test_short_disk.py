"""A real disk that is as full as min_free allows: what comes is stored, a few go for it, and histories stay."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess

import pytest
from support.command_line import Shell
from support.conversation import key_of, talking
from support.places import digest
from support.sharing import host
from support.stores import check_tables

from xcache.wire import commands, protocol
from xcache.wire.envelope import seal

MB = 1_000_000
SIZE = 60 * MB
SMALL = 20_000


@pytest.fixture
def disk(place):
    """The store is on a disk of 60 MB, of which the daemon's reserve takes 8."""
    place.dir.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=700", "tmpfs", str(place.dir)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    yield place
    place.stop()
    subprocess.run(["umount", "-l", str(place.dir)], check=True)


def free_on(disk) -> int:
    found = os.statvfs(disk.dir)
    return found.f_bavail * found.f_frsize


def entries_in(disk) -> int:
    ((count,),) = disk.query("SELECT count(*) FROM entries")
    return count


def remember(talk, program: str) -> None:
    item = {"key": key_of(program), "options": digest(b"o"), "devices": "0", "platform": "cpu", "seconds": 0.5}
    assert talk.ask(protocol.Remember(program, "a", [item], {digest(b"o"): b"o"})) == protocol.Done()


def histories_in(disk) -> tuple[int, int]:
    ((runs,),) = disk.query("SELECT count(*) FROM histories")
    return runs, len(list((disk.dir / "quarantine").iterdir()))


@pytest.mark.thorough
def test_small_entries_are_stored_on_and_on(disk):
    """The rows of many small ones are more than SQLite holds in memory, and each takes the place of about one."""
    min_free = 40 * MB
    disk.start_daemon(XCACHE_MIN_FREE=str(min_free))
    with talking(disk) as talk:
        most, number = 0, 0
        while (count := entries_in(disk)) >= most and number < 1500:
            most = count
            for _ in range(20):
                assert talk.put(key_of(str(number)), os.urandom(SMALL)) == protocol.Stored(True)
                number += 1
            assert talk.ask(commands.Sync()) == protocol.Done()
        assert 100 < number < 1500
        for more in range(300):
            assert talk.put(key_of(f"more {more}"), os.urandom(SMALL)) == protocol.Stored(True)
            # Up to the journal.
            assert free_on(disk) > min_free - 6 * MB, more
        assert talk.ask(commands.Sync()) == protocol.Done()
        assert entries_in(disk) > 0.9 * most


def test_a_put_that_is_refused_costs_nobody_anything(disk):
    disk.start_daemon(XCACHE_MIN_FREE=str(10 * MB))
    with talking(disk) as talk:
        key = key_of("kept")
        sealed = seal(key, os.urandom(SMALL))
        assert talk.put(key, sealed) == protocol.Stored(True)
        assert talk.get(key) == sealed
        assert talk.ask(protocol.Complain(key, digest(sealed), "a test", True)) == protocol.Done()
        for number in range(5):
            remember(talk, f"program {number}")
        before = histories_in(disk)
        assert before == (5, 1)
        answer = talk.put(key_of("large"), bytes(50 * MB))
        assert isinstance(answer, protocol.Refused) and answer.kind == "disk full"
        assert talk.ask(commands.Sync()) == protocol.Done()
        assert histories_in(disk) == before
        assert talk.get(key) == sealed


def test_histories_survive_a_disk_that_others_filled(disk):
    (disk.dir / "foreign").write_bytes(bytes(SIZE - 10 * MB))
    disk.start_daemon(XCACHE_MIN_FREE=str(30 * MB))
    with talking(disk) as talk:
        assert isinstance(talk.put(key_of("refused"), os.urandom(SMALL)), protocol.Refused)
        for number in range(5):
            remember(talk, f"program {number}")
        assert talk.ask(commands.Sync()) == protocol.Done()
        assert histories_in(disk) == (5, 0)


def fill(talk, disk, room: int) -> None:
    """Put small entries until no more than ``room`` bytes are free."""
    for number in range(4000):
        if number % 20 == 0 and free_on(disk) <= room:
            return
        assert talk.put(key_of(f"fill {number}"), os.urandom(SMALL)) == protocol.Stored(True)
    raise AssertionError("the disk does not fill")


@pytest.mark.thorough
def test_a_reader_that_holds_the_journal_stops_puts_and_not_the_store(disk):
    """The journal filled the disk, and no checkpoint had room any more, even after the reader was gone."""
    disk.start_daemon(XCACHE_MIN_FREE=str(20 * MB))
    with talking(disk) as talk:
        fill(talk, disk, 21 * MB)
        with contextlib.closing(sqlite3.connect(disk.dir / "store.db", isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM entries").fetchone()
            answers = [talk.put(key_of(f"meanwhile {number}"), os.urandom(SMALL)) for number in range(500)]
        refused = [answer for answer in answers if answer != protocol.Stored(True)]
        assert {answer.kind for answer in refused} == {"store busy"}
        assert free_on(disk) > 10 * MB
        for number in range(20):
            assert talk.put(key_of(f"afterwards {number}"), os.urandom(SMALL)) == protocol.Stored(True)


@pytest.mark.thorough
def test_where_little_is_to_stay_free_the_disk_does_not_fill(disk):
    """The journal alone may take more than that."""
    disk.start_daemon()
    with talking(disk) as talk:
        fill(talk, disk, 4 * MB)
        for number in range(200):
            assert talk.put(key_of(f"more {number}"), os.urandom(SMALL)) == protocol.Stored(True)
        assert free_on(disk) > MB


@pytest.mark.thorough
def test_a_large_put_takes_the_place_of_small_entries_and_is_stored(disk):
    """The database's free pages are no room for a file until they are given back."""
    disk.start_daemon(XCACHE_MIN_FREE=str(10 * MB))
    with talking(disk) as talk:
        fill(talk, disk, 11 * MB)
        assert talk.ask(commands.Sync()) == protocol.Done()
        before = entries_in(disk)
        assert talk.put(key_of("large"), os.urandom(15 * MB)) == protocol.Stored(True)
        assert talk.ask(commands.Sync()) == protocol.Done()
        assert 0 < entries_in(disk) < before
    disk.stop()
    check_tables(disk.query, disk.dir)


@pytest.fixture
def bundle(tmp_path):
    """A bundle of twelve entries of 2 MB each."""
    path = tmp_path / "cache.xcb"
    with host() as there:
        with talking(there) as talk:
            for number in range(12):
                content = os.urandom(2 * MB)
                assert talk.put(key_of(f"came {number}"), content, b"%d" % number) == protocol.Stored(True)
        Shell(there).say("export", "-o", str(path), "--unsigned")
    return path


@pytest.mark.parametrize(
    ("min_free", "filled"), [(48, 0), (36, 6)], ids=["nothing could go for it", "one cannot stay beside the others"]
)
def test_an_import_for_which_the_disk_is_too_small_stores_nothing_and_costs_nothing(disk, bundle, min_free, filled):
    disk.start_daemon(XCACHE_MIN_FREE=str(min_free * MB))
    with talking(disk) as talk:
        for number in range(filled):
            assert talk.put(key_of(f"{number}"), os.urandom(MB)) == protocol.Stored(True)
    said = Shell(disk).say("import", "--all", "--unsigned", str(bundle), code=1)
    assert "nothing is taken over: " in said
    assert entries_in(disk) == filled
    assert not [*(disk.dir / "blobs" / "unfinished").iterdir()]


def test_old_entries_go_for_an_import_that_stays_whole(disk, bundle):
    min_free = 15 * MB
    disk.start_daemon(XCACHE_MIN_FREE=str(min_free))
    with talking(disk) as talk:
        for number in range(20):
            assert talk.put(key_of(f"{number}"), os.urandom(MB)) == protocol.Stored(True)
        assert talk.ask(commands.Sync()) == protocol.Done()
        assert "stored 12 entries" in Shell(disk).say("import", "--all", "--unsigned", str(bundle))
        for _ in range(3):
            assert talk.ask(commands.Sync()) == protocol.Done()
        assert free_on(disk) > min_free - 6 * MB
        assert all(talk.get(key_of(f"came {number}")) is not None for number in range(12))
    assert 12 < entries_in(disk) < 32
