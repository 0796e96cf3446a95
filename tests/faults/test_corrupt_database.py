"""A database file that is damaged: programs go on, and the next daemon begins afresh beside what it sets aside."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.campaigns import Campaign
from support.command_line import Shell
from support.conversation import key_of, talking
from support.marks import thorough
from support.places import digest, get_message, until

from xcache.errors import RefusedError
from xcache.wire import commands, protocol

PAGE = 4096
ENTRIES = 150


def fill(place) -> None:
    """Enough entries for tables and indices of several pages."""
    place.start_daemon()
    with talking(place) as talk:
        for request in [talk.begin_put(key_of(f"{n}"), content(n), b"program %d" % (n % 7)) for n in range(ENTRIES)]:
            assert talk.answer(request) == protocol.Stored(True)
    place.stop()
    assert not (place.dir / "store.db-wal").exists()


def content(number: int) -> bytes:
    return b"%d " % number * (60_000 if number % 50 == 0 else 300)


def overwrite(path: Path, offset: int, garbage: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(garbage)


def garbage_wal(database: Path) -> None:
    database.with_name("store.db-wal").write_bytes(random.Random(1).randbytes(200_000))
    database.with_name("store.db-shm").write_bytes(random.Random(2).randbytes(32_768))


def fake_wal(database: Path) -> None:
    """A journal with right checksums of pages that are garbage: another database's, say."""
    other = database.with_name("other.db")
    with contextlib.closing(sqlite3.connect(other, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE other (content)")
        connection.executemany("INSERT INTO other VALUES (?)", [(b"x" * 3000,) for _ in range(50)])
        database.with_name("store.db-wal").write_bytes(other.with_name("other.db-wal").read_bytes())
    other.unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "no database at all": lambda path: path.write_bytes(b"this is not a database " * 1000),
    "a header that is none": lambda path: overwrite(path, 0, b"\xff" * 100),
    "the table of tables overwritten": lambda path: overwrite(path, 100, b"\xa5" * (PAGE - 100)),
    "every second page overwritten": lambda path: [
        overwrite(path, offset, b"\xa5" * PAGE) for offset in range(PAGE, path.stat().st_size, 2 * PAGE)
    ],
    "the middle overwritten": lambda path: overwrite(path, path.stat().st_size // 3, b"\x5a" * 20 * PAGE),
    "zeros from the second page on": lambda path: overwrite(path, PAGE, bytes(path.stat().st_size - PAGE)),
    "cut in the middle": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut after the first page": lambda path: os.truncate(path, PAGE),
    "cut within the header": lambda path: os.truncate(path, 50),
    "another database's journal": fake_wal,
}
HARMLESS: dict[str, Callable[[Path], None]] = {
    "emptied": lambda path: os.truncate(path, 0),
    "a journal of garbage": garbage_wal,
}


def ask_for_everything(place, campaign) -> tuple[int, int]:
    """Every entry is right, missing, refused or plainly damaged; how many were there, and how many were refused."""
    there = refused = 0
    for number in range(ENTRIES):
        try:
            with talking(place) as talk:
                found = talk.get(key_of(f"{number}"))
                # Bytes that are not those of their digest are no program's: it checks before it uses them.
                wrong = found not in (None, content(number)) and digest_given(talk, number) == digest(found)
        except RefusedError:
            refused += 1
        except (ConnectionError, FileNotFoundError):
            # It begins anew.
            assert until(place.answers)
            refused += 1
        else:
            there += found is not None
            if wrong:
                campaign.problem("wrong loads", f"{number}")
    campaign.checked(ENTRIES)
    campaign.judge()
    return there, refused


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", thorough([*DAMAGES, *HARMLESS], usual=("no database at all", "every second page overwritten", "emptied"))
)
def test_a_daemon_that_meets_it_answers_or_leaves(place, damage):
    """And nothing it gives out is anything but what was put."""
    fill(place)
    (DAMAGES | HARMLESS)[damage](place.dir / "store.db")
    child = place.daemon()
    until(lambda: place.answers() or child.poll() is not None)
    if child.poll() is None:
        ask_for_everything(place, Campaign(None, 0))
        assert child.poll() is None
    else:
        assert child.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("damage", thorough(DAMAGES, usual=("a header that is none",)))
def test_it_is_set_aside_and_a_fresh_store_works(place, damage):
    fill(place)
    database = place.dir / "store.db"
    DAMAGES[damage](database)
    # One may have to meet the damage first, and leave with it in mind.
    for _ in range(2):
        child = place.daemon()
        until(lambda child=child: place.answers() or child.poll() is not None)
        if child.poll() is None:
            ask_for_everything(place, Campaign(None, 0))
            with talking(place) as talk:
                for number in range(ENTRIES, ENTRIES + 20):
                    talk.put(key_of(f"{number}"), content(number))
        place.stop()
    aside = [path.name for path in place.dir.iterdir() if path.name.startswith("store.db") and is_aside(path)]
    assert aside, sorted(path.name for path in place.dir.iterdir())
    place.start_daemon()
    works_as_a_fresh_one(place)
    # The commands report it, with the name of the file.
    said = Shell(place).say("status")
    assert any(name in said for name in aside), said


def digest_given(talk, number: int) -> str | None:
    return getattr(talk.ask(get_message(key_of(f"{number}"))), "digest", None)


def is_aside(path: Path) -> bool:
    return path.name not in ("store.db", "store.db-wal", "store.db-shm", "store.db-journal")


def works_as_a_fresh_one(place) -> None:
    with talking(place) as talk:
        for number in range(1000, 1010):
            assert talk.put(key_of(f"{number}"), content(number)) == protocol.Stored(True)
    _, refused = ask_for_everything(place, Campaign(None, 0))
    assert refused == 0
    place.stop()
    place.start_daemon()
    with talking(place) as talk:
        for number in range(1000, 1010):
            assert talk.get(key_of(f"{number}")) == content(number)
    assert place.query("PRAGMA integrity_check") == [("ok",)]


@pytest.mark.slow
@pytest.mark.parametrize("damage", HARMLESS)
def test_a_database_that_sqlite_can_repair_is_not_set_aside(place, damage):
    fill(place)
    HARMLESS[damage](place.dir / "store.db")
    place.start_daemon()
    there, refused = ask_for_everything(place, Campaign(None, 0))
    assert (there, refused) == (ENTRIES if damage == "a journal of garbage" else 0, 0)
    works_as_a_fresh_one(place)


@pytest.mark.slow
def test_damage_in_any_place_gives_no_wrong_content_and_no_crash(place, campaign):
    """A page overwritten, or a few bytes flipped, anywhere in the file, in turn."""
    choose = random.Random(f"pages {campaign.seed}")
    fill(place)
    database = place.dir / "store.db"
    whole = database.read_bytes()
    for number in range(campaign.rounds(3)):
        for path in place.dir.glob("store.db*"):
            path.unlink()
        damaged = bytearray(whole)
        where = choose.randrange(len(whole))
        if number % 2:
            start = where - where % PAGE
            damaged[start : start + PAGE] = choose.randbytes(PAGE)
        else:
            for _ in range(3):
                damaged[where] ^= 1 << choose.randrange(8)
                where = (where + choose.randrange(40)) % len(whole)
        database.write_bytes(damaged)
        campaign.fault()
        child = place.daemon()
        until(lambda child=child: place.answers() or child.poll() is not None)
        if child.poll() is None:
            ask_for_everything(place, campaign)
            # It may begin anew at any of them.
            with contextlib.suppress(ConnectionError, FileNotFoundError), talking(place) as talk:
                for entry in range(ENTRIES, ENTRIES + 5):
                    talk.put(key_of(f"{entry}"), content(entry))
                talk.ask(commands.Sync())
            child.terminate()
            until(lambda child=child: child.poll() is not None)
        # One that has just begun anew is not there yet to leave in good order.
        if child.poll() not in (0, 1, -signal.SIGTERM):
            campaign.problem("crashes", f"byte {where}: {child.returncode}: {place.said()[-800:]}")
        child.kill()
        child.wait()
    campaign.judge()
    assert campaign.counts["faults tried"] == campaign.rounds(3)


CUT_SHORT = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
connection.execute("CREATE TABLE first (content)")
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN")
for number in range(50):
    connection.execute(f"CREATE TABLE table_{number} (content)")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_making_that_was_cut_short_before_there_was_a_journal_of_the_usual_kind(place):
    """SQLite's other journal is there and wants to be rolled back, which a connection for reading alone cannot do."""
    place.dir.mkdir(mode=0o700)
    made = subprocess.run([sys.executable, "-c", CUT_SHORT, str(place.dir / "store.db")], check=False)
    assert made.returncode == -signal.SIGKILL
    assert (place.dir / "store.db-journal").stat().st_size > 0
    child = place.daemon()
    until(lambda: place.answers() or child.poll() is not None)
    assert child.poll() is None, place.said()
