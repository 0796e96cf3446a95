"""Deleted files that somebody has open: their bytes come free, and neither their writer nor a neighbour pays."""

from __future__ import annotations

import os
import tempfile
import threading

from support.conversation import key_of
from support.places import digest
from support.small_disk import SmallDisk
from support.stores import Shelf, shelf

from xcache.wire import protocol
from xcached.store import deleted_files, disk
from xcached.store.deleted_files import DeletedFiles
from xcached.store.entries import EntryKey
from xcached.store.quarantine import Quarantine

KB = 1000
SIZE = 200 * KB
ROOT, ALICE = 0, 1


def put(made: Shelf, name: str, uid: int, **changes: object) -> bytes:
    content = os.urandom(SIZE)
    assert made.put(key_of(name), content, b"p", uid=uid, **changes) == protocol.Stored(True)
    return content


def opened(made: Shelf, name: str) -> int:
    """Return a descriptor as a reader gets it."""
    (hit,) = made.store.reader.find(key_of(name))
    descriptor = made.store.files.open(hit.digest).descriptor
    assert descriptor is not None
    return descriptor


def remove(made: Shelf, name: str, uid: int) -> None:
    made.call(lambda store: store.let_go([EntryKey(key_of(name), uid)]) and None)


def test_readers_who_keep_a_trusted_writers_files_open_cost_it_nothing(tmp_path, monkeypatch):
    """The writer may store as much as before, and loses no entry; emptied files take no room."""
    descriptors = []
    with shelf(tmp_path, user_quota=4 * SIZE, max_size=8 * SIZE, shared=True) as made:
        for name in "ab":
            put(made, f"kept {name}", ROOT)
        for number in range(12):
            name = f"removed {number}"
            put(made, name, ROOT)
            descriptors.append(opened(made, name))
            remove(made, name, ROOT)
        made.sync()
        assert made.keys() == {key_of("kept a"), key_of("kept b")}
        # Readers have a minute before the files are emptied.
        assert made.store.files.deleted.bytes == 12 * SIZE
        assert [os.fstat(descriptor).st_size for descriptor in descriptors] == [SIZE] * 12
        monkeypatch.setattr(deleted_files, "_READ_SECONDS", 0.0)
        made.sync()
        assert made.store.files.deleted.bytes == 0
        assert [os.fstat(descriptor).st_blocks for descriptor in descriptors] == [0] * 12
        assert list((tmp_path / "held").iterdir()) == []
        made.check()
    for descriptor in descriptors:
        os.close(descriptor)


def test_a_file_that_nobody_has_open_is_gone_at_once(tmp_path):
    with shelf(tmp_path, shared=True) as made:
        put(made, "a", ALICE)
        remove(made, "a", ALICE)
        assert made.store.files.deleted.bytes == 0
        assert list((tmp_path / "held").iterdir()) == []
        made.check()


def test_a_file_that_another_takes_the_place_of_is_kept_account_of(tmp_path, monkeypatch):
    """Somebody may overwrite an entry again and again, and keep each file open."""
    with shelf(tmp_path, shared=True) as made:
        content = put(made, "a", ALICE)
        first = opened(made, "a")
        assert made.put(key_of("a"), content, b"p", uid=ALICE, overwrite=True) == protocol.Stored(True)
        second = opened(made, "a")
        assert not os.path.samestat(os.fstat(first), os.fstat(second))
        assert made.store.files.deleted.bytes == SIZE
        monkeypatch.setattr(deleted_files, "_READ_SECONDS", 0.0)
        made.sync()
        assert (os.fstat(first).st_blocks, os.fstat(second).st_size) == (0, SIZE)
        assert made.get(key_of("a")) == content
        made.check()
        os.close(first)
        os.close(second)


def test_a_file_in_quarantine_is_not_emptied_with_its_entry(tmp_path, monkeypatch):
    """The quarantine keeps the same file under another name; when that goes, its bytes come free as well."""
    monkeypatch.setattr(deleted_files, "_READ_SECONDS", 0.0)
    with shelf(tmp_path, shared=True) as made:
        quarantine = Quarantine(made.store, tmp_path / "quarantine", lambda reader, writer: True)
        content = put(made, "a", ALICE)
        descriptor = opened(made, "a")
        made.call(lambda store: quarantine.set_aside(EntryKey(key_of("a"), ALICE), "damaged"))
        made.sync()
        (kept,) = (tmp_path / "quarantine").iterdir()
        assert kept.read_bytes() == content
        made.call(lambda store: quarantine.clear(None))
        made.sync()
        assert os.fstat(descriptor).st_blocks == 0
        os.close(descriptor)


def test_no_entry_goes_for_the_room_that_open_files_take(tmp_path, monkeypatch):
    """They are emptied sooner where the disk has no room."""
    monkeypatch.setattr(disk, "_ASK_EVERY_SECONDS", 0.0)
    SmallDisk(tmp_path, monkeypatch, 8 * SIZE)
    with shelf(tmp_path, min_free=str(2 * SIZE), shared=True) as made:
        for name in "abc":
            put(made, name, ALICE, compile_seconds=100.0)
        before = made.keys()
        descriptors = []
        for number in range(8):
            name = f"removed {number}"
            put(made, name, ROOT)
            descriptors.append(opened(made, name))
            remove(made, name, ROOT)
        made.sync()
        assert made.keys() == before
        for descriptor in descriptors:
            os.close(descriptor)


def test_some_are_emptied_at_a_time_and_the_earliest_sooner_where_they_are_large(tmp_path, monkeypatch):
    made = DeletedFiles(tmp_path / "held")

    def delete(count: int) -> list[int]:
        descriptors = []
        for number in range(count):
            path = tmp_path / str(number)
            path.write_bytes(b"12")
            descriptors.append(os.open(path, os.O_RDONLY))
            assert not made.delete(path)
        return descriptors

    monkeypatch.setattr(deleted_files, "_MOST_BYTES", 300)
    descriptors = delete(200)
    assert made.bytes == 300
    assert [os.fstat(descriptor).st_size for descriptor in descriptors] == [0] * 50 + [2] * 150
    monkeypatch.setattr(deleted_files, "_READ_SECONDS", 0.0)
    made.release()
    assert 0 < made.bytes < 300
    while made.bytes:
        made.release()
    # Another daemon knows of those that are left.
    monkeypatch.setattr(deleted_files, "_READ_SECONDS", 60.0)
    descriptors += delete(3)
    assert DeletedFiles(tmp_path / "held").bytes == 6
    for descriptor in descriptors:
        os.close(descriptor)


def test_a_copy_that_is_deleted_while_the_disk_is_asked_costs_no_entry(tmp_path, monkeypatch):
    """It was on the disk when the file system was asked, and is not among the copies any more."""
    monkeypatch.setattr(disk, "_ASK_EVERY_SECONDS", 0.0)
    SmallDisk(tmp_path, monkeypatch, 7 * SIZE)
    ask = os.statvfs
    with shelf(tmp_path, min_free=str(2 * SIZE), shared=True) as made, tempfile.TemporaryFile() as file:
        for name in "abc":
            put(made, name, ALICE)
        before = made.keys()
        content = os.urandom(3 * SIZE)
        file.write(content)
        file.flush()
        copying = made.store.files.copy_in(file.fileno(), len(content), digest(b"another"))
        monkeypatch.setattr(made.store.files, "_has_plenty", lambda aside, size: True)
        next(copying)
        (aside,) = (tmp_path / "blobs" / "unfinished").iterdir()
        threads = []

        def ask_slowly(path: object) -> object:
            found = ask(path)
            if not threads:
                threads.append(threading.Thread(target=made.store.files.discard, args=(aside,)))
                threads[0].start()
                threads[0].join(0.2)
            return found

        monkeypatch.setattr(os, "statvfs", ask_slowly)
        made.sync()
        assert threads
        threads[0].join(20)
        assert made.keys() == before
        copying.close()
