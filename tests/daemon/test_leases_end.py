"""How a compile ends that others wait for, other than well: it is given up, cannot be stored, or somebody leaves."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time

from conversation import Conversation, key_of, talking
from leasing import KEY, PATIENT, begin_to_wait, outcome, speakers, take
from places import digest, get_message, put_message, until

from xcache import framing, protocol
from xcached.caller import Caller
from xcached.leases import Leases, _is_stopped

__all__ = ["speakers"]


def test_a_holder_that_gives_up_lets_the_next_one_try(speakers):
    holder, waiter = speakers(), speakers()
    lease = take(holder)
    request = begin_to_wait(waiter)
    holder.say(protocol.Release(KEY, lease + 1))
    holder.say(protocol.Release(key_of("b"), lease))
    assert isinstance(waiter.hear()[1], protocol.Wait)
    holder.say(protocol.Release(KEY, lease))
    assert outcome(waiter, request).lease > lease


def test_a_lease_can_be_given_back_on_another_connection_of_its_process(speakers):
    holder, other, waiter = speakers(), speakers(), speakers()
    lease = take(holder)
    request = begin_to_wait(waiter)
    other.say(protocol.Release(KEY, lease))
    assert outcome(waiter, request).lease


def test_a_release_without_a_lease_is_nothing(speakers):
    talk = speakers()
    talk.say(protocol.Release(KEY, 1))
    talk.say(protocol.Release("nonsense", -5))
    lease = take(talk)
    # Nor is one with a number that is not its own.
    talk.say(protocol.Release(KEY, lease + 1))
    assert [each["key"] for each in talk.ask(protocol.AskStatus()).compiles] == [KEY]


def test_what_cannot_be_stored_sends_everybody_to_compile(speakers):
    """One after the other they would only fail in the same way."""
    holder, *others = [speakers() for _ in range(4)]
    take(holder)
    requests = [begin_to_wait(other) for other in others]
    wrong = holder.put(KEY, b"x", digest=digest(b"other"))
    assert isinstance(wrong, protocol.Refused)
    for other, request in zip(others, requests, strict=True):
        assert outcome(other, request) == protocol.Missing(0)
    take(others[0])


def test_what_is_not_cacheable_is_said_to_all_who_wait(speakers):
    holder, waiter = speakers(), speakers()
    take(holder)
    request = begin_to_wait(waiter)
    holder.ask(protocol.MarkNotCacheable(KEY, "jit_f", "a sort"))
    assert outcome(waiter, request) == protocol.NotCacheable("a sort")


def test_who_leaves_while_waiting_is_forgotten(speakers):
    holder, gone, waiter = speakers(), speakers(), speakers()
    take(holder)
    begin_to_wait(gone)
    gone.close()
    request = begin_to_wait(waiter)
    holder.close()
    assert outcome(waiter, request).lease


def test_two_requests_on_one_connection_wait_for_each_other_like_any_two(speakers):
    """Threads of one process share connections."""
    talk = speakers()
    take(talk)
    request = begin_to_wait(talk)
    talk.say(put_message(KEY, b"x", b"program"))
    assert outcome(talk, request).payload == b"x"


def test_a_daemon_that_leaves_sends_who_waits_to_compile(place, speakers):
    holder, waiter = speakers(), speakers()
    take(holder)
    request = begin_to_wait(waiter)
    holder.ask(protocol.Stop("a test"))
    assert outcome(waiter, request) == protocol.Missing(0)


def test_a_daemon_does_not_leave_while_somebody_compiles_for_others(place):
    child = place.start_daemon(XCACHE_IDLE_EXIT="500ms")
    with talking(place) as holder:
        take(holder)
        time.sleep(1.5)
        assert child.poll() is None
        assert holder.put(KEY, b"x").kept
        assert until(lambda: child.poll() is not None)


def test_many_wait_for_many(speakers):
    """Every key is compiled once, whoever asks for it first."""
    talks = [speakers() for _ in range(10)]
    compiled = []
    waiting = []
    for number in range(50):
        key = key_of(str(number))
        for position in range(10):
            talk = talks[(number + position) % 10]
            if position == 0:
                take(talk, key)
                compiled.append((talk, key))
            else:
                waiting.append((talk, begin_to_wait_among_others(talk, key), key))
    for talk, key in compiled:
        talk.say(put_message(key, key.encode(), b"program"))
    answers: dict[int, dict[int, protocol.Message]] = {id(talk): {} for talk in talks}
    for talk, request, key in waiting:
        heard = answers[id(talk)]
        while request not in heard:
            number, answer = talk.hear()
            if not isinstance(answer, protocol.Wait):
                heard[number] = answer
        assert heard[request].payload == key.encode()


def begin_to_wait_among_others(talk: Conversation, key: str) -> int:
    request = talk.say(get_message(key, PATIENT))
    while True:
        heard, word = talk.hear()
        assert isinstance(word, protocol.Wait)
        if heard == request:
            return request


def test_nobody_holds_leases_without_end(speakers):
    greedy, other = speakers(), speakers()
    frames = [framing.encode(n, get_message(key_of(str(n)), PATIENT)) for n in range(10, 10_012)]
    leases = 0
    for start in range(0, len(frames), 100):
        greedy.raw(b"".join(frames[start : start + 100]))
        leases += sum(greedy.hear()[1].lease > 0 for _ in frames[start : start + 100])
    assert leases == 10_000
    take(other)
    # What is stored makes room for others.
    assert greedy.put(key_of("10"), b"x") == protocol.Stored(True)
    take(greedy, key_of("more"))


def test_a_connection_found_dead_while_it_is_told_does_not_end_the_telling():
    """It waits for one compile and holds another whose holder is stopped; the real class, without its socket."""
    later = []
    leases = Leases(
        trusts=lambda reader, writer: True,
        look_up=lambda caller, wanted: None,
        expected=lambda caller, wanted: None,
        call_later=lambda seconds, call: later.append(call),
    )
    stopped = subprocess.Popen(["sleep", "60"])
    os.kill(stopped.pid, signal.SIGSTOP)
    assert until(lambda: _is_stopped(stopped.pid))
    try:
        first, both, last = Caller(os.getpid(), 0), Caller(stopped.pid, 0), Caller(os.getpid(), 0)
        x, y = get_message(key_of("x"), 60.0), get_message(key_of("y"), 60.0)
        leases.ask(first, x)
        leases.ask(both, y)
        waits = leases.ask(both, x)
        leases.ask(last, y)
        dead = False

        def say(word: protocol.Message) -> None:
            # What Connection._flush does on EPIPE, on a connection that is not read from at the moment.
            if dead:
                leases.leave(both)

        waits.connect(say, lambda reply: None)
        later.pop()()
        time.sleep(1.1)
        dead = True
        assert later, "the telling goes on so far"
        later.pop()()
        # Nobody is left who waits; whoever comes now is told again.
        leases.ask(last, x)
        assert later
    finally:
        stopped.kill()
        stopped.wait()


def test_who_waits_is_answered_though_the_store_cannot_be_read(place):
    """A race: the daemon runs out of descriptors between storing a large entry and handing it to those who wait."""
    daemon = place.start_daemon()
    with talking(place) as holder, talking(place) as one, talking(place) as two:
        take(holder)
        asked = [begin_to_wait(one), begin_to_wait(two)]
        soft, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        number = holder.begin_put(KEY, os.urandom(100_000))
        while not list((place.dir / "blobs").glob("??/*")):
            time.sleep(0.0005)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (3, hard))
        try:
            holder.answer(number)
            for talk, request_number in zip((one, two), asked, strict=True):
                talk.socket.settimeout(3.0)
                answer = outcome(talk, request_number)
                # With what was stored, where a descriptor was left for it after all; else to compile.
                assert isinstance(answer, protocol.Found) or answer == protocol.Missing(0)
        finally:
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (soft, hard))
