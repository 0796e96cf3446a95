"""A miss costs the store nothing, and statistics are written in batches."""

from __future__ import annotations

import contextlib
import sqlite3
import struct
import time
from collections.abc import Iterator

from support.conversation import Conversation, key_of, talking
from support.places import get_message, until

from xcache.wire import commands, protocol

ASKS, AT_ONCE = 2000, 50
FLUSH_EVERY = 5.0
_WAL_HEADER, _FRAME_HEADER = struct.Struct(">4s3I4s4s8x"), struct.Struct(">II4s4s8x")


def ask_all(talk: Conversation, messages: list[protocol.Message]) -> list[protocol.Message]:
    """The answers, asked for some at once: neither end may have so much to say that it does not listen."""
    answers = []
    for start in range(0, len(messages), AT_ONCE):
        requests = [talk.say(message) for message in messages[start : start + AT_ONCE]]
        found = talk.answers(requests)
        answers += [found[request] for request in requests]
    return answers


@contextlib.contextmanager
def another_reader(place) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(f"file:{place.dir}/store.db?mode=ro", uri=True)) as database:
        yield database


def seen(place, database: sqlite3.Connection) -> tuple[object, ...]:
    """Return all that a write would change: SQLite's mark of the last commit, rows, and files with their sizes."""
    (version,) = database.execute("PRAGMA data_version").fetchone()
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    rows = {name: database.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}  # noqa: S608
    files = {path.relative_to(place.dir): path.stat().st_size for path in place.dir.rglob("*") if path.is_file()}
    return version, rows, files


def commits(place) -> int:
    """Count the transactions in the journal since it was last begun: the last page of each says so."""
    journal = (place.dir / "store.db-wal").read_bytes()
    _, _, page, _, *salts = _WAL_HEADER.unpack_from(journal)
    found = 0
    for at in range(_WAL_HEADER.size, len(journal) - page - _FRAME_HEADER.size + 1, page + _FRAME_HEADER.size):
        _, pages_after_commit, *theirs = _FRAME_HEADER.unpack_from(journal, at)
        if theirs != salts:
            break
        found += pages_after_commit > 0
    return found


def test_misses_write_nothing(place):
    place.start_daemon()
    with talking(place) as talk:
        assert talk.put(key_of("there"), b"content") == protocol.Stored(True)
        assert talk.ask(commands.Sync()) == protocol.Done()
        with another_reader(place) as database:
            before = seen(place, database)
            answers = ask_all(talk, [get_message(key_of(f"nowhere {n}")) for n in range(ASKS)])
            assert {answer.lease for answer in answers} == {0}
            # This writes everything that might be held back.
            assert talk.ask(commands.Sync()) == protocol.Done()
            assert seen(place, database) == before


def test_leases_that_are_given_back_write_nothing(place):
    place.start_daemon()
    with talking(place) as talk:
        assert talk.put(key_of("there"), b"content") == protocol.Stored(True)
        assert talk.ask(commands.Sync()) == protocol.Done()
        with another_reader(place) as database:
            before = seen(place, database)
            keys = [key_of(f"nowhere {n}") for n in range(ASKS)]
            answers = ask_all(talk, [get_message(key, 60.0) for key in keys])
            assert len({answer.lease for answer in answers} - {0}) == ASKS
            for key, answer in zip(keys, answers, strict=True):
                talk.say(protocol.Release(key, answer.lease))
            assert talk.ask(protocol.AskStatus()).compiles == []
            assert talk.ask(commands.Sync()) == protocol.Done()
            assert seen(place, database) == before


def test_hits_and_what_programs_count_are_written_in_batches(place):
    place.start_daemon()
    with talking(place) as talk:
        assert talk.put(key_of("there"), b"content") == protocol.Stored(True)
        assert talk.ask(commands.Sync()) == protocol.Done()
        # The writer may hold what it counted of the put for a moment after its answer.
        assert until(lambda: commits(place) > 0)
        before, began = commits(place), time.monotonic()
        said = [get_message(key_of("there")), protocol.Report({"requests": 1, "hits": 1})] * ASKS
        answers = ask_all(talk, said)
        assert sum(isinstance(answer, protocol.Found) for answer in answers) == ASKS
        assert talk.ask(commands.Sync()) == protocol.Done()
        # One at each interval, one for the Sync, and one that the put may have left.
        assert 1 <= commits(place) - before <= (time.monotonic() - began) / FLUSH_EVERY + 3
    assert place.query("SELECT hits FROM entries") == [(ASKS,)]
    kept = dict(place.query("SELECT name, amount FROM statistics"))
    assert (kept["requests"], kept["hits"]) == (ASKS, ASKS)
