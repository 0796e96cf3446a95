"""The writer thread: a damaged database concerns the daemon, not only the put that meets it."""

from __future__ import annotations

import sqlite3

import pytest
from support.conversation import key_of
from support.stores import quick_folder, shelf

from xcache.wire import protocol


def damage() -> sqlite3.DatabaseError:
    """Return the error of a damaged database file, as SQLite raises it."""
    error = sqlite3.DatabaseError("database disk image is malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


@pytest.mark.parametrize("where", ["check", "accept", "put", "statistics.add"])
def test_damage_that_a_put_meets_is_the_databases(monkeypatch, where):
    with shelf(quick_folder()) as made:

        def fail(*arguments: object) -> None:
            raise met

        met = damage()
        with monkeypatch.context() as patch:
            owner, _, name = where.rpartition(".")
            patch.setattr(getattr(made.store, owner) if owner else made.store, name, fail)
            answer = made.begin_put(key_of("a"), b"x", b"p").result(20)
        assert isinstance(answer, protocol.Refused) and answer.kind == "store error", answer
        assert made.damage == [met]
