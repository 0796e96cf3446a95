"""The store keeps, shares, replaces and counts entries, and makes room."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

import pytest
from support.conversation import key_of
from support.places import digest
from support.stores import WRITER, Shelf, shelf

from xcache.wire import protocol
from xcached.store import store as store_module
from xcached.store.entries import EntryKey

LARGE = b"l" * (protocol.INLINE_LIMIT + 1)


def entry_of(name: str) -> EntryKey:
    return EntryKey(key_of(name), WRITER.uid)


@pytest.fixture
def shelved(tmp_path):
    with shelf(tmp_path) as made:
        yield made
        made.check()


def test_an_entry_says_everything_about_itself(shelved):
    before = time.time()
    shelved.put(key_of("a"), b"executable", b"program", compile_seconds=2.5, module_name="jit_step")
    ((row,),) = shelved.query(
        "SELECT json_object('key', key, 'module', module_name, 'size', stored_size, 'seconds', compile_seconds,"
        " 'hits', hits, 'uid', writer_uid, 'pid', writer_pid, 'by', writer_program, 'flags', flags_component,"
        " 'device', device_kind, 'jaxlib', jaxlib_version, 'codec', codec) FROM entries"
    )
    assert row == (
        f'{{"key":"{key_of("a")}","module":"jit_step","size":10,"seconds":2.5,"hits":0,"uid":1,"pid":2,"by":"test",'
        f'"flags":"{digest(b"flags")}","device":"cpu","jaxlib":"0.0","codec":"none"}}'
    )
    ((created, used),) = shelved.query("SELECT created_at, last_used_at FROM entries")
    assert before <= created == used <= time.time()
    described = dict(shelved.query("SELECT digest, description FROM components"))
    assert described[digest(b"flags")] == "flags"


def test_descriptions_are_kept_once(shelved):
    for name in "abc":
        shelved.put(key_of(name), name.encode(), b"program")
    assert len(shelved.query("SELECT * FROM components")) == len(protocol.DESCRIBED_COMPONENTS)


def test_a_description_of_nothing_is_not_kept(shelved):
    for name in "abc":
        details = {part: part for part in (*protocol.DESCRIBED_COMPONENTS, "weather", "program")}
        shelved.put(key_of(name), name.encode(), b"program", details=details)
    described = sorted(name for (name,) in shelved.query("SELECT name FROM components"))
    assert described == sorted(protocol.DESCRIBED_COMPONENTS)


def test_a_text_that_somebody_made_up_for_a_component_is_not_kept(shelved):
    """The text is shown for everybody's entries, and the machine signs it where they leave it."""
    shelved.put(key_of("a"), b"a", b"program", uid=66, details={"flags": "made up", "options": "options"})
    assert shelved.query("SELECT name FROM components") == [("options",)]
    shelved.put(key_of("b"), b"b", b"program")
    assert dict(shelved.query("SELECT digest, description FROM components"))[digest(b"flags")] == "flags"


def test_what_an_older_daemon_kept_of_a_made_up_text_gives_way_to_the_true_one(shelved):
    for name in "ab":
        shelved.put(key_of(name), name.encode(), b"program")
    shelved.change("UPDATE components SET description = 'false' WHERE name = 'flags'")
    found = shelved.store.reader.program_of(key_of("a"), WRITER.uid)
    assert sorted(found.texts) == ["options", "platform", "toolchain"]
    shelved.put(key_of("c"), b"c", b"program")
    assert shelved.query("SELECT description, uses FROM components WHERE name = 'flags'") == [("flags", 3)]
    for name in "abc":
        shelved.remove(key_of(name))
    assert shelved.query("SELECT name FROM components") == []


def test_a_component_that_no_entry_refers_to_is_forgotten(shelved):
    """Each jaxlib that was ever there and each set of options leaves a text of up to 16 KB."""
    shelved.put(key_of("a"), b"a", b"program")
    shelved.remove(key_of("a"))
    assert shelved.query("SELECT name FROM components") == []


def test_a_program_is_kept_once_for_all_its_executables(shelved):
    shelved.put(key_of("a"), b"one", LARGE)
    shelved.put(key_of("b"), b"two", LARGE)
    assert len(shelved.query("SELECT * FROM programs")) == 1
    shelved.remove(key_of("a"))
    assert len(shelved.query("SELECT * FROM programs")) == 1
    shelved.check()
    shelved.remove(key_of("b"))
    assert shelved.query("SELECT * FROM programs") == []


def test_the_same_bytes_in_a_file_and_then_in_a_row_leave_no_file(shelved, tmp_path, monkeypatch):
    """Another version of a client may draw the line between large and small elsewhere."""
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "INLINE_LIMIT", 10)
        shelved.put(key_of("a"), b"forty bytes or so, in a file at first....", b"p")
    shelved.check()
    shelved.put(key_of("b"), b"forty bytes or so, in a file at first....", b"p")
    assert shelved.get(key_of("a")) == shelved.get(key_of("b")) != b""


def test_an_overwritten_entry_begins_anew(shelved):
    shelved.put(key_of("a"), b"old", b"program")
    shelved.writer.note_use(entry_of("a"), time.time() + 100)
    shelved.sync()
    assert shelved.query("SELECT hits FROM entries") == [(1,)]
    assert shelved.put(key_of("a"), b"new", b"program", overwrite=True) == protocol.Stored(True)
    assert shelved.get(key_of("a")) == b"new"
    assert shelved.query("SELECT hits, stored_size FROM entries") == [(0, 3)]


def test_the_reader_finds_each_write(shelved):
    shelved.put(key_of("a"), b"executable", b"program")
    assert shelved.get(key_of("a")) == b"executable"
    shelved.put(key_of("a"), b"another", b"program", overwrite=True)
    assert shelved.get(key_of("a")) == b"another"
    shelved.change("UPDATE blobs SET content = ?", b"altered")
    assert shelved.get(key_of("a")) == b"altered"
    shelved.remove(key_of("a"))
    assert shelved.store.reader.find(key_of("a")) == []


def test_a_put_over_a_damaged_file_repairs_it(shelved):
    shelved.put(key_of("a"), LARGE, b"program")
    (path,) = shelved.directory.glob("blobs/??/*")
    path.write_bytes(b"damaged")
    shelved.put(key_of("a"), LARGE, b"program", overwrite=True)
    assert shelved.get(key_of("a")) == LARGE


def test_a_sync_covers_what_was_asked_before_it(shelved):
    """This holds even if the writer does both in one batch."""
    with shelved.busy():
        done = shelved.begin_put(key_of("a"), b"a", b"program")
        synced = shelved.begin_call(
            lambda store: protocol.Status(dict(shelved.query("SELECT name, amount FROM statistics")), [], [])
        )
    assert done.result(20).kept
    assert synced.result(20).facts["stores"] == 1


def by_last_use(shelved: Shelf) -> list[tuple[str, int]]:
    """Return the entries with their hits, the least recently used first."""
    names = {key_of(name): name for name in "ab"}
    return [(names[key], hits) for key, hits in shelved.query("SELECT key, hits FROM entries ORDER BY used_order")]


def test_uses_are_written_together_and_the_last_one_counts_whatever_the_clock_says(shelved):
    """A clock that jumps shows in the time of the last use, and not in the order in which entries are evicted."""
    shelved.put(key_of("a"), b"a", b"program")
    shelved.put(key_of("b"), b"b", b"program")
    created = time.time()
    for moment in (created + 5, created + 7):
        shelved.writer.note_use(entry_of("a"), moment)
    shelved.writer.note_use(entry_of("gone"), created)
    shelved.sync()
    assert by_last_use(shelved) == [("b", 0), ("a", 2)]
    assert (created + 7,) in shelved.query("SELECT last_used_at FROM entries")
    shelved.writer.note_use(entry_of("b"), created + 8)
    shelved.writer.note_use(entry_of("a"), created - 1000)
    shelved.sync()
    assert by_last_use(shelved) == [("b", 1), ("a", 3)]
    assert (created - 1000,) in shelved.query("SELECT last_used_at FROM entries")


def test_one_bad_put_does_not_take_the_others_of_its_batch_with_it(shelved):
    """The second cannot be written: SQLite's integers have 64 bits. A blocked writer makes them one batch."""
    with shelved.busy():
        begun = [
            shelved.begin_put(key_of("a"), b"a", b"program"),
            shelved.begin_put(key_of("b"), b"b", b"program", raw_size=2**64 - 1),
            shelved.begin_put(key_of("c"), LARGE, b"program", digest=digest(b"else")),
            shelved.begin_put(key_of("d"), b"d", b"program"),
        ]
    answers = [type(done.result(20)) for done in begun]
    shelved.sync()
    assert answers == [protocol.Stored, protocol.Refused, protocol.Refused, protocol.Stored]
    assert shelved.keys() == {key_of("a"), key_of("d")}


def test_a_transaction_keeps_nothing_in_temporary_files(shelved):
    """Another file system's trouble is no reason to refuse, and a file for each put takes a fifth of its time."""
    keys = [key_of(str(number)) for number in range(200)]
    with shelved.busy():
        begun = [shelved.begin_put(key, key.encode(), key[::-1].encode()) for key in keys]
    assert {done.result(20) for done in begun} == {protocol.Stored(True)}
    opened: list[str] = []

    def remove(store):
        with store.transaction(), store.savepoint():
            store.remove([EntryKey(key, WRITER.uid) for key in keys])
            for descriptor in Path("/proc/self/fd").iterdir():
                with contextlib.suppress(OSError):
                    opened.append(str(descriptor.readlink()))

    shelved.call(remove)
    assert not shelved.keys()
    assert [name for name in opened if name.endswith("store.db-wal")]
    assert [name for name in opened if "etilqs" in name] == []


def test_the_writer_does_first_what_was_asked_first(shelved):
    """A Remove and then a Put, both while the writer is busy: the entry was acknowledged and has to be there."""
    shelved.put(key_of("a"), b"old", b"program")
    with shelved.busy():
        removed = shelved.begin_remove(key_of("a"))
        done = shelved.begin_put(key_of("a"), b"new", b"program")
    assert removed.result(20).entries == 1
    assert done.result(20) == protocol.Stored(True)
    shelved.sync()
    assert shelved.get(key_of("a")) == b"new"


def test_a_store_that_cannot_be_written_refuses_and_recovers(shelved):
    with sqlite3.connect(shelved.directory / "store.db", isolation_level=None) as blocker:
        blocker.execute("CREATE TRIGGER no BEFORE INSERT ON entries BEGIN SELECT RAISE(ABORT, 'no'); END")
        answer = shelved.put(key_of("a"), LARGE, LARGE + b"program")
        assert isinstance(answer, protocol.Refused)
        assert answer.kind == "store error"
        shelved.check()
        blocker.execute("DROP TRIGGER no")
    blocker.close()
    assert shelved.query("SELECT * FROM statistics WHERE name = 'stores'") == []
    assert shelved.put(key_of("a"), LARGE, LARGE + b"program") == protocol.Stored(True)


def test_statistics_add_up_and_start_anew(shelved):
    shelved.writer.note_counts({"hits": 1, "load_seconds": 0.5})
    shelved.writer.note_counts({"hits": 2})
    shelved.sync()
    shelved.writer.note_counts({"hits": 3})
    shelved.sync()
    assert dict(shelved.query("SELECT name, amount FROM statistics WHERE name != 'since'")) == {
        "hits": 6,
        "load_seconds": 0.5,
    }

    def zero(store):
        with store.transaction():
            store.statistics.zero()
        return protocol.Done()

    shelved.call(zero)
    ((name, since),) = shelved.query("SELECT name, amount FROM statistics")
    assert (name, round(since - time.time(), -2)) == ("since", 0)


@pytest.mark.parametrize("amount", [float("nan"), 2**63, float("inf")])
def test_a_count_that_cannot_be_written_ends_neither_the_writer_nor_the_other_counts(shelved, amount):
    shelved.writer.note_use(entry_of("a"), time.time())
    shelved.writer.note_counts({"misses": amount})
    shelved.writer.note_counts({"hits": 1})
    assert shelved.put(key_of("a"), b"a", b"program") == protocol.Stored(True)
    shelved.writer.note_counts({"hits": 1})
    shelved.sync()
    assert dict(shelved.query("SELECT name, amount FROM statistics"))["hits"] == 2


def test_marks_are_kept_replaced_and_bounded(shelved, monkeypatch):
    monkeypatch.setattr(store_module, "_MOST_MARKS", 3)

    def mark(name: str, reason: str) -> None:
        def work(store):
            with store.transaction():
                store.mark_not_cacheable(protocol.MarkNotCacheable(key_of(name), "m", reason), WRITER.uid)
            return protocol.Done()

        shelved.call(work)

    for name in "abcda":
        mark(name, f"reason {name}")
    reasons = [shelved.store.reader.why_not(key_of(name), lambda writer: writer == WRITER.uid) for name in "abcde"]
    assert reasons == ["reason a", None, "reason c", "reason d", None]
    assert shelved.store.reader.why_not(key_of("a"), lambda writer: writer != WRITER.uid) is None
