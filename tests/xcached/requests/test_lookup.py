"""The daemon reads only trusted writers' rows, so a client pays nothing for what strangers have stored."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable
from typing import Any

import pytest
from support.conversation import Conversation, key_of, talking
from support.places import Place, digest, get_message

from xcache.wire import protocol, seals

STRANGER = os.getuid() - 1
PROGRAM = digest(b"raw program")


@pytest.fixture
def shared(place):
    place.env["XCACHE_DAEMON_USER"] = str(os.getuid())
    place.start_daemon()
    return place


@pytest.fixture
def talk(shared):
    with talking(shared) as conversation:
        yield conversation


def plant(place: Place, table: str, columns: str, rows: Iterable[tuple[Any, ...]]) -> None:
    marks = ", ".join("?" * len(columns.split()))
    insert = f"INSERT INTO {table} ({columns.replace(' ', ', ')}) VALUES ({marks})"  # noqa: S608 - our own names
    with contextlib.closing(sqlite3.connect(place.dir / "store.db", timeout=20)) as database, database:
        database.executemany(insert, rows)


def plant_aliases(place: Place, count: int) -> None:
    rows = ((digest(b"%d" % number), STRANGER, PROGRAM, b"f", "seal") for number in range(count))
    plant(place, "aliases", "structure writer_uid program facts seal", rows)


def plant_entries(place: Place, count: int) -> None:
    rows = ((digest(b"e%d" % number), STRANGER, PROGRAM, 1e6, "toolchain") for number in range(count))
    plant(place, "entries", "key writer_uid program compile_seconds toolchain_component", rows)


def remember(talk: Conversation) -> protocol.Alias:
    made = seals.sealed(digest(b"mine"), PROGRAM, b"facts")
    assert talk.ask(protocol.RememberAliases([[*made]])) == protocol.Done()
    return made


def test_the_structures_of_strangers_do_not_count_among_those_that_are_told(shared, talk):
    talk.put(key_of("a"), b"a")
    made = remember(talk)
    plant_aliases(shared, protocol.MAX_STRUCTURES + 1)
    found = talk.ask(protocol.Predict("train.py", ""))
    assert found.structures == protocol.beginning(made.structure)


def test_a_client_gets_its_alias_however_many_entries_strangers_have_of_the_program(shared, talk):
    talk.put(key_of("a"), b"a")
    made = remember(talk)
    plant_entries(shared, 600)
    assert talk.ask(protocol.AskAlias(made.structure)) == made


def test_a_prediction_has_the_clients_aliases_however_many_strangers_have(shared, talk):
    talk.put(key_of("a"), b"a")
    made = remember(talk)
    plant_aliases(shared, 600)
    like = {"options": digest(b"o"), "devices": "0", "platform": "cpu", "seconds": 0.5}
    run = protocol.Remember("train.py", "", [{"key": key_of("a"), **like}], {digest(b"o"): b"o"})
    assert talk.ask(run) == protocol.Done()
    assert talk.ask(protocol.Predict("train.py", "")).aliases == [[*made]]


def test_an_expected_time_is_that_of_trusted_writers(shared, talk):
    talk.put(key_of("a"), b"a", compile_seconds=8.0)
    plant_entries(shared, 600)
    with talking(shared) as holder:
        wanted = get_message(key_of("b"), 600.0)._replace(program_digest=PROGRAM)
        assert isinstance(holder.ask(wanted), protocol.Missing)
        waiting = talk.ask(wanted)
        assert isinstance(waiting, protocol.Wait)
        assert 8.0 <= waiting.at_most < 100.0
