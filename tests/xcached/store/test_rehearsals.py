"""Entries go only for an entry that is kept: the store decides which ones go before any does."""

from __future__ import annotations

import os
import tempfile

import pytest
from support.conversation import key_of
from support.places import digest
from support.small_disk import SmallDisk
from support.stores import WRITER, shelf

from xcache.errors import RefusedError
from xcache.wire import protocol
from xcached.store import disk, evictor, writer
from xcached.store.entries import EntryKey, Use

KB, MB = 1000, 1000_000


def fill(made, names, size, **changes):
    for name in names:
        assert made.put(key_of(name), os.urandom(size), b"program", **changes) == protocol.Stored(True)


def test_nobody_goes_for_a_newcomer_that_no_user_has_room_for(tmp_path):
    """Only user 2 pays for it, and all of that user's entries are not enough."""
    with shelf(tmp_path, max_size=1000 * KB, shared=True) as made:
        fill(made, "abcdef", 100 * KB, uid=1, compile_seconds=100.0)
        fill(made, "ghi", 110 * KB, uid=2, compile_seconds=1.0)
        before = made.keys()
        assert len(before) == 9
        made.put(key_of("newcomer"), os.urandom(900 * KB), b"program", uid=2, compile_seconds=1000.0)
        made.sync()
        assert made.keys() == before
        made.check()


def test_nobody_makes_room_on_the_disk_for_a_newcomer_that_another_limit_lets_go(tmp_path, monkeypatch):
    """The daemon makes room on the disk before it writes, and room under max_size after that."""
    SmallDisk(tmp_path, monkeypatch, 14 * MB)
    with shelf(tmp_path, max_size=10 * MB, min_free=str(3 * MB)) as made:
        fill(made, "abcdefghi", 1 * MB, compile_seconds=100.0)
        before = made.keys()
        answer = made.put(key_of("newcomer"), os.urandom(3 * MB), b"program", compile_seconds=0.0)
        made.sync()
        assert isinstance(answer, protocol.Refused)
        assert answer.kind == "disk full"
        assert made.keys() == before
        # An entry that is worth more than those that must go is taken.
        fill(made, ["better"], 3 * MB, compile_seconds=10_000.0)
        made.sync()
        left = made.keys()
        assert key_of("better") in left and len(left) == 6 + 1
        made.check()


def test_nobody_goes_for_a_copy_that_may_yet_be_refused(tmp_path, monkeypatch):
    """A large content is copied aside while it is checked; that copy takes room on the disk."""
    monkeypatch.setattr(disk, "_ASK_EVERY_SECONDS", 0.0)
    SmallDisk(tmp_path, monkeypatch, 1400 * KB)
    content = os.urandom(200 * KB)
    with shelf(tmp_path, min_free=str(300 * KB)) as made, tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        fill(made, "abcdefghi", 100 * KB)
        before = made.keys()
        copying = made.store.files.copy_in(file.fileno(), len(content), digest(b"another"))
        next(copying)
        assert made.store.files.aside_bytes() == len(content)
        made.sync()
        assert made.keys() == before
        with pytest.raises(RefusedError, match="do not have the announced digest"):
            list(copying)
        assert made.store.files.aside_bytes() == 0
        # The copy of an admitted entry no longer counts as aside.
        fill(made, ["kept"], 150 * KB, compile_seconds=10_000.0)
        assert made.store.files.aside_bytes() == 0
        made.check()


def begin_to_go(made, monkeypatch, then):
    """Put an entry that thirty others must go for, two at a time; call ``then`` after each step."""
    monkeypatch.setattr(writer, "_EVICTION_SECONDS", 0.0)
    monkeypatch.setattr(evictor, "EVICTED_AT_ONCE", 2)
    fill(made, map(str, range(36)), 10 * KB, compile_seconds=1.0)
    step = made.evictor.evict_some

    def step_and_call():
        freed = step()
        if freed is not None:
            made.writer.call(lambda: then(made.store), 7)
        return freed

    monkeypatch.setattr(made.evictor, "evict_some", step_and_call)
    answer = made.begin_put(key_of("large"), os.urandom(300 * KB), b"program", compile_seconds=1e6).result(20)
    assert answer == protocol.Stored(True)
    made.sync()
    made.check()


def test_others_have_their_turns_while_many_go_for_one(tmp_path, monkeypatch):
    """One large entry may take the place of thousands."""
    counts = []
    with shelf(tmp_path, max_size=400 * KB) as made:
        begin_to_go(made, monkeypatch, lambda store: counts.append(store.totals_now()["entries"]))
        left = made.keys()
        assert key_of("large") in left and 5 <= len(left) <= 10
    assert len(set(counts)) > 4


def test_nobody_goes_for_what_was_removed_meanwhile(tmp_path, monkeypatch):
    with shelf(tmp_path, max_size=400 * KB) as made:
        begin_to_go(made, monkeypatch, lambda store: store.let_go([EntryKey(key_of("large"), WRITER.uid)]) and None)
        assert 30 <= len(made.keys()) < 36


def test_a_chosen_entry_that_is_used_meanwhile_stays(tmp_path, monkeypatch):
    used = EntryKey(key_of("12"), WRITER.uid)

    def use(store):
        with store.transaction():
            store.uses.note({used: Use(1000, 1.0)})

    with shelf(tmp_path, max_size=400 * KB) as made:
        begin_to_go(made, monkeypatch, use)
        assert {used.key, key_of("large")} <= made.keys()
