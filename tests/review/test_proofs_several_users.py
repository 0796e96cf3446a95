"""Each of these fails on the code as it was reviewed: what one user of a machine's daemon does to another."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from conftest import digest, get_message, put_message, until
from conversation import Conversation, key_of
from test_leases import begin_to_wait, outcome, take

from xcache import protocol

sys.path.append(str(Path(__file__).parents[1] / "faults"))
from test_other_users import ALICE, BOB, BUILDER, CAROL, machine  # noqa: F401

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
def test_21_what_a_stranger_stores_does_not_end_a_wait(users, what):
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


def test_22_what_a_stranger_says_that_compiling_took_is_not_believed(users):
    alice, carol, bob = users(ALICE), users(CAROL), users(BOB)
    bob.put(KEY, b"bob's", compile_seconds=0.0)
    bob.ask(protocol.Remove([KEY]))
    take(alice)
    carol.say(get_message(KEY, 60.0))
    _, word = carol.hear()
    assert word.at_most > 30, word


def test_23_of_one_users_programs_one_compiles_when_a_trusted_one_gives_up(users):
    builder, bob, one, two = users(BUILDER), users(BOB), users(ALICE), users(ALICE)
    lease = take(builder)
    asked = [begin_to_wait(talk) for talk in (bob, one, two)]
    builder.say(protocol.Release(KEY, lease))
    assert outcome(bob, asked[0]).lease
    assert outcome(one, asked[1]).lease, "sent to compile without a lease"
    assert still_waits(two, asked[2]) is True


def test_24_a_strangers_strikes_neither_take_back_ones_own_nor_keep_the_writer_busy(users):
    alice, crasher = users(ALICE), digest(b"crasher")
    alice.put(KEY, b"crasher")
    for _ in range(2):
        victim = users(ALICE)
        victim.say(protocol.Loading(KEY, crasher))
        victim.status()
        victim.close()
    assert until(lambda: alice.put(KEY, b"crasher", overwrite=True) != protocol.Stored(True))
    for round_ in range(170):
        bob = users(BOB)
        notes = (protocol.Loading(f"{round_} {n}", digest(b"%d %d" % (round_, n))) for n in range(64))
        bob.raw(b"".join(protocol.encode(9 + n, note) for n, note in enumerate(notes)))
        bob.status()
        bob.close()
    start = time.monotonic()
    alice.socket.settimeout(150)
    alice.ask(protocol.Sync())
    waited = time.monotonic() - start
    mine = users.place.query("SELECT count FROM strikes WHERE reader_uid = ?", ALICE)
    assert (waited < 2, mine) == (True, [(2,)]), f"alice waited {waited:.0f} s; her strikes: {mine}"


def test_25_a_strangers_counts_do_not_keep_the_writer_busy(users):
    alice, bob = users(ALICE), users(BOB)
    alice.socket.settimeout(100)
    start = time.monotonic()
    for round_ in range(400):
        bob.ask(protocol.Report({f"errors:{round_} {n}": 1 for n in range(1024)}))
    flooded = time.monotonic() - start
    start = time.monotonic()
    assert alice.put(KEY, b"alice's") == protocol.Stored(True)
    took = time.monotonic() - start
    peak = alice.status()["peak_memory"] >> 20
    assert took < 1, f"after {flooded:.1f} s of reports alice's put took {took:.1f} s; the daemon's peak {peak} MiB"


def test_26_a_quota_counts_programs_that_stay(users):
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
