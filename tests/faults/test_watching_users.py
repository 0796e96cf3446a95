"""On a machine's daemon a user watches own programs, and of others hears only how many there are."""

from __future__ import annotations

import pytest
from support.conversation import key_of
from support.leasing import take
from support.users import ALICE, BOB, CAROL, DAEMON

from xcache.wire import commands, protocol

MISS = [0, "jit_secret", "secret.py:1", "", key_of("b"), "miss", "new", "", "", "[]"]
COUNTS = ("connected", "compiling", "other_connected", "other_compiling")


@pytest.mark.parametrize(
    ("watcher", "own", "counts"),
    [(ALICE, {ALICE}, [1, 1, 1, 1]), (CAROL, set(), [0, 0, 2, 2]), (0, {ALICE, BOB}, [2, 2, 0, 0]),
     (DAEMON, {ALICE, BOB}, [2, 2, 0, 0])],
)  # fmt: skip
def test_a_user_sees_own_programs_and_administrators_all(users, watcher, own, counts):
    talks = {uid: users(uid) for uid in (ALICE, BOB)}
    for uid, talk in talks.items():
        take(talk, key_of(str(uid)))
    watching = users(watcher)
    request = watching.say(commands.Watch())
    _, seen = watching.hear()
    assert [seen.facts[name] for name in COUNTS] == counts
    assert {row["uid"] for row in seen.programs} == {row["uid"] for row in seen.doing} == own
    assert {row["key"] for row in seen.doing} == {key_of(str(uid)) for uid in own}
    for talk in talks.values():
        talk.ask(protocol.Report({"hits": 7, "misses": 1}))
        assert talk.ask(protocol.RecordRun("0123456789abcdef", 1.0, False, {}, [MISS])) == protocol.Done()
    heard = [watching.hear() for _ in range(3)]
    assert {number for number, _ in heard} == {request}
    assert sum(seen.facts["hits"] for _, seen in heard) == 7 * len(own)
    assert {row["uid"] for _, seen in heard for row in seen.missed} == own
