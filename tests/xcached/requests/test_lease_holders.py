"""A process that is waited for: whether it still runs, by the kernel's word and by a clock that the test moves."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conversation import Conversation, talking
from support.leasing import KEY, PATIENT, begin_to_wait, outcome
from support.places import Place, get_message, until
from support.program_files import program_path

from xcache.wire import protocol
from xcached.requests import lease_holders
from xcached.requests.lease_holders import LeaseHolders, see, ticks_of_children

BUSY = [sys.executable, "-c", "while True: pass"]
CHILDS = ["sh", "-c", '"$@" & wait', "sh", *BUSY]


@contextlib.contextmanager
def process(*command: str) -> Iterator[int]:
    """A process, and all that it starts, for as long as the block lasts."""
    child = subprocess.Popen(command, start_new_session=True)
    try:
        yield child.pid
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def looks(pid: int, seconds: int, *, every: int = 1, between=lambda: None) -> str:
    """The first reason not to wait for a process within so many seconds of a clock of its own."""
    looking = LeaseHolders()
    for now in range(0, seconds + 1, every):
        if why := looking.look([pid], float(now)).get(pid):
            return f"{why} at {now}"
        between()
    return ""


def test_one_that_sleeps_is_waited_for_a_minute():
    with process("sleep", "60") as pid:
        assert until(lambda: see(pid).state == "S")
        assert looks(pid, 59) == ""
        assert looks(pid, 70).startswith("has not run for 60 s")


def test_one_that_computes_is_waited_for():
    with process(*BUSY) as pid:

        def it_runs() -> None:
            before = see(pid).ticks
            assert until(lambda: see(pid).ticks > before)

        assert looks(pid, 80, every=4, between=it_runs) == ""


def test_one_whose_compiler_is_a_child_is_waited_for():
    with process(*CHILDS) as pid:

        def it_runs() -> None:
            before = ticks_of_children(pid, itertools.count())
            assert until(lambda: ticks_of_children(pid, itertools.count()) > before)

        assert looks(pid, 80, every=4, between=it_runs) == ""


def test_only_so_many_children_are_read_in_one_look():
    """A process may have any number of them, and the thread that serves reads them."""
    with process("sh", "-c", "for n in 1 2 3 4 5; do sleep 60 & done; wait") as pid:
        assert until(lambda: len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()) == 5)
        assert ticks_of_children(pid, iter(range(6))) is not None
        assert ticks_of_children(pid, iter(range(5))) is None


def test_holders_share_what_one_look_may_read(monkeypatch):
    monkeypatch.setattr(lease_holders, "_MOST_READ", 3)
    with process("sleep", "60") as one, process("sleep", "60") as two:
        assert until(lambda: see(one).state == see(two).state == "S")
        watched = LeaseHolders()
        found = {}
        for now in range(70):
            found |= watched.look([one, two], float(now))
        assert found.keys() == {one, two}


def test_one_that_is_stopped_is_not_waited_for():
    with process("sleep", "60") as pid:
        os.kill(pid, signal.SIGSTOP)
        assert until(lambda: see(pid).state == "T")
        assert looks(pid, 5) == "is stopped at 1"


def test_a_daemon_that_was_stopped_itself_begins_to_count_anew():
    with process("sleep", "60") as pid:
        assert looks(pid, 600, every=30) == ""


def test_one_that_is_gone_is_not_waited_for_and_one_that_cannot_be_seen_is():
    assert LeaseHolders().look([0, 2**22 + 1], 0.0) == {2**22 + 1: "has ended"}


@pytest.fixture
def freezer():
    """Freezes processes, as ``docker pause`` does."""
    root = next(
        (r for r in map(Path, ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")) if (r / "cgroup.procs").exists()), None
    )
    group = root / f"xcache-test-{os.getpid()}" if root else None
    try:
        group.mkdir()
        (group / "cgroup.freeze").write_text("0")
    except (OSError, AttributeError):
        pytest.skip("control groups cannot be made here")

    def freeze(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "cgroup.freeze").write_text("1")
        assert until(lambda: "frozen 1" in (group / "cgroup.events").read_text())

    yield freeze
    (group / "cgroup.freeze").write_text("0")
    assert until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


HOLD = f"""
import sys
from pathlib import Path
from support.places import Place, get_message
from support.conversation import Conversation
talk = Conversation(Place(Path(sys.argv[1])))
talk.greet()
print(talk.ask(get_message({KEY!r}, 60.0)).lease, flush=True)
sys.stdin.readline()
"""


def test_a_frozen_process_is_not_waited_for(place: Place, speakers, freezer):
    waiter: Conversation = speakers()
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(place.root)],
        env=place.with_support,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        try:
            assert int(child.stdout.readline()) > 0
            request = begin_to_wait(waiter)
            freezer(child.pid)
            assert outcome(waiter, request).lease
        finally:
            child.kill()


def test_one_that_has_ended_is_not_waited_for_though_its_child_has_the_connection(place):
    place.start_daemon()
    program = [sys.executable, program_path("leave_a_lease_to_a_child")]
    env = place.with_support | {"ROOT_OF_PLACE": str(place.root)}
    with subprocess.Popen(program, env=env, stdout=subprocess.PIPE, start_new_session=True) as holder:
        try:
            assert holder.stdout.readline() == b"ready\n"
            holder.wait(20)
            with talking(place) as waiter:
                answer = outcome(waiter, waiter.say(get_message(KEY, PATIENT)))
                assert isinstance(answer, protocol.Missing)
                assert answer.lease
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(holder.pid, signal.SIGKILL)


def test_a_process_that_is_hidden_or_of_another_namespace_may_still_run():
    assert not lease_holders.has_ended(0)
    assert not lease_holders.has_ended(1)
    with process("sleep", "60") as pid:
        assert not lease_holders.has_ended(pid)
    assert lease_holders.has_ended(pid)
