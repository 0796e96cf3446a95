"""Users of one daemon who talk to it at the same time: what one says does to another no more than it may."""

from __future__ import annotations

import os
import time

import pytest
from conversation import Conversation, key_of
from places import digest, get_message, put_message, until
from test_leases import begin_to_wait, outcome, take
from test_other_users import ALICE, BOB, BUILDER, CAROL, machine  # noqa: F401

from xcache import protocol

KEY = key_of("a")


@pytest.fixture
def users(machine):  # noqa: F811
    """Makes connections of users; trusted are the members of a team, Alice and Carol, and the builder."""
    machine.start(XCACHE_TRUSTED_WRITERS="@team builder", XCACHE_USER_QUOTA="1M")
    made = []

    def user(uid):
        # The kernel reports who connected by the effective uid at that moment.
        os.seteuid(uid)
        try:
            made.append(Conversation(machine.place))
        finally:
            os.seteuid(0)
        made[-1].greet()
        return made[-1]

    user.place = machine.place
    yield user
    for each in made:
        each.close()


def still_waits(talk, request, seconds=1.5):
    """True where there is no answer for so long, else the answer."""
    talk.socket.settimeout(seconds)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            number, answer = talk.hear()
        except TimeoutError:
            break
        if number == request and not isinstance(answer, protocol.Wait):
            return answer
    return True


@pytest.mark.parametrize("what", ["put", "refused put", "mark"])
def test_what_a_stranger_stores_does_not_end_a_wait(users, what):
    alice, carol, bob = users(ALICE), users(CAROL), users(BOB)
    take(alice)
    asked = begin_to_wait(carol)
    message = {
        "put": put_message(KEY, b"1", b"2"),
        "refused put": put_message(KEY, b"1", b"2", digest="nonsense"),
        "mark": protocol.MarkNotCacheable(KEY, "m", "because"),
    }
    bob.ask(message[what])
    assert still_waits(carol, asked) is True


def test_what_a_stranger_says_that_compiling_took_is_not_believed(users):
    alice, carol, bob = users(ALICE), users(CAROL), users(BOB)
    bob.put(KEY, b"bob's", compile_seconds=0.0)
    bob.ask(protocol.Remove([KEY]))
    take(alice)
    carol.say(get_message(KEY, 60.0))
    _, word = carol.hear()
    assert word.at_most > 30, word


def test_of_one_users_programs_one_compiles_when_a_trusted_one_gives_up(users):
    builder, bob, one, two = users(BUILDER), users(BOB), users(ALICE), users(ALICE)
    lease = take(builder)
    asked = [begin_to_wait(talk) for talk in (bob, one, two)]
    builder.say(protocol.Release(KEY, lease))
    assert outcome(bob, asked[0]).lease
    assert outcome(one, asked[1]).lease, "sent to compile without a lease"
    assert still_waits(two, asked[2]) is True


def test_a_strangers_strikes_do_not_take_back_ones_own(users):
    """There are so many of each reader's that are remembered, and not so many of all."""
    alice = users(ALICE)
    alice.put(KEY, b"crasher")
    die_while_loading(users, ALICE, KEY, b"crasher", 2)
    bob = users(BOB)
    for n in range(1100):
        bob.put(key_of(str(n)), b"%d" % n)
    for start in range(0, 1100, protocol.MAX_LOADING):
        other, loads = users(BOB), range(start, min(start + protocol.MAX_LOADING, 1100))
        for n in loads:
            other.get(key_of(str(n)))
        other.say(protocol.Loading({key_of(str(n)): digest(b"%d" % n) for n in loads}))
        other.status()
        other.close()
    strikes = "SELECT count(*), sum(count) FROM strikes WHERE reader_uid = ?"
    assert until(lambda: users.place.query(strikes, BOB) == [(1000, 1000)])
    assert users.place.query(strikes, ALICE) == [(1, 2)]
    assert alice.put(KEY, b"crasher", overwrite=True).kind == "set aside"


def die_while_loading(users, uid, key, payload, times):
    for count in range(1, times + 1):
        victim = users(uid)
        assert victim.get(key) == payload
        victim.say(protocol.Loading({key: digest(payload)}))
        victim.close()
        assert until(lambda count=count: strikes_of(users, payload) == count)


def strikes_of(users, payload):
    return sum(count for (count,) in users.place.query("SELECT count FROM strikes WHERE blob = ?", digest(payload)))


def test_a_flood_of_counts_does_not_keep_the_writer_busy(users):
    alice, bob = users(ALICE), users(BOB)
    for round_ in range(30):
        bob.ask(protocol.Report({f"errors:{round_} {n}": 1 for n in range(1024)}))
    start = time.monotonic()
    assert alice.put(KEY, b"alice's") == protocol.Stored(True)
    assert time.monotonic() - start < 2
    assert users.place.query("SELECT count(*) <= 1000 FROM statistics") == [(1,)]


def test_a_quota_counts_programs_that_stay(users):
    bob = users(BOB)
    for n in range(8):
        program = {"program_digest": digest(b"program %d" % n)}
        assert bob.put(key_of(f"big {n}"), b"1", os.urandom(900_000), **program) == protocol.Stored(True)
        # The same program by its digest, and not by its bytes.
        assert bob.put(key_of(f"small {n}"), b"2", b"x", **program) == protocol.Stored(True)
        bob.ask(protocol.Remove([key_of(f"big {n}")]))
    total = bob.status()["bytes"]
    users_rows = users.place.query("SELECT * FROM users")
    assert total < 2_000_000, f"{total} bytes with a quota of 1 MiB: {users_rows}"
