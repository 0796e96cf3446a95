"""Users of one daemon who talk to it at the same time: what one says does to another no more than it may."""

from __future__ import annotations

import os
import time

import pytest
from support.conversation import key_of
from support.leasing import begin_to_wait, outcome, take
from support.places import digest, get_message, put_message
from support.users import ALICE, BOB, BUILDER, CAROL

from xcache.wire import commands, protocol

KEY = key_of("a")


def still_waits(talk, request):
    """Return True if no answer comes for a while, else the answer."""
    seconds = 1.5
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
def test_a_strangers_messages_do_not_end_a_wait(users, what):
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


def test_a_strangers_compile_time_is_not_believed(users):
    alice, carol, bob = users(ALICE), users(CAROL), users(BOB)
    bob.put(KEY, b"bob's", compile_seconds=0.0)
    bob.ask(commands.Remove([KEY]))
    take(alice)
    carol.say(get_message(KEY, 60.0))
    _, word = carol.hear()
    assert word.at_most > 30, word


def test_one_program_of_each_user_compiles_when_a_trusted_one_gives_up(users):
    builder, bob, one, two = users(BUILDER), users(BOB), users(ALICE), users(ALICE)
    lease = take(builder)
    asked = [begin_to_wait(talk) for talk in (bob, one, two)]
    builder.say(protocol.Release(KEY, lease))
    assert outcome(bob, asked[0]).lease
    assert outcome(one, asked[1]).lease, "sent to compile without a lease"
    assert still_waits(two, asked[2]) is True


def test_a_flood_of_counts_does_not_keep_the_writer_busy(users):
    alice, bob = users(ALICE), users(BOB)
    for round_ in range(30):
        bob.ask(protocol.Report({f"errors:{round_} {n}": 1 for n in range(1024)}))
    assert alice.put(KEY, b"alice's") == protocol.Stored(True)
    # The daemon's own counts have room beside it.
    assert users.place.query("SELECT count(*) < 1100 FROM statistics") == [(1,)]
    assert users.place.query("SELECT amount FROM statistics WHERE name = 'stores'") == [(1.0,)]


def test_a_quota_counts_programs_that_stay(users):
    bob = users(BOB)
    for n in range(8):
        program = {"program_digest": digest(b"program %d" % n)}
        assert bob.put(key_of(f"big {n}"), b"1", os.urandom(900_000), **program) == protocol.Stored(True)
        # The same program by its digest, and not by its bytes.
        assert bob.put(key_of(f"small {n}"), b"2", b"x", **program) == protocol.Stored(True)
        bob.ask(commands.Remove([key_of(f"big {n}")]))
    total = bob.status()["bytes"]
    users_rows = users.place.query("SELECT * FROM users")
    assert total < 2_000_000, f"{total} bytes with a quota of 1 MiB: {users_rows}"


def test_the_components_of_a_prediction_are_those_of_the_entry_that_would_be_served(users):
    """Loading ahead relies on the components, so those that another user claims for the same key do not count."""
    bob, alice, carol = users(BOB), users(ALICE), users(CAROL)
    for number, (talk, made_with) in enumerate([(bob, b"bob's"), (carol, b"carol's"), (alice, b"alice's")]):
        components = {name: digest(made_with) for name in ("program", *protocol.DESCRIBED_COMPONENTS)}
        talk.put(KEY, b"executable %d" % number, components=components)
    item = {"key": KEY, "options": digest(b"o"), "devices": "0", "platform": "cpu", "seconds": 0.5}
    for talk, made_with in ((alice, b"alice's"), (carol, b"carol's")):
        talk.ask(protocol.Remember("train.py", "", [item], {digest(b"o"): b"o"}))
        found = talk.ask(protocol.Predict("train.py", ""))
        assert (len(found.items), found.made_with) == (1, [" ".join([digest(made_with)] * 3)])
