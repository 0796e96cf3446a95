"""Leases end other than by a stored entry: released, refused, or by a client or the daemon leaving."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time

from support.conversation import Conversation, key_of, talking
from support.leasing import KEY, PATIENT, begin_to_wait, outcome, take
from support.places import digest, get_message, put_message, until

from xcache.wire import commands, framing, protocol
from xcached.caller import Caller, Later, Reply
from xcached.requests import leases as leases_module
from xcached.requests.lease_holders import see
from xcached.requests.leases import Leases


def test_a_released_lease_passes_to_the_next_waiter(speakers):
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


def test_a_release_without_a_lease_changes_nothing(speakers):
    talk = speakers()
    talk.say(protocol.Release(KEY, 1))
    talk.say(protocol.Release("nonsense", -5))
    lease = take(talk)
    # A release with another lease's number changes nothing either.
    talk.say(protocol.Release(KEY, lease + 1))
    assert [each["key"] for each in talk.ask(protocol.AskStatus()).compiles] == [KEY]


def test_all_waiters_compile_when_the_executable_cannot_be_stored(speakers):
    """One after the other they would only fail alike."""
    holder, *others = [speakers() for _ in range(4)]
    take(holder)
    requests = [begin_to_wait(other) for other in others]
    wrong = holder.put(KEY, b"x", digest=digest(b"other"))
    assert isinstance(wrong, protocol.Refused)
    for other, request in zip(others, requests, strict=True):
        assert outcome(other, request).lease == 0
    take(others[0])


def test_all_waiters_hear_that_a_key_is_not_cacheable(speakers):
    holder, waiter = speakers(), speakers()
    take(holder)
    request = begin_to_wait(waiter)
    holder.ask(protocol.MarkNotCacheable(KEY, "jit_f", "a sort"))
    assert outcome(waiter, request) == protocol.NotCacheable("a sort")


def test_a_waiter_that_disconnects_is_forgotten(speakers):
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


def test_all_waiters_compile_when_the_daemon_leaves(place, speakers):
    holder, waiter = speakers(), speakers()
    take(holder)
    request = begin_to_wait(waiter)
    holder.ask(commands.Stop("a test"))
    assert outcome(waiter, request).lease == 0


def test_a_daemon_does_not_leave_while_somebody_compiles_for_others(place):
    child = place.start_daemon(XCACHE_IDLE_EXIT="1s")
    with talking(place) as holder:
        take(holder)
        time.sleep(1.5)
        assert child.poll() is None
        assert holder.put(KEY, b"x").kept
        assert until(lambda: child.poll() is not None)


def test_many_wait_for_many(speakers):
    """Each key is compiled once, whichever client asks first."""
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


def test_the_number_of_leases_is_bounded(speakers):
    greedy, other = speakers(), speakers()
    frames = [framing.encode(n, get_message(key_of(str(n)), PATIENT)) for n in range(10, 10_012)]
    leases = 0
    for start in range(0, len(frames), 100):
        greedy.raw(b"".join(frames[start : start + 100]))
        leases += sum(greedy.hear()[1].lease > 0 for _ in frames[start : start + 100])
    assert leases == 10_000
    # Another connection of the same user compiles all the same.
    assert other.ask(get_message(key_of("other"), PATIENT)).lease == 0
    # An entry that is stored frees its lease for another.
    assert greedy.put(key_of("10"), b"x") == protocol.Stored(True)
    take(greedy, key_of("more"))


def test_one_users_leases_and_waits_are_bounded_over_all_connections_and_anothers_are_not_touched():
    leases = Leases(
        trusts=lambda reader, writer: reader == writer,
        look_up=lambda caller, wanted: None,
        expected=lambda caller, wanted: None,
        call_later=lambda seconds, call: None,
    )
    greedy, other = [Caller(os.getpid(), 1) for _ in range(300)], Caller(os.getpid(), 2)

    def ask(caller: Caller, name: str) -> protocol.Message | None:
        """Return the answer; None for a wait."""
        answer = leases.ask(caller, get_message(key_of(name), PATIENT))
        return answer.message if isinstance(answer, Reply) else None

    answers = [ask(caller, f"{place} {number}") for place, caller in enumerate(greedy) for number in range(50)]
    assert len([answer for answer in answers if answer.lease]) == len(leases) == 10_000
    waits = [ask(caller, f"0 {number}") for caller in greedy for number in range(50)]
    assert waits.count(None) == 2000
    assert {wait and wait.lease for wait in waits} == {None, 0}
    assert ask(other, "0 0").lease
    assert len(leases.compiles(lambda uid: uid == 2)) == 1
    for caller in greedy:
        leases.leave(caller)
    assert len(leases) == 1
    assert ask(greedy[0], "again").lease
    for caller in (greedy[0], other):
        leases.leave(caller)
    # Nothing is remembered of callers who have gone.
    assert not any([leases._by_key, leases._of_user, leases._of_caller, leases._waited_for, leases._wait_counts])


def test_a_dead_connection_does_not_keep_other_waiters_from_their_notices():
    """Its client waits for one compile and holds another lease that waiters have; Leases without sockets."""
    later = []
    leases = Leases(
        trusts=lambda reader, writer: True,
        look_up=lambda caller, wanted: None,
        expected=lambda caller, wanted: None,
        call_later=lambda seconds, call: later.append(call),
    )
    stopped = subprocess.Popen(["sleep", "60"])
    os.kill(stopped.pid, signal.SIGSTOP)
    assert until(lambda: see(stopped.pid).state == "T")
    try:
        first, both, last = Caller(os.getpid(), 0), Caller(stopped.pid, 0), Caller(os.getpid(), 0)
        x, y = get_message(key_of("x"), 60.0), get_message(key_of("y"), 60.0)
        leases.ask(first, x)
        leases.ask(both, y)
        waits = leases.ask(both, x)
        leases.ask(last, y)
        dead = False

        def say(word: protocol.Message) -> None:
            # A session does this on EPIPE, on a connection that is not read from at the moment.
            if dead:
                leases.leave(both)

        waits.connect(say, lambda reply: None)
        later.pop()()
        time.sleep(1.1)
        dead = True
        assert later, "the telling goes on so far"
        later.pop()()
        # No waiter is left; the next one to come is told again.
        leases.ask(last, x)
        assert later
    finally:
        stopped.kill()
        stopped.wait()


def test_all_waiters_are_told_to_compile_when_the_daemon_leaves_also_if_a_connection_ends_meanwhile():
    leases = Leases(
        trusts=lambda reader, writer: True,
        look_up=lambda caller, wanted: None,
        expected=lambda caller, wanted: None,
        call_later=lambda seconds, call: None,
    )
    first, dead, last = (Caller(os.getpid(), 0) for _ in range(3))
    x, y = get_message(key_of("x"), 60.0), get_message(key_of("y"), 60.0)
    leases.ask(first, x)
    leases.ask(dead, y)
    answers = []
    # Answering the dead one passes its lease on to the last one, which has to be answered too.
    leases.ask(dead, x).connect(answers.append, lambda reply: leases.leave(dead))
    leases.ask(last, y).connect(lambda word: None, answers.append)
    leases.ask(first, y).connect(lambda word: None, answers.append)
    answers.clear()
    leases.close()
    assert len(leases) == 0
    assert len(answers) == 2


def test_waiters_are_answered_when_the_entry_cannot_be_read(place):
    """The daemon may run out of descriptors between storing a large entry and handing it to the waiters."""
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
                # The answer is the entry if a descriptor was left for it after all; else the client is to compile.
                assert isinstance(answer, protocol.Found) or answer.lease == 0
        finally:
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_a_waiter_that_left_is_not_looked_up_for_another_users_entry():
    looked_up = []

    def look_up(caller: Caller, wanted: protocol.Get) -> Reply:
        looked_up.append(caller)
        return Reply(protocol.Missing(0))

    leases = Leases(
        trusts=lambda reader, writer: True,
        look_up=look_up,
        expected=lambda caller, wanted: None,
        call_later=lambda seconds, call: None,
    )
    holder, first, second = (Caller(os.getpid(), 0) for _ in range(3))
    wanted = get_message(KEY, PATIENT)
    leases.ask(holder, wanted)
    # The answer to the first finds that the second one's connection has ended.
    leases.ask(first, wanted).connect(lambda word: None, lambda reply: leases.leave(second))
    leases.ask(second, wanted)
    leases.settle(KEY, writer=1)
    assert looked_up == [first]


def test_the_requests_of_others_come_between_the_answers_to_many_that_waited(monkeypatch):
    monkeypatch.setattr(leases_module, "_SLICE_SECONDS", 0.0)
    later, answered = [], []
    leases = Leases(
        trusts=lambda reader, writer: True,
        look_up=lambda caller, wanted: Reply(protocol.Missing(0)),
        expected=lambda caller, wanted: None,
        call_later=lambda seconds, call: later.append(call),
    )
    wanted = get_message(KEY, PATIENT)
    for _ in range(5):
        asked = leases.ask(Caller(os.getpid(), 0), wanted)
        if isinstance(asked, Later):
            asked.connect(lambda word: None, answered.append)
    later.clear()
    leases.settle(KEY, writer=0)
    steps = [len(answered)]
    while later:
        later.pop()()
        steps.append(len(answered))
    assert steps == [1, 2, 3, 4, 4]
