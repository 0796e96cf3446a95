"""The journal's growth does not count as a lack of disk space, and a rehearsal writes nothing."""

from __future__ import annotations

import os

from support.conversation import key_of
from support.small_disk import SmallDisk
from support.stores import Shelf, shelf

from xcache.wire import protocol
from xcached.store.entries import EntryKey

KB, MB = 1000, 1_000_000


def fill(made: Shelf, count: int) -> None:
    for number in range(count):
        made.begin_put(key_of(str(number)), os.urandom(20 * KB), b"program")
    made.sync()


def journal_of(made: Shelf) -> int:
    journal, _ = made.store.database.sizes()
    return journal


def test_a_rehearsal_writes_nothing(tmp_path):
    """It changes more pages than SQLite usually keeps in memory."""
    with shelf(tmp_path) as made:
        fill(made, 300)
        sizes: list[int] = []

        def rehearse(store) -> None:
            store.database.shrink_journal(0)
            sizes.append(journal_of(made))
            with store.rehearsal():
                store.database.writing.execute("UPDATE blobs SET content = randomblob(20000)")
                sizes.append(journal_of(made))

        made.call(rehearse)
        assert sizes == [0, 0]
        made.check()


def test_no_entry_goes_for_the_growth_of_the_journal(tmp_path, monkeypatch):
    """Only rows and files count, whatever is written, removed or checkpointed."""
    SmallDisk(tmp_path, monkeypatch, 80 * MB)
    with shelf(tmp_path, min_free=str(40 * MB)) as made:
        free: list[int] = []
        made.call(lambda store: free.append(made.evictor.shortage.available_bytes()))
        fill(made, 150)
        made.call(lambda store: free.append(made.evictor.shortage.available_bytes()))
        assert journal_of(made) > 2 * MB
        made.call(lambda store: store.database.shrink_journal(0))
        assert journal_of(made) == 0
        made.call(lambda store: free.append(made.evictor.shortage.available_bytes()))
        made.call(lambda store: store.let_go(store.entries_of(None)) and None)
        assert journal_of(made) > 0
        made.call(lambda store: free.append(made.evictor.shortage.available_bytes()))
    at_first, filled, shrunk, emptied = free
    assert filled == shrunk
    assert 3 * MB < at_first - filled < 4 * MB
    # How often each was used is remembered.
    assert at_first - 100 * KB < emptied <= at_first


def test_a_put_on_a_full_disk_evicts_few_entries_and_the_log_says_so(tmp_path, monkeypatch, caplog):
    """Small entries are rows: the disk gains nothing from them, but their pages are used again."""
    SmallDisk(tmp_path, monkeypatch, 12 * MB)
    with shelf(tmp_path, min_free=str(8 * MB)) as made:
        fill(made, 300)
        most = len(made.keys())
        assert 100 < most < 250
        caplog.set_level("INFO", logger="xcached")
        for number in range(30):
            answer = made.put(key_of(f"more {number}"), os.urandom(20 * KB), b"program", compile_seconds=100.0)
            assert answer == protocol.Stored(True)
        assert len(made.keys()) > most - 10
        assert "by disk) for a put" in caplog.text
        assert made.store.has(EntryKey(key_of("more 29"), 1))
        made.check()
