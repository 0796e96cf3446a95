"""A database that is damaged is set aside, at the start or while it is in use, and a fresh one begun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3

import pytest
from sqlite_utils import Database
from support.conversation import Conversation, key_of, talking
from support.marks import thorough
from support.places import Place, get_message, put_message, until
from support.stores import shelf

from xcache.errors import RefusedError
from xcache.wire import commands, protocol
from xcache.wire.schema import SCHEMA_VERSION
from xcached.requests.removals import removed
from xcached.store import database, schema
from xcached.store.entries import EntryKey

# More than SQLite keeps in memory.
MANY = 1500
HEADER = 100


def fill(place: Place) -> None:
    with talking(place) as talk:
        for start in range(0, MANY, 50):
            keys = [key_of(str(number)) for number in range(start, start + 50)]
            requests = [talk.say(put_message(key, os.urandom(4000), b"program")) for key in keys]
            assert set(talk.answers(requests).values()) == {protocol.Stored(True)}
        talk.ask(commands.Sync())
    emptied(place.dir / "store.db")


def emptied(path) -> bool:
    """Move the journal into the database; return False if that fails, as in the middle of a transaction."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        ((busy, _, _),) = database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return not busy


def damaged_in_use(child, path, damage) -> None:
    """The daemon stands still between the checkpoint and the damage: page 1 would be whole again in its next journal
    if the daemon had read it in between.
    """

    def done() -> bool:
        child.send_signal(signal.SIGSTOP)
        try:
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            if not emptied(path):
                return False
            damage(path)
            return True
        finally:
            child.send_signal(signal.SIGCONT)

    assert until(done)


def garbled(path, start: int, length: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(os.urandom(length))


def truncated(path) -> None:
    os.truncate(path, path.stat().st_size // 3)


DAMAGE = {
    "its beginning": lambda path: garbled(path, 0, 4096),
    "behind its header": lambda path: garbled(path, HEADER, 4096 * 4),
    "nearly everything": lambda path: garbled(path, 4096, path.stat().st_size - 4096),
    "truncated": truncated,
}


def set_aside(place: Place) -> list[str]:
    return [path.name for path in place.dir.glob("store.db.damaged-*") if not path.name.endswith(("-wal", "-shm"))]


def works(place: Place) -> None:
    with talking(place) as talk:
        assert talk.put(key_of("fresh"), b"fresh") == protocol.Stored(True)
        assert talk.get(key_of("fresh")) == b"fresh"
    assert place.query("PRAGMA integrity_check") == [("ok",)]


@pytest.mark.parametrize("damage", thorough(DAMAGE.values(), usual=[DAMAGE["truncated"]]), ids=list(DAMAGE))
def test_damage_that_is_met_while_it_is_in_use(place, damage):
    """The daemon begins anew by itself; nobody has to start it."""
    child = place.start_daemon()
    fill(place)
    damaged_in_use(child, place.dir / "store.db", damage)

    def met() -> bool:
        with contextlib.suppress(OSError, ConnectionError), contextlib.closing(Conversation(place)) as talk:
            talk.greet()
            for number in range(0, MANY, 7):
                talk.put(key_of(f"more {number}"), os.urandom(3000))
                talk.ask(get_message(key_of(str(number))))
                talk.descriptors.clear()
        return bool(set_aside(place))

    assert until(met)
    assert until(place.answers)
    works(place)
    assert child.poll() is None
    assert place.daemon_pid() == child.pid
    assert len(set_aside(place)) == 1
    status = place.run("import sys; from xcache.cli import main; sys.argv[1:] = ['status', '--json']; main()")
    assert json.loads(status.stdout)["damaged_databases"] == [str(place.dir / set_aside(place)[0])]
    assert "a damaged database was set aside and a fresh one begun" in status.stderr


@pytest.mark.parametrize("damage", thorough(DAMAGE.values(), usual=[DAMAGE["its beginning"]]), ids=list(DAMAGE))
def test_damage_that_is_met_at_the_start(place, damage):
    place.start_daemon()
    fill(place)
    place.stop()
    damage(place.dir / "store.db")
    place.start_daemon()
    with talking(place) as talk, contextlib.suppress(ConnectionError, OSError):
        for number in range(0, MANY, 7):
            talk.ask(get_message(key_of(str(number))))
            talk.put(key_of(f"more {number}"), os.urandom(3000))
    assert until(lambda: set_aside(place))
    assert until(place.answers)
    works(place)


def test_the_database_is_set_aside_as_it_was(place):
    place.dir.mkdir(mode=0o700)
    content = b"this is not a database " * 1000
    (place.dir / "store.db").write_bytes(content)
    place.start_daemon()
    works(place)
    (name,) = set_aside(place)
    assert (place.dir / name).read_bytes() == content
    assert "was damaged and is kept as" in (place.dir / "daemon.log").read_text()


def test_a_damaged_journal_costs_no_more_than_what_was_in_it(place):
    child = place.start_daemon()
    with talking(place) as talk:
        talk.put(key_of("a"), b"a")
        with contextlib.closing(sqlite3.connect(place.dir / "store.db")) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        talk.put(key_of("b"), b"b")
    child.kill()
    child.wait()
    journal = place.dir / "store.db-wal"
    garbled(journal, 0, journal.stat().st_size)
    place.start_daemon()
    with talking(place) as talk:
        assert talk.get(key_of("a")) == b"a"
        assert talk.get(key_of("b")) is None
    works(place)
    assert set_aside(place) == []


def test_a_store_of_the_first_version_becomes_one_of_this(tmp_path):
    """The new store has all that was in the old one."""
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        schema.migrations.apply(Database(connection, execute_plugins=False), stop_before="m002_writers")
        for digest, content in (("d1", b"one"), ("d2", b"two"), ("p1", b"program")):
            connection.execute("INSERT INTO blobs VALUES (?, ?, ?)", (digest, len(content), content))
        connection.execute("INSERT INTO programs VALUES ('program', 7, 'none', 'p1')")
        for key, blob, used in (("k1", "d1", 20.0), ("k2", "d2", 10.0)):
            connection.execute("INSERT OR IGNORE INTO components VALUES ('o', 'options', 'text', 0)")
            connection.execute(
                "INSERT INTO entries (key, module_name, blob, stored_size, compile_seconds, last_used_at, hits,"
                " writer_uid, program, options_component, created_at)"
                " VALUES (?, 'm', ?, 3, 1.5, ?, 4, 1, 'program', 'o', 5.0)",
                (key, blob, used),
            )
        connection.execute("INSERT INTO not_cacheable VALUES ('k3', 'm', 'a sort', 1.0)")
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    with shelf(tmp_path) as made:
        assert made.query("PRAGMA user_version") == [(SCHEMA_VERSION,)]
        assert made.get("k1") == b"one"
        assert made.query("SELECT key, used_order, hits, footprint, writer_uid FROM entries ORDER BY used_order") == [
            ("k2", 1, 4, 10, 1),
            ("k1", 2, 4, 10, 1),
        ]
        assert made.query("SELECT digest, writer_uid FROM programs") == [("program", 1)]
        assert made.query("SELECT uses FROM components") == [(2,)]
        assert made.query("SELECT * FROM users") == [(1, 2, 20)]
        assert made.store.reader.why_not("k3", lambda writer: True) == "a sort"
        assert dict(made.query("SELECT name, amount FROM totals")) == {
            "entries": 2,
            "bytes": 13,
            # Module names and the one description.
            "text_bytes": 2 * len("m") + len("text"),
            # The reason why not, and the name of the one counter.
            "other_bytes": len("m" + "a sort") + len("since"),
        }
        # And it goes on as one: triggers, order and all.
        assert made.put(key_of("new"), b"new", b"program").kept
        assert made.query("SELECT max(used_order) FROM entries") == [(3,)]
        made.call(lambda store: removed(store, [EntryKey("k1", 1), EntryKey("k2", 1)]))
        made.check()


def test_only_a_few_damaged_databases_are_kept(place):
    place.dir.mkdir(mode=0o700)
    for number in range(8):
        (place.dir / f"store.db.damaged-2020010{number}-000000").touch()
        (place.dir / f"store.db.damaged-2020010{number}-000000-wal").touch()
    (place.dir / "store.db").write_bytes(b"this is not a database " * 1000)
    place.start_daemon()
    works(place)
    assert len(set_aside(place)) == 5
    assert "store.db.damaged-20200107-000000" in set_aside(place)
    assert len(list(place.dir.glob("*-wal"))) <= 5


def test_marks_that_are_damaged_keep_no_daemon_from_starting(place):
    place.start_daemon()
    with talking(place) as talk:
        talk.ask(protocol.MarkNotCacheable(key_of("a"), "jit_f", "a reason"))
    place.stop()
    ((page,), (size,)) = (
        place.query("SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_not_cacheable_1'")[0],
        place.query("PRAGMA page_size")[0],
    )
    with (place.dir / "store.db").open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    place.start_daemon()
    with talking(place) as talk, contextlib.suppress(ConnectionError, RefusedError):
        talk.get(key_of("b"))
    assert until(lambda: set_aside(place))
    assert until(place.answers)
    works(place)


def test_no_reserve_is_made_in_a_store_that_is_being_deleted(tmp_path):
    """``rm -rf`` empties the folder and then removes it; a daemon that has just started must put nothing there."""
    with contextlib.closing(database.Database(tmp_path)) as opened:
        (tmp_path / "store.db").unlink()
        assert opened.keep_reserve() == 0
        assert not (tmp_path / "reserve").exists()
