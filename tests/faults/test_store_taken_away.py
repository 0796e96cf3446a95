"""A store that is deleted, moved, replaced, or loses a part of itself while it is in use."""

from __future__ import annotations

import random
import shutil
import sqlite3
import threading
import time

import pytest
from support.acknowledged import Ledger
from support.conversation import Conversation, key_of, talking
from support.load import Client
from support.places import until
from support.verdict import check

from xcache.wire import commands, protocol

LARGE = b"l" * (protocol.INLINE_LIMIT + 1)


def filled(talk) -> None:
    """Store a small entry and a large one."""
    assert talk.put(key_of("small"), b"small").kept
    assert talk.put(key_of("large"), LARGE).kept
    assert talk.ask(commands.Sync()) == protocol.Done()


def acknowledges_nothing(talk) -> None:
    """Check that puts are refused: nobody would find the entries again."""
    for name, content in (("row", b"row"), ("file", LARGE + b"file")):
        answer = talk.put(key_of(name), content)
        assert isinstance(answer, protocol.Refused), answer
        assert answer.kind == "store error"


def keeps_again(place, child) -> None:
    """Check that the daemon refuses puts until it has reopened the store, and that another finds what is put then."""

    def is_kept() -> bool:
        try:
            with talking(place) as talk:
                answer = talk.put(key_of("new"), b"new")
        except (OSError, AssertionError):
            return False
        assert answer == protocol.Stored(True) or getattr(answer, "kind", "") == "store error", answer
        return answer == protocol.Stored(True)

    assert until(is_kept)
    assert child.poll() is None
    place.stop()
    place.start_daemon()
    with talking(place) as talk:
        assert talk.get(key_of("new")) == b"new"


def a_fresh_one_works(place, child) -> None:
    """Check that the daemon leaves by itself, and that the next one has a fresh store that keeps its entries."""
    assert until(lambda: child.poll() is not None)
    assert child.returncode == 0
    place.start_daemon()
    with talking(place) as talk:
        assert talk.get(key_of("small")) is None
        assert talk.put(key_of("new"), LARGE + b"new") == protocol.Stored(True)
    place.stop()
    place.start_daemon()
    with talking(place) as talk:
        assert talk.get(key_of("new")) == LARGE + b"new"


@pytest.mark.slow
def test_a_store_that_is_deleted_while_in_use(place):
    child = place.start_daemon()
    with talking(place) as talk:
        filled(talk)
        shutil.rmtree(place.dir)
        acknowledges_nothing(talk)
        # The daemon can still read the files it has open; a hit is as good as a miss here.
        assert talk.get(key_of("small")) in (b"small", None)
        assert talk.get(key_of("large")) is None
        a_fresh_one_works(place, child)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_store_that_is_moved_away_and_back(place):
    child = place.start_daemon()
    with talking(place) as talk:
        filled(talk)
        place.dir.rename(place.root / "elsewhere")
        acknowledges_nothing(talk)
        a_fresh_one_works(place, child)
    place.stop()
    shutil.rmtree(place.dir)
    (place.root / "elsewhere").rename(place.dir)
    place.start_daemon()
    with talking(place) as talk:
        assert talk.get(key_of("small")) == b"small"
        assert talk.get(key_of("large")) == LARGE


@pytest.mark.slow
def test_a_database_that_is_deleted_while_in_use(place):
    """The lock file stays, so the daemon stays too, and opens a fresh database."""
    child = place.start_daemon()
    with talking(place) as talk:
        filled(talk)
        for path in place.dir.glob("store.db*"):
            path.unlink()
    keeps_again(place, child)
    with talking(place) as talk:
        assert talk.get(key_of("small")) is None


def test_a_journal_that_is_deleted_while_in_use(place):
    """The daemon still has it open, and moves what is in it to the database."""
    child = place.start_daemon()
    with talking(place) as talk:
        filled(talk)
        (place.dir / "store.db-wal").unlink()
    keeps_again(place, child)
    with talking(place) as talk:
        assert talk.get(key_of("small")) == b"small"
        assert talk.get(key_of("large")) == LARGE
    assert place.query("PRAGMA integrity_check") == [("ok",)]


@pytest.mark.slow
def test_a_database_that_is_replaced_while_in_use(place):
    """A copy of yesterday's takes its place: the daemon leaves its own, and opens the copy as a whole database."""
    place.start_daemon()
    with talking(place) as talk:
        filled(talk)
    place.stop()
    yesterday = (place.dir / "store.db").read_bytes()
    child = place.start_daemon()
    with talking(place) as talk:
        assert talk.put(key_of("today"), b"today").kept
        (place.dir / "copy").write_bytes(yesterday)
        (place.dir / "copy").rename(place.dir / "store.db")
    keeps_again(place, child)
    with talking(place) as talk:
        assert talk.get(key_of("small")) == b"small"
        # SQLite may take the old database's journal for that of the copy.
        assert talk.get(key_of("today")) in (None, b"today")
    assert place.query("PRAGMA integrity_check") == [("ok",)]


def test_the_folder_of_files_is_deleted_while_in_use(place):
    """Entries in files are misses from then on; new ones are kept, because the daemon makes the folders again."""
    place.start_daemon()
    with talking(place) as talk:
        filled(talk)
        shutil.rmtree(place.dir / "blobs")
        assert talk.get(key_of("large")) is None
        assert talk.get(key_of("small")) == b"small"
        assert talk.put(key_of("row"), b"row") == protocol.Stored(True)
        assert talk.put(key_of("large"), LARGE) == protocol.Stored(True)
        assert talk.get(key_of("large")) == LARGE


def test_a_file_is_deleted_while_in_use(place):
    """The daemon answers a miss and drops the entry; a new put in its place is kept."""
    place.start_daemon()
    with talking(place) as talk:
        filled(talk)
        for path in place.dir.glob("blobs/??/*"):
            path.unlink()
        assert talk.get(key_of("large")) is None
        assert talk.ask(commands.Sync()) == protocol.Done()
        assert place.query("SELECT key FROM entries") == [(key_of("small"),)]
        assert talk.put(key_of("large"), LARGE) == protocol.Stored(True)
        assert talk.get(key_of("large")) == LARGE


@pytest.mark.thorough
@pytest.mark.slow
def test_a_database_that_somebody_else_locks(place, campaign):
    """The lock lasts less than the daemon waits, and longer. Gets go on; a put is kept or refused, as answered."""
    ledger, choose = Ledger(), random.Random(campaign.seed)
    place.start_daemon()
    with talking(place) as talk:
        filled(talk)
        for seconds in (1.0, 12.0):
            other = sqlite3.connect(place.dir / "store.db", isolation_level=None, check_same_thread=False)
            # In this journal mode EXCLUSIVE keeps writers out, as a backup or a curious person may.
            other.execute("BEGIN EXCLUSIVE")
            release = threading.Timer(seconds, other.close)
            release.start()
            try:
                writer = Conversation(place)
                writer.greet()
                client = Client(writer, ledger, f"{seconds}", choose, refused=True)
                put = threading.Thread(target=client.put_anything)
                put.start()
                gets = 0
                while put.is_alive():
                    assert talk.get(key_of("small")) == b"small"
                    assert talk.get(key_of("large")) == LARGE
                    gets += 1
                    time.sleep(0.02)
                # Gets that waited for the lock would have ended with the put.
                assert seconds < 10 or gets > 2, gets
                put.join()
                writer.close()
            finally:
                release.join()
            campaign.fault()
            assert talk.put(key_of(f"after {seconds}"), LARGE) == protocol.Stored(True)
    check(place, ledger, campaign, "afterwards")
    campaign.judge()
