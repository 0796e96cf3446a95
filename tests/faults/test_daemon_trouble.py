"""A program with many small compiles is right, and loses one allowance at most, whatever the daemon does."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import struct
import time
from collections.abc import Callable

import pytest
from support.marks import thorough
from support.peers import Talk, fake_daemon, relaying
from support.places import until
from support.small_programs import LOST_AT_MOST, Running, hardly_noticed

from xcache.wire import protocol

# A program that ends may not store its last entries, because the daemon is just being tried once more.
LATE = {"not stored before exit"}
# The limit of descriptors that leaves none free, because all numbers below it are taken; and the usual limit.
NONE_FREE, (_, PLENTY) = 3, resource.getrlimit(resource.RLIMIT_NOFILE)


def refuses_everything(talk: Talk) -> None:
    talk.welcome()
    while True:
        talk.read()
        talk.say(protocol.Refused("store error", "not today"))


def hangs_up_on_every_request(talk: Talk) -> None:
    talk.welcome()
    talk.read()


def says_nothing(talk: Talk) -> None:
    talk.until_the_end()


def says_nothing_after_hello(talk: Talk) -> None:
    talk.welcome()
    talk.until_the_end()


def answers_noise(talk: Talk) -> None:
    talk.welcome()
    while True:
        talk.read()
        talk.raw(struct.pack(">I", 16) + bytes(range(0xC0, 0xD0)))


def answers_the_wrong_thing(talk: Talk) -> None:
    talk.welcome()
    while True:
        talk.read()
        talk.say(protocol.Done())


def finds_rubbish(talk: Talk) -> None:
    talk.welcome()
    while True:
        asked = talk.read()
        found = protocol.Found("00" * 32, 7, 1.0, b"rubbish")
        talk.say(found if isinstance(asked, protocol.Get) else protocol.Done())


def hands_over_a_pipe(talk: Talk) -> None:
    talk.welcome()
    reading, writing = os.pipe()
    try:
        while True:
            asked = talk.read()
            if isinstance(asked, protocol.Get):
                talk.say(protocol.Found("00" * 32, 7, 1.0, None), (reading,))
            else:
                talk.say(protocol.Done())
    finally:
        os.close(reading)
        os.close(writing)


MISBEHAVIOURS = [
    refuses_everything,
    hangs_up_on_every_request,
    says_nothing,
    says_nothing_after_hello,
    answers_noise,
    answers_the_wrong_thing,
    finds_rubbish,
    hands_over_a_pipe,
]
USUAL = (answers_noise,)


@pytest.mark.slow
@pytest.mark.parametrize("behave", thorough(MISBEHAVIOURS, usual=USUAL), ids=lambda behave: behave.__name__)
def test_something_else_that_answers_in_its_place(place, reference, behave: Callable[[Talk], None]):
    with fake_daemon(place.socket, behave) as daemon:
        errors = hardly_noticed(Running(place).ended(), reference)
        assert daemon.connections >= 1
    assert errors


@pytest.mark.thorough
@pytest.mark.slow
def test_a_daemon_whose_every_answer_takes_most_of_the_timeout(warm, reference):
    warm.start_daemon()
    slow = warm.root / "slow"
    with relaying(slow, warm, delay=0.7):
        errors = hardly_noticed(Running(warm, XCACHE_SOCKET=str(slow)).ended(), reference)
    # Two such answers take longer than the timeout.
    assert errors.keys() - LATE == {"no answer"}


@pytest.mark.thorough
@pytest.mark.slow
def test_a_daemon_whose_every_answer_takes_longer_than_the_timeout(warm, reference):
    warm.start_daemon()
    slow = warm.root / "slow"
    with relaying(slow, warm, delay=3.0):
        errors = hardly_noticed(Running(warm, XCACHE_SOCKET=str(slow)).ended(), reference)
    assert errors


@pytest.mark.slow
def test_a_daemon_that_is_stopped_before(warm, reference):
    daemon = warm.start_daemon()
    daemon.send_signal(signal.SIGSTOP)
    try:
        errors = hardly_noticed(Running(warm).ended(), reference)
    finally:
        daemon.send_signal(signal.SIGCONT)
    assert errors


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_a_daemon_that_is_stopped_while_things_are_loaded_ahead(warm, reference, when):
    """The first request to meet it says so, once; the others do not even ask."""
    daemon = warm.start_daemon()
    stop = f"os.kill({daemon.pid}, signal.SIGSTOP)"
    if when == "before":
        daemon.send_signal(signal.SIGSTOP)
    ran = Running(warm, before=stop if when == "in the middle" else "", XCACHE_PREFETCH="1G")
    try:
        errors = hardly_noticed(ran.ended(), reference)
    finally:
        daemon.send_signal(signal.SIGCONT)
    if when == "before":
        # Requests made at the same time fail at the same time.
        assert errors.keys() - LATE == {"no answer"}


@pytest.mark.thorough
@pytest.mark.slow
def test_a_daemon_that_is_stopped_in_the_middle_and_goes_on_later(warm, reference):
    daemon = warm.start_daemon()
    stop = "if k == 20: os.kill(int(os.environ['DAEMON']), signal.SIGSTOP)"
    # The client asks nothing meanwhile, and asks again once the daemon goes on.
    resume = "os.kill(int(os.environ['DAEMON']), signal.SIGCONT)"
    try:
        ran = Running(warm, between=stop, after=resume, DAEMON=str(daemon.pid)).ended()
    finally:
        daemon.send_signal(signal.SIGCONT)
    assert hardly_noticed(ran, reference)
    assert ran.stats["hits"] >= 20


@pytest.mark.slow
def test_a_daemon_that_is_killed_whenever_it_answers(warm, reference):
    running = Running(warm)
    killed = 0
    while running.runs():
        if warm.answers():
            with contextlib.suppress(OSError, struct.error):
                os.kill(warm.daemon_pid(), signal.SIGKILL)
                killed += 1
        time.sleep(0.01)
    hardly_noticed(running.ended(), reference)
    assert killed


@pytest.mark.thorough
@pytest.mark.slow
def test_a_daemon_without_a_free_descriptor(warm, reference):
    daemon = warm.start_daemon()
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (NONE_FREE, PLENTY))
    # The daemon accepts nobody; clients wait in the kernel's queue.
    errors = hardly_noticed(Running(warm).ended(), reference)
    assert errors
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (PLENTY, PLENTY))
    assert until(warm.answers)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_daemon_that_runs_out_of_descriptors_in_the_middle(warm, reference):
    daemon = warm.start_daemon()
    limit = f"""if k == 5:
        resource.prlimit({daemon.pid}, resource.RLIMIT_NOFILE, ({NONE_FREE}, {PLENTY}))"""
    ran = Running(warm, between=limit).ended()
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (PLENTY, PLENTY))
    hardly_noticed(ran, reference)
    again = Running(warm).ended()
    assert hardly_noticed(again, reference) == {}
    assert again.stats["misses"] == 0


@pytest.mark.thorough
@pytest.mark.slow
def test_a_daemon_that_gets_no_more_memory(warm, reference):
    daemon = warm.start_daemon()
    limit = """if k == 5:
        pid = int(os.environ["DAEMON"])
        pages = int(open(f"/proc/{pid}/statm").read().split()[0])
        resource.prlimit(pid, resource.RLIMIT_AS, (pages * 4096, resource.RLIM_INFINITY))"""
    # Every program is compiled anew, so that the daemon has something to write as well.
    ran = Running(warm, between=limit, DAEMON=str(daemon.pid), XCACHE="refresh").ended()
    hardly_noticed(ran, reference)
    if daemon.poll() is None:
        resource.prlimit(daemon.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    again = Running(warm).ended()
    assert hardly_noticed(again, reference) == {}
    assert again.stats["misses"] == 0


@pytest.mark.thorough
@pytest.mark.slow
def test_a_program_without_a_free_descriptor(warm, reference):
    warm.start_daemon()
    # listdir has one of its own while it looks.
    limit = f"resource.setrlimit(resource.RLIMIT_NOFILE, ({NONE_FREE}, {PLENTY}))"
    relief = f"resource.setrlimit(resource.RLIMIT_NOFILE, ({PLENTY}, {PLENTY}))"
    # The client closes its connections first, because open ones would do. jax imports what it lowers with when it first
    # lowers, which a program whose lowering is skipped may not have done.
    hang_up = (
        "from xcache.process_cache import current; jax.jit(lambda v: v).lower(x).as_text(); current().client.abandon()"
    )
    ran = Running(warm, before=f"{hang_up}; {limit}", after=relief).ended()
    assert hardly_noticed(ran, reference)


@pytest.mark.slow
def test_a_store_that_is_removed_while_it_is_used(warm, reference):
    remove = "if k % 20 == 10: __import__('shutil').rmtree(os.environ['XCACHE_DIR'], ignore_errors=True)"
    ran = Running(warm, between=remove).ended()
    hardly_noticed(ran, reference)
    # The first ten programs were hits before the store was removed.
    assert ran.stats["hits"] >= 10


@pytest.mark.thorough
@pytest.mark.slow
def test_an_exit_does_not_wait_for_a_stopped_daemon_longer_than_said(warm, reference):
    daemon = warm.start_daemon()
    stop = "os.kill(int(os.environ['DAEMON']), signal.SIGSTOP); print(end='', flush=True)"
    try:
        ran = Running(warm, after=stop, DAEMON=str(daemon.pid), XCACHE="refresh").ended()
    finally:
        daemon.send_signal(signal.SIGCONT)
    assert hardly_noticed(ran, reference).keys() <= {"no answer", *LATE}
    assert len([line for line in ran.stderr.splitlines() if line not in reference.without.stderr]) <= 1


@pytest.mark.thorough
@pytest.mark.slow
def test_many_threads_pay_for_a_stopped_daemon_once(warm, reference):
    daemon = warm.start_daemon()
    daemon.send_signal(signal.SIGSTOP)
    # The loop's own compiles follow: half of them are done by now, at once.
    crowd = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    list(pool.map(lambda k: jax.jit(lambda v: v - k)(x), range(40)))
"""
    try:
        ran = Running(warm, before=crowd).ended()
    finally:
        daemon.send_signal(signal.SIGCONT)
    assert ran.results == reference.without.results
    assert ran.stats["lost_seconds"] < LOST_AT_MOST
    assert len(ran.stderr.splitlines()) <= len(ran.stats["errors"])
