"""Users share a small disk: nobody's entries go for what another user has on it without an entry."""

from __future__ import annotations

import os
import subprocess
import time

import pytest
from support.conversation import Conversation, key_of
from support.marks import thorough
from support.places import digest, get_message, put_message
from support.users import ALICE, BOB, DAEMON

from xcache.wire import commands, protocol
from xcache.wire.envelope import seal

MB = 1_000_000


@pytest.fixture
def small(machine):
    """A machine whose store is on a disk of 120 MB."""
    store = machine.place.root / "store"
    options = f"size={120 * MB},mode=700,uid={DAEMON},gid={DAEMON}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(store)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    yield machine
    machine.place.stop()
    subprocess.run(["umount", "-l", str(store)], check=True)


def speak(machine, uid):
    # The kernel reports who connected by the effective uid at that moment.
    os.seteuid(uid)
    try:
        talk = Conversation(machine.place)
    finally:
        os.seteuid(0)
    talk.greet()
    return talk


@pytest.mark.thorough
def test_nobody_goes_while_false_contents_are_checked(small):
    """Alice's entries and what is to stay free leave room for a copy of 46 MB, and not for both."""
    small.start(XCACHE_MIN_FREE=str(80 * MB))
    alice, bob = speak(small, ALICE), speak(small, BOB)
    entries = {key_of(f"alice {number}"): os.urandom(MB // 5) for number in range(90)}
    for key, content in entries.items():
        assert alice.put(key, content) == protocol.Stored(True)
    for number in range(12):
        key = key_of(f"false {number}")
        message = put_message(key, b"", b"program", payload=None, stored_size=46 * MB, digest=digest(b"no"))
        asked = bob.say(message, [bytes(46 * MB)])
        honest = [bob.put(key_of(f"bob {number} {n}"), os.urandom(40_000)) for n in range(3)]
        assert honest == [protocol.Stored(True)] * 3
        answer = bob.answer(asked)
        assert isinstance(answer, protocol.Refused) and answer.kind == "wrong digest", answer
    assert bob.ask(commands.Sync()) == protocol.Done()
    missing = [key for key, content in entries.items() if alice.get(key) != content]
    assert missing == []
    alice.close()
    bob.close()


def test_nobody_pays_for_deleted_files_that_a_reader_keeps_open(small):
    """Bob keeps what root stores, and everybody may load, open for ever: more than the disk holds."""
    small.start(XCACHE_MIN_FREE=str(80 * MB), XCACHE_USER_QUOTA=str(12 * MB))
    alice, bob, root = speak(small, ALICE), speak(small, BOB), speak(small, 0)
    entries = {key_of(f"alice {number}"): os.urandom(MB // 5) for number in range(40)}
    for key, content in entries.items():
        assert alice.put(key, content) == protocol.Stored(True)
    for number in range(30):
        key = key_of(f"root {number}")
        assert root.put(key, os.urandom(6 * MB)) == protocol.Stored(True)
        assert isinstance(bob.ask(get_message(key)), protocol.Found)
        assert root.ask(commands.Remove([key])).entries == 1
    assert len(bob.descriptors) == 30
    assert root.ask(commands.Sync()) == protocol.Done()
    assert [key for key, content in entries.items() if alice.get(key) != content] == []
    for talk in (alice, bob, root):
        talk.close()


def remember_wide_runs(talk):
    """Have 50 MB of runs remembered."""
    item = {"options": digest(b"o"), "devices": "0" * 900, "platform": "c" * 900, "seconds": 0.01}
    for program in range(80):
        items = [item | {"key": key_of(f"wanted {program} {number}")} for number in range(300)]
        run = protocol.Remember(f"program {program}", "a" * 64, items, {digest(b"o"): b"o" * 50_000})
        assert talk.ask(run) == protocol.Done()


def have_files_set_aside(talk):
    """Have 40 MB of whole entries set aside on the word of their own writer."""
    for number in range(40):
        key = key_of(f"complained of {number}")
        sealed = seal(key, os.urandom(MB))
        assert talk.put(key, sealed) == protocol.Stored(True)
        assert talk.get(key) == sealed
        assert talk.ask(protocol.Complain(key, digest(sealed), "a test", True)) == protocol.Done()
        assert talk.ask(commands.Remove([key])).entries == 1


@pytest.mark.parametrize("fill", thorough([remember_wide_runs, have_files_set_aside], usual=[remember_wide_runs]))
def test_nobody_goes_for_what_others_have_beside_entries(small, fill):
    """Alice's entries and what is to stay free leave room for 20 MB more; ``max_size`` leaves it for more."""
    small.start(XCACHE_MIN_FREE=str(80 * MB), XCACHE_MAX_SIZE="20G")
    alice, bob = speak(small, ALICE), speak(small, BOB)
    entries = {key_of(f"alice {number}"): os.urandom(MB // 5) for number in range(100)}
    for key, content in entries.items():
        assert alice.put(key, content) == protocol.Stored(True)
    fill(bob)
    # The daemon believes for a second what the disk said.
    time.sleep(1.1)
    assert bob.put(key_of("bob"), b"small") == protocol.Stored(True)
    assert bob.ask(commands.Sync()) == protocol.Done()
    assert [key for key, content in entries.items() if alice.get(key) != content] == []
    alice.close()
    bob.close()
