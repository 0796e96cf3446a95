"""Opening a store: a new one, an old one, a newer one, a broken one, and one whose making was cut short."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sqlite_utils import Database
from support.conversation import key_of
from support.program_files import program_text
from support.stores import WRITER, quick_folder, shelf

from xcache.errors import NewerStoreError, StoreError
from xcache.wire.schema import SCHEMA_VERSION
from xcached.store import schema
from xcached.store.entries import EntryKey
from xcached.store.store import Store


def test_a_new_store_has_its_version_and_its_modes(tmp_path):
    before = time.time()
    with shelf(tmp_path, begun=False) as made:
        assert made.query("PRAGMA user_version") == [(SCHEMA_VERSION,)]
        assert made.query("PRAGMA journal_mode") == [("wal",)]
        assert made.query("PRAGMA auto_vacuum") == [(2,)]
        assert made.query("PRAGMA integrity_check") == [("ok",)]
        assert made.store.reader.totals() == {
            "entries": 0,
            "bytes": 0,
            "text_bytes": 0,
            "other_bytes": len("since"),
        }
        ((since,),) = made.query("SELECT amount FROM statistics WHERE name = 'since'")
        assert before - 1 <= since <= time.time() + 1
    assert not (tmp_path / "store.db-wal").exists()
    assert (tmp_path / "store.db").stat().st_mode & 0o777 == 0o600


def test_there_are_as_many_migrations_as_the_version_says():
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        pending = schema.migrations.pending(Database(connection, execute_plugins=False))
        assert len(list(pending)) == SCHEMA_VERSION


def test_a_store_is_opened_again_as_it_was(tmp_path):
    with shelf(tmp_path) as made:
        made.put(key_of("a"), b"a", b"program")
        since = made.query("SELECT amount FROM statistics WHERE name = 'since'")
    with shelf(tmp_path) as made:
        assert made.get(key_of("a")) == b"a"
        assert made.query("SELECT amount FROM statistics WHERE name = 'since'") == since
        made.check()


def contents(directory: Path) -> dict[str, bytes]:
    """All files but SQLite's index of a journal, and a journal in which there is nothing: readers leave those."""
    found = {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if content and not name.endswith("-shm")}


def test_a_newer_store_is_refused_and_left_as_it_is(tmp_path):
    with shelf(tmp_path) as made:
        made.put(key_of("a"), b"x" * 100_000, b"program")
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as database:
        database.execute("PRAGMA user_version = 99")
    before = contents(tmp_path)
    with pytest.raises(NewerStoreError, match=r"newer xcache .schema 99; this one knows \d"):
        Store(tmp_path)
    assert contents(tmp_path) == before


def test_a_newer_store_whose_daemon_was_killed_keeps_its_journal(tmp_path):
    with shelf(tmp_path) as made:
        made.put(key_of("a"), b"a", b"program")
        with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as database:
            database.execute("PRAGMA user_version = 99")
        copy = tmp_path / "copy"
        copy.mkdir()
        for name in ("store.db", "store.db-wal"):
            (copy / name).write_bytes((tmp_path / name).read_bytes())
    before = contents(copy)
    with pytest.raises(NewerStoreError):
        Store(copy)
    assert contents(copy) == before


@pytest.mark.parametrize("content", [b"this is not a database " * 1000, b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_kept_under_another_name_and_a_fresh_one_begun(tmp_path, content):
    (tmp_path / "store.db").write_bytes(content)
    with shelf(tmp_path) as made:
        assert made.put(key_of("a"), b"a", b"program").kept
        made.check()
    (kept,) = tmp_path.glob("store.db.damaged-*")
    assert kept.read_bytes() == content


def test_a_folder_in_the_databases_place_is_refused(tmp_path):
    (tmp_path / "store.db").mkdir()
    with pytest.raises(StoreError, match=r"store\.db cannot be opened"):
        Store(tmp_path)


def test_an_empty_file_is_a_new_store(tmp_path):
    (tmp_path / "store.db").touch()
    with shelf(tmp_path) as made:
        assert made.put(key_of("a"), b"a", b"program").kept
        made.check()


def test_no_descriptor_stays_open(tmp_path):
    for name in ("new", "newer", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "refused" / "store.db").mkdir(parents=True)
    for name in ("new", "newer"):
        with shelf(tmp_path / name):
            pass
    with contextlib.closing(sqlite3.connect(tmp_path / "newer" / "store.db")) as database:
        database.execute("PRAGMA user_version = 99")
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are all that is wanted
    for _ in range(3):
        with shelf(tmp_path / "new"):
            pass
        (tmp_path / "broken" / "store.db").write_bytes(b"this is not a database " * 1000)
        with shelf(tmp_path / "broken"):
            pass
        for name in ("newer", "refused"):
            with pytest.raises(StoreError):
                Store(tmp_path / name)
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.thorough
def test_a_store_whose_making_was_cut_short_anywhere_is_made_whole(place):
    folder = quick_folder()
    try:
        said = subprocess.run(
            [sys.executable, "-c", program_text("cut_the_making_of_a_store_short"), str(folder)],
            env=place.env,
            stdout=-1,
            timeout=60,
            check=True,
        )
        assert int(said.stdout) > 20
        for number in range(int(said.stdout) + 1):
            with shelf(folder / str(number)) as made:
                assert made.put(key_of("a"), b"a", b"program").kept, number
                assert made.get(key_of("a")) == b"a"
                made.check()
    finally:
        shutil.rmtree(folder)


def test_a_cut_off_transaction_is_as_if_it_had_never_been(tmp_path):
    with shelf(tmp_path) as made:
        made.put(key_of("a"), b"a", b"program")

        def fail(store):
            with store.transaction():
                store.remove([EntryKey(key_of("a"), WRITER.uid)])
                raise ValueError("cut off")

        assert made.call(fail).kind == "store error"
        assert made.get(key_of("a")) == b"a"
        made.check()


def test_anybody_may_read_while_it_is_written(tmp_path):
    with shelf(tmp_path) as made, contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM entries").fetchone() == (0,)
        assert made.put(key_of("a"), b"a", b"program").kept
        assert reader.execute("SELECT count(*) FROM entries").fetchone() == (0,)
        reader.execute("COMMIT")
        assert reader.execute("SELECT count(*) FROM entries").fetchone() == (1,)
