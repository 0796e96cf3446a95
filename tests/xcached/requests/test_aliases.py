"""The daemon tells which program a jaxpr was lowered to, as long as it has an entry of that program to give."""

from __future__ import annotations

import contextlib
import os
import sqlite3

import msgpack
from support.conversation import Conversation, key_of, talking
from support.environments import Environment
from support.places import digest, until

from xcache.wire import commands, protocol, seals

PROGRAM = b"program"


def alias_of(structure: str, program: bytes = PROGRAM, facts: bytes = b"facts") -> protocol.Alias:
    """Return an alias of the program of a put with these bytes."""
    return seals.sealed(digest(structure.encode()), digest(b"raw " + program), facts)


def remember(talk: Conversation, *made: protocol.Alias) -> None:
    assert talk.ask(protocol.RememberAliases([[*alias] for alias in made])) == protocol.Done()


def told(talk: Conversation, structure: str) -> protocol.Alias | None:
    answer = talk.ask(protocol.AskAlias(digest(structure.encode())))
    assert isinstance(answer, protocol.Alias | protocol.NoAlias), answer
    return answer if isinstance(answer, protocol.Alias) else None


def rows(place) -> list[object]:
    return [structure for (structure,) in place.query("SELECT structure FROM aliases ORDER BY rowid")]


def test_an_alias_is_told_as_it_was_remembered(place, talk):
    talk.put(key_of("a"), b"a")
    made = [alias_of("s"), alias_of("t", facts=b""), alias_of("u", facts=b"\0" * protocol.MAX_FACTS)]
    remember(talk, *made)
    assert [told(talk, name) for name in "stu"] == made
    assert told(talk, "v") is None
    place.stop()
    place.start_daemon()
    with talking(place) as again:
        assert [told(again, name) for name in "stu"] == made


def test_a_prediction_says_which_structures_have_any_alias(talk):
    def predicted() -> protocol.Prediction:
        answer = talk.ask(protocol.Predict("train.py", ""))
        assert isinstance(answer, protocol.Prediction), answer
        return answer

    assert predicted().structures == b""
    talk.put(key_of("a"), b"a")
    many = [alias_of(f"{number}") for number in range(3)]
    remember(talk, *many)
    assert {*pieces(predicted().structures)} == {protocol.beginning(alias.structure) for alias in many}


def pieces(packed: bytes) -> list[bytes]:
    size = protocol.STRUCTURE_BYTES
    return [packed[at : at + size] for at in range(0, len(packed), size)]


def test_more_structures_than_fit_are_not_told(place, talk):
    talk.put(key_of("a"), b"a")
    insert = "INSERT INTO aliases (structure, writer_uid, program, facts, seal, created_at) VALUES (?, ?, ?, '', '', 0)"

    def add(numbers: range) -> None:
        rows = ((digest(f"{number}".encode()), os.getuid(), digest(b"raw program")) for number in numbers)
        with contextlib.closing(sqlite3.connect(place.dir / "store.db")) as database, database:
            database.executemany(insert, rows)

    add(range(protocol.MAX_STRUCTURES))
    told = talk.ask(protocol.Predict("train.py", ""))
    assert len(told.structures) == protocol.MAX_STRUCTURES * protocol.STRUCTURE_BYTES
    add(range(-1, 0))
    assert talk.ask(protocol.Predict("train.py", "")).structures is None


def test_a_structure_of_any_kind_has_no_alias(talk):
    for structure in ("", "short", "x" * protocol.MAX_TEXT, "ü" * 64, "' OR 1=1 --", "\0"):
        assert talk.ask(protocol.AskAlias(structure)) == protocol.NoAlias()


def test_an_alias_of_a_program_without_an_entry_is_not_kept(place, talk):
    talk.put(key_of("a"), b"a")
    remember(talk, alias_of("s", b"another program"), alias_of("t"))
    assert told(talk, "s") is None
    assert told(talk, "t") == alias_of("t")
    assert rows(place) == [alias_of("t").structure]


def test_a_second_alias_of_a_structure_replaces_the_first(place, talk):
    talk.put(key_of("a"), b"a")
    talk.put(key_of("b"), b"b", b"another program")
    remember(talk, alias_of("s"))
    remember(talk, alias_of("s", b"another program"))
    assert told(talk, "s") == alias_of("s", b"another program")
    remember(talk, alias_of("s", facts=b"other facts"))
    assert told(talk, "s") == alias_of("s", facts=b"other facts")
    assert rows(place) == [alias_of("s").structure]


def test_a_dropped_alias_is_gone(place, talk):
    talk.put(key_of("a"), b"a")
    remember(talk, alias_of("s"), alias_of("t"))
    for _ in range(2):
        assert talk.ask(protocol.DropAlias(alias_of("s").structure)) == protocol.Done()
    assert told(talk, "s") is None
    assert told(talk, "t") == alias_of("t")


GOOD = [*alias_of("s")]


NO_ALIASES = [
    [],
    GOOD[:3],
    [*GOOD, "more"],
    ["short", *GOOD[1:]],
    [GOOD[0], "AB" * 32, *GOOD[2:]],
    [*GOOD[:3], "../x"],
    [*GOOD[:2], "text", GOOD[3]],
    [*GOOD[:2], b"f" * (protocol.MAX_RECORD + 1), GOOD[3]],
]


def test_aliases_among_which_one_cannot_be_are_refused(place, talk):
    talk.put(key_of("a"), b"a")
    for fields in NO_ALIASES:
        assert isinstance(talk.ask(protocol.RememberAliases([GOOD, fields])), protocol.Refused), repr(fields)[:200]
        assert rows(place) == []


def test_too_many_aliases_at_once_are_refused(place, talk):
    talk.put(key_of("a"), b"a")
    assert isinstance(talk.ask(protocol.RememberAliases([GOOD] * (protocol.MAX_ALIASES + 1))), protocol.Refused)
    assert talk.ask(protocol.RememberAliases([GOOD] * protocol.MAX_ALIASES)) == protocol.Done()
    assert rows(place) == [GOOD[0]]


def test_aliases_leave_with_the_last_entry_of_their_program(place, talk):
    for name in "ab":
        talk.put(key_of(name), name.encode())
    talk.put(key_of("c"), b"c", b"another program")
    remember(talk, alias_of("s"), alias_of("t"), alias_of("u", b"another program"))
    talk.ask(commands.Remove([key_of("a")]))
    assert [bool(told(talk, name)) for name in "stu"] == [True, True, True]
    talk.ask(commands.Remove([key_of("b")]))
    assert [bool(told(talk, name)) for name in "stu"] == [False, False, True]
    assert rows(place) == [alias_of("u").structure]
    talk.ask(commands.Clear())
    assert rows(place) == []


def test_an_alias_whose_entries_are_stale_is_not_told_and_leaves_with_them(place):
    environment = Environment(place.root / "venv", "1.0")
    place.start_daemon(XCACHE_STALE_GRACE="1h")
    environment.put(place)
    with talking(place) as talk:
        remember(talk, alias_of("s"))
        assert told(talk, "s") == alias_of("s")
        environment.library.unlink()
        assert until(lambda: told(talk, "s") is None)
        assert rows(place) == [alias_of("s").structure]
        # Another entry of the same program has a toolchain that is there.
        talk.put(key_of("a"), b"a")
        assert told(talk, "s") == alias_of("s")
        talk.ask(commands.Remove([key_of("a")]))
        assert told(talk, "s") is None
    place.stop()
    place.start_daemon(XCACHE_STALE_GRACE="0")
    assert until(lambda: rows(place) == [])


def test_only_the_newest_aliases_of_one_program_are_kept(place, talk):
    talk.put(key_of("a"), b"a")
    talk.put(key_of("b"), b"b", b"another program")
    remember(talk, alias_of("other", b"another program"))
    remember(talk, *(alias_of(str(number)) for number in range(18)))
    # To be written again makes it the newest.
    remember(talk, alias_of("2"), alias_of("18"))
    kept = [str(number) for number in (*range(4, 18), 2, 18)]
    assert rows(place) == [alias_of(name).structure for name in ("other", *kept)]


def test_a_question_waits_for_no_write(place, talk):
    talk.put(key_of("a"), b"a")
    remember(talk, alias_of("s"))
    with contextlib.closing(sqlite3.connect(place.dir / "store.db", isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        written = talk.say(protocol.RememberAliases([[*alias_of("t")]]))
        assert told(talk, "s") == alias_of("s")
        assert told(talk, "t") is None
        database.execute("COMMIT")
    assert talk.answer(written) == protocol.Done()
    assert told(talk, "t") == alias_of("t")


def predicted(talk: Conversation, *keys: str) -> protocol.Prediction:
    like = {"options": digest(b"o"), "devices": "0", "platform": "cpu", "seconds": 0.5}
    items = [{"key": key, **like} for key in keys]
    assert talk.ask(protocol.Remember("train.py", "", items, {digest(b"o"): b"o"})) == protocol.Done()
    answer = talk.ask(protocol.Predict("train.py", ""))
    assert isinstance(answer, protocol.Prediction), answer
    return answer


def test_a_prediction_brings_the_newest_aliases_of_its_programs(talk):
    for name in "abc":
        talk.put(key_of(name), name.encode(), name.encode())
    talk.put(key_of("b again"), b"b again", b"b")
    remember(talk, *(alias_of(f"a{number}", b"a") for number in range(6)), alias_of("b", b"b"), alias_of("c", b"c"))
    found = predicted(talk, key_of("b"), key_of("a"), key_of("nowhere"), key_of("b again"))
    assert [seals.opened(fields) for fields in found.aliases] == [
        alias_of("b", b"b"),
        *(alias_of(f"a{number}", b"a") for number in (5, 4, 3, 2)),
    ]
    assert set(found.payloads) == {key_of(name) for name in ("a", "b", "b again")}


def test_a_prediction_has_room_for_aliases_and_entries(talk):
    names = [f"n{number}" for number in range(300)]
    for name in names:
        talk.put(key_of(name), name.encode() * 2000, name.encode())
        remember(talk, *(alias_of(f"{name} {number}", name.encode(), b"f" * protocol.MAX_FACTS) for number in range(4)))
    found = predicted(talk, *map(key_of, names))
    assert len(found.items) == 300
    size = sum(len(msgpack.packb(fields)) for fields in found.aliases)
    assert protocol.MAX_FRAME / 4 - 5000 < size <= protocol.MAX_FRAME / 4
    assert [fields[0] for fields in found.aliases[:4]] == [
        alias_of(f"n0 {number}").structure for number in (3, 2, 1, 0)
    ]
    assert len(found.payloads) > 30


def test_what_somebody_altered_in_the_database_is_no_alias(place, talk):
    talk.put(key_of("a"), b"a")
    remember(talk, alias_of("s"), alias_of("t"))
    for facts in ("text", b"f" * protocol.MAX_FRAME):
        place.execute("UPDATE aliases SET facts = ? WHERE structure = ?", facts, alias_of("s").structure)
        assert told(talk, "s") is None
    assert [fields[0] for fields in predicted(talk, key_of("a")).aliases] == [alias_of("t").structure]
