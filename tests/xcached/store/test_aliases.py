"""Aliases in the store: they go with their program, their number has a bound, and limits count them."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest
from sqlite_utils import Database
from support.conversation import key_of
from support.places import digest
from support.stores import WRITER, Shelf, shelf

from xcache.wire import protocol, seals
from xcache.wire.schema import SCHEMA_VERSION
from xcached.store import aliases as store_aliases
from xcached.store import schema, store
from xcached.store.aliases import AliasRows
from xcached.store.entries import EntryKey

ALICE, BOB, ROOT = 1, 2, 0


def remember(made: Shelf, names: list[str], program: bytes, *, uid: int = WRITER.uid, facts: bytes = b"facts") -> None:
    sealed = [seals.sealed(digest(name.encode()), digest(b"raw " + program), facts) for name in names]
    rows = AliasRows(made.store, lambda reader, writer: writer in (reader, ROOT))
    assert made.call(lambda _: rows.remember(uid, sealed)) == protocol.Done()


def names_of(made: Shelf, *names: str) -> list[tuple[str, int]]:
    """Return which of these there are, with their writers, the oldest first."""
    known = {digest(name.encode()): name for name in names}
    return [(known[each], uid) for each, uid in made.query("SELECT structure, writer_uid FROM aliases ORDER BY rowid")]


def test_aliases_go_with_an_evicted_program(tmp_path):
    with shelf(tmp_path, max_entries=2) as made:
        for name in "ab":
            made.put(key_of(name), name.encode(), name.encode())
            remember(made, [f"{name}1", f"{name}2"], name.encode())
        made.check()
        made.limit(max_entries=1)
        made.sync()
        (left,) = (name for name in "ab" if made.get(key_of(name)))
        assert names_of(made, "a1", "a2", "b1", "b2") == [(f"{left}1", 1), (f"{left}2", 1)]
        made.check()
        made.remove(key_of(left))
        assert names_of(made) == []
        made.check()


def test_an_entry_that_is_replaced_keeps_the_aliases_of_its_program(tmp_path):
    with shelf(tmp_path) as made:
        made.put(key_of("a"), b"a", b"p")
        remember(made, ["s"], b"p")
        made.put(key_of("a"), b"another", b"p", overwrite=True)
        assert names_of(made, "s") == [("s", WRITER.uid)]
        made.check()
        # An entry that is replaced by one of another program loses its aliases.
        made.put(key_of("a"), b"a", b"q", overwrite=True)
        assert names_of(made, "s") == []
        made.check()


def test_an_alias_goes_with_its_writers_last_entry_of_the_program_or_with_the_last_of_all(tmp_path):
    with shelf(tmp_path, shared=True) as made:
        for uid in (ROOT, ALICE):
            made.put(key_of("a"), b"a", b"p", uid=uid)
        for uid in (ROOT, ALICE, BOB):
            remember(made, ["s"], b"p", uid=uid)
        made.call(lambda store: store.let_go([entry_of(ALICE)]) and None)
        # Bob's rests on root's entry.
        assert names_of(made, "s") == [("s", ROOT), ("s", BOB)]
        made.check()
        made.call(lambda store: store.let_go([entry_of(ROOT)]) and None)
        assert names_of(made) == []
        made.check()


def entry_of(uid: int) -> EntryKey:
    return EntryKey(key_of("a"), uid)


def test_no_alias_is_kept_of_a_program_that_only_strangers_have(tmp_path):
    with shelf(tmp_path, shared=True) as made:
        made.put(key_of("a"), b"a", b"p", uid=ALICE)
        remember(made, ["s"], b"p", uid=BOB)
        assert names_of(made) == []
        made.put(key_of("a"), b"a", b"p", uid=BOB)
        remember(made, ["s"], b"p", uid=BOB)
        assert names_of(made, "s") == [("s", BOB)]


def test_a_user_forgets_aliases_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_LEAST_ROWS", 3)
    with shelf(tmp_path, shared=True) as made:
        for uid in (ALICE, BOB):
            made.put(key_of("a"), b"a", b"p", uid=uid)
        remember(made, ["a", "b"], b"p", uid=ALICE)
        remember(made, list("cdefg"), b"p", uid=BOB)
        remember(made, ["h", "i"], b"p", uid=ALICE)
        assert names_of(made, *"abcdefghi") == [("b", 1), *((name, 2) for name in "efg"), ("h", 1), ("i", 1)]
        made.check()


def test_a_users_oldest_records_of_calls_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(store_aliases, "_MOST_RECORD_BYTES", 3 * (protocol.MAX_FACTS + 1))
    with shelf(tmp_path) as made:
        made.put(key_of("a"), b"a", b"p")
        remember(made, ["a"], b"p")
        for name in "bcde":
            remember(made, [name], b"p", facts=b"f" * (protocol.MAX_FACTS + 1))
        remember(made, ["f"], b"p", facts=b"f" * protocol.MAX_FACTS)
        assert [name for name, _ in names_of(made, *"abcdef")] == ["a", "c", "d", "e", "f"]
        made.check()


@pytest.mark.parametrize("shared", [False, True])
def test_aliases_count_in_ones_own_store_and_cost_no_other_user_an_entry(tmp_path, shared):
    with shelf(tmp_path, max_size=100_000, shared=shared) as made:
        for number in range(40):
            made.put(key_of(str(number)), (b"%02d" % number) * 1750, b"%d" % number, uid=ALICE)
        made.put(key_of("bob's"), b"b", b"p", uid=BOB)
        before = len(made.keys())
        for number in range(16):
            remember(made, [f"s{number}"], b"p", uid=BOB, facts=b"f" * 1024)
        made.sync()
        ((of_aliases,),) = made.query(
            "SELECT amount - (SELECT sum(length(name)) FROM statistics) FROM totals WHERE name = 'other_bytes'"
        )
        assert of_aliases == 16 * (3 * 64 + 1024)
        assert (len(made.keys()) == before) is shared
        made.check()


def test_a_store_of_the_version_before_has_no_aliases_and_takes_them(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        schema.migrations.apply(Database(connection, execute_plugins=False), stop_before="m008_aliases")
        assert connection.execute("PRAGMA user_version").fetchone() == (7,)
        names = "SELECT name FROM sqlite_master WHERE name LIKE '%alias%'"
        assert connection.execute(names).fetchall() == []
        connection.execute("INSERT INTO blobs VALUES ('d', 3, X'6f6e65')")
        connection.execute("INSERT INTO blobs VALUES ('p', 7, X'70726f6772616d')")
        connection.execute("INSERT INTO programs VALUES ('program', 1, 7, 'none', 'p')")
        connection.execute(
            "INSERT INTO entries (key, writer_uid, blob, stored_size, compile_seconds, footprint, program)"
            " VALUES ('k', 1, 'd', 3, 1.5, 10, 'program')"
        )
        connection.execute("INSERT INTO not_cacheable VALUES ('k2', 1, 'm', 'a sort', 1.0)")
        before = connection.execute("SELECT * FROM totals ORDER BY name").fetchall()
    with shelf(tmp_path) as made:
        assert made.query("PRAGMA user_version") == [(SCHEMA_VERSION,)]
        assert made.query("SELECT * FROM totals ORDER BY name") == before
        assert made.get("k") == b"one"
        rows = AliasRows(made.store, lambda reader, writer: reader == writer)
        made.call(lambda _: rows.remember(1, [seals.sealed("s" * 64, "program", b"facts")]))
        assert made.query("SELECT structure, program FROM aliases") == [("s" * 64, "program")]
        made.remove("k")
        assert made.query("SELECT * FROM aliases") == []
        made.check()
