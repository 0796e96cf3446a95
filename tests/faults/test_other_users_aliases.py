"""Aliases of several users: who may have whose, and whose goes first."""

from __future__ import annotations

import pytest
from support.conversation import Conversation, key_of
from support.places import digest
from support.users import ALICE, BOB, BUILDER, CAROL, KEY

from xcache.wire import commands, protocol
from xcache.wire.seals import sealed

STRUCTURE = digest(b"structure")


def alias(program: bytes, facts: bytes = b"") -> protocol.Alias:
    return sealed(STRUCTURE, digest(b"raw " + program), facts)


def remember(talk: Conversation, made: protocol.Alias) -> None:
    assert talk.ask(protocol.RememberAliases([[*made]])) == protocol.Done()


def told(talk: Conversation) -> protocol.Alias | None:
    answer = talk.ask(protocol.AskAlias(STRUCTURE))
    return answer if isinstance(answer, protocol.Alias) else None


def predicted(talk: Conversation, *keys: str) -> list[list[str | bytes]]:
    like = {"options": digest(b"o"), "devices": "0", "platform": "cpu", "seconds": 0.5}
    talk.ask(protocol.Remember("train.py", "", [{"key": key, **like} for key in keys], {digest(b"o"): b"o"}))
    found = talk.ask(protocol.Predict("train.py", ""))
    assert [item["key"] for item in found.items] == [*keys]
    return found.aliases


@pytest.mark.parametrize(
    ("writer", "readers"), [(BUILDER, {ALICE, BOB, CAROL, BUILDER}), (ALICE, {ALICE, CAROL}), (BOB, {BOB})]
)
def test_an_alias_is_for_those_who_trust_its_writer(users, writer, readers):
    everybody = (ALICE, BOB, CAROL, BUILDER)
    talks = {uid: users(uid) for uid in everybody}
    for talk in talks.values():
        # Each has an entry of the program, so that only trust decides.
        talk.put(KEY, b"entry", b"program")
    remember(talks[writer], alias(b"program"))
    assert {uid for uid in everybody if told(talks[uid])} == readers
    assert {uid for uid in everybody if predicted(talks[uid], KEY)} == readers


def test_nobody_has_an_alias_of_a_strangers_entry(users):
    alice, bob, carol = users(ALICE), users(BOB), users(CAROL)
    bob.put(KEY, b"bob's", b"program")
    remember(alice, alias(b"program"))
    assert users.place.query("SELECT 1 FROM aliases") == []
    # Carol trusts Alice, and may rest on her entry.
    alice.put(KEY, b"alice's", b"program")
    remember(carol, alias(b"program"))
    assert told(carol) == alias(b"program")
    alice.ask(commands.Remove([KEY]))
    assert told(carol) is None


def test_ones_own_alias_hides_those_of_others(users):
    alice, carol = users(ALICE), users(CAROL)
    for talk in (alice, carol):
        talk.put(KEY, b"1", b"wrong program")
        talk.put(key_of("b"), b"2", b"right program")
    remember(alice, alias(b"wrong program"))
    assert told(carol) == alias(b"wrong program")
    assert predicted(carol, KEY) == [[*alias(b"wrong program")]]
    remember(carol, alias(b"right program"))
    assert told(carol) == alias(b"right program")
    assert told(alice) == alias(b"wrong program")
    assert predicted(carol, KEY, key_of("b")) == [[*alias(b"right program")]]
    assert predicted(carol, KEY) == []
    assert predicted(alice, KEY, key_of("b")) == [[*alias(b"wrong program")]]


def test_nobody_replaces_or_drops_what_is_anothers(users):
    alice, bob = users(ALICE), users(BOB)
    for talk in (alice, bob):
        talk.put(KEY, b"1", b"program")
        talk.put(key_of("b"), b"2", b"another program")
    remember(alice, alias(b"program"))
    remember(bob, alias(b"another program"))
    assert bob.ask(protocol.DropAlias(STRUCTURE)) == protocol.Done()
    assert told(bob) is None
    assert told(alice) == alias(b"program")


def test_clearing_forgets_ones_own_that_rest_on_others_entries(users):
    builder, alice, bob = users(BUILDER), users(ALICE), users(BOB)
    builder.put(KEY, b"1", b"program")
    for talk in (alice, bob):
        remember(talk, alias(b"program"))
    alice.ask(commands.Clear())
    assert users.place.query("SELECT writer_uid FROM aliases") == [(BOB,)]
