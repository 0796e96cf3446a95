"""One client compiles; the others wait as long as it does, and no longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from support.conversation import Conversation, key_of
from support.leasing import KEY, PATIENT, begin_to_wait, outcome, take
from support.places import TESTS, digest, get_message

from xcache.wire import commands, protocol


def test_the_first_compiles_and_the_others_get_what_it_stores(speakers):
    holder, *others = [speakers() for _ in range(5)]
    take(holder)
    requests = [begin_to_wait(other) for other in others]
    assert holder.put(KEY, b"executable") == protocol.Stored(True)
    for other, request in zip(others, requests, strict=True):
        assert outcome(other, request).payload == b"executable"


def test_each_waiter_gets_a_large_entry_as_a_file(speakers):
    holder, *others = [speakers() for _ in range(3)]
    payload = os.urandom(100_000)
    take(holder)
    requests = [begin_to_wait(other) for other in others]
    holder.put(KEY, payload)
    for other, request in zip(others, requests, strict=True):
        assert outcome(other, request).payload is None
        with open(other.descriptors.pop(0), "rb") as file:
            assert file.read() == payload


def test_a_waiter_hears_who_compiles_and_for_how_long(speakers, place):
    holder, waiter = speakers(), speakers()
    take(holder)
    request = begin_to_wait(waiter)
    words = [waiter.hear() for _ in range(3)]
    assert {heard for heard, _ in words} == {request}
    assert {(word.pid, word.program) for _, word in words} == {(os.getpid(), "test.py")}
    seconds = [word.seconds for _, word in words]
    assert seconds == sorted(seconds)
    assert all(0 < word.at_most <= PATIENT for _, word in words)


def test_the_status_lists_compiles_in_progress(speakers):
    holder, waiter = speakers(), speakers()
    take(holder)
    take(holder, key_of("b"))
    begin_to_wait(waiter)
    status = holder.ask(protocol.AskStatus())
    assert [(c["key"], c["pid"], c["program"], c["module_name"], c["waiting"]) for c in status.compiles] == [
        (KEY, os.getpid(), "test.py", "jit_f", 1),
        (key_of("b"), os.getpid(), "test.py", "jit_f", 0),
    ]


def test_keys_do_not_wait_for_one_another(speakers):
    holder, other = speakers(), speakers()
    assert take(holder) != take(other, key_of("b"))


def test_a_client_that_would_not_wait_compiles_at_once_and_holds_no_lease(speakers):
    hasty, other = speakers(), speakers()
    for wait in (0.0, -1.0, float("nan")):
        assert hasty.ask(get_message(KEY, wait)).lease == 0
    take(other)
    assert hasty.ask(get_message(KEY, 0.0)).lease == 0


def test_the_lease_of_a_lost_holder_passes_to_the_first_waiter(speakers):
    holder, *others = [speakers() for _ in range(4)]
    take(holder)
    requests = [begin_to_wait(other) for other in others]
    holder.close()
    leases = []
    for position, (other, request) in enumerate(zip(others, requests, strict=True)):
        answer = outcome(other, request)
        assert isinstance(answer, protocol.Missing)
        leases.append(answer.lease)
        assert answer.lease
        if position < len(others) - 1:
            other.close()
    assert len(set(leases)) == len(leases)


def test_a_killed_process_passes_its_lease_on(place, speakers):
    waiter = speakers()
    program = (
        "import os, sys, time\nfrom xcache.client import client\nfrom xcache.config import config\n"
        "from xcache.wire import protocol\n"
        f"c = client.Client(config.load(), 'test')\n"
        f"print(c.get(protocol.Get({KEY!r}, 60.0, 'm', 'p')).lease, flush=True)\ntime.sleep(100)"
    )
    child = subprocess.Popen([sys.executable, "-c", program], env=place.env, stdout=subprocess.PIPE)
    try:
        assert int(child.stdout.readline()) > 0
        request = begin_to_wait(waiter)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert outcome(waiter, request).lease


def test_a_stopped_process_is_not_waited_for(place, speakers):
    """It may still store its executable when it goes on."""
    waiter, later = speakers(), speakers()
    program = (
        "import os, sys, time\nsys.path.insert(0, sys.argv[1])\n"
        "from support.places import Place\nfrom pathlib import Path\n"
        "from support.conversation import Conversation\n"
        "from support.places import get_message\n"
        "talk = Conversation(Place(Path(sys.argv[2])))\ntalk.greet()\n"
        f"print(talk.ask(get_message({KEY!r}, 60.0)).lease, flush=True)\n"
        "sys.stdin.readline()\n"
        f"print(talk.put({KEY!r}, b'late'), flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(TESTS), str(place.root)],
        env=place.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert int(child.stdout.readline()) > 0
        request = begin_to_wait(waiter)
        child.send_signal(signal.SIGSTOP)
        assert outcome(waiter, request).lease
        child.send_signal(signal.SIGCONT)
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert b"kept=True" in child.stdout.readline()
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    assert later.get(KEY) == b"late"


def test_a_wait_ends_after_the_time_the_client_asked_for(speakers):
    holder, waiter, patient = speakers(), speakers(), speakers()
    take(holder)
    patiently = begin_to_wait(patient)
    request = begin_to_wait(waiter, wait=0.3)
    assert outcome(waiter, request).lease == 0
    # One waiter gave up; the entry still reaches the other.
    holder.put(KEY, b"late")
    assert outcome(patient, patiently).payload == b"late"


def expectation(talk: Conversation, request: int) -> float:
    heard, word = talk.hear()
    assert heard == request
    return word.at_most


def test_a_wait_is_bounded_by_the_last_compile_time(speakers):
    """A client waits three times the last compile's time, and a little more."""
    holder, waiter = speakers(), speakers()
    holder.put(KEY, b"x", compile_seconds=10.0)
    assert holder.ask(commands.Remove([KEY])).entries == 1
    take(holder)
    request = begin_to_wait(waiter, wait=1000)
    assert 34 < expectation(waiter, request) <= 35


def test_the_compile_time_of_the_same_program_under_another_key_bounds_a_wait(speakers):
    holder, waiter = speakers(), speakers()
    same_program = {"program_digest": digest(b"program"), "compile_seconds": 20.0}
    holder.put(key_of("another toolchain"), b"x", **same_program)
    take(holder)
    request = begin_to_wait(waiter, wait=1000)
    assert 64 < expectation(waiter, request) <= 65


def test_a_wait_without_a_known_compile_time_is_bounded_by_the_client(speakers):
    holder, waiter = speakers(), speakers()
    take(holder)
    request = begin_to_wait(waiter, wait=1000)
    assert 999 < expectation(waiter, request) <= 1000
