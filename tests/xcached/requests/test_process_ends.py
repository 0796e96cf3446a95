"""The daemon learns how a process ended before and after its parent waits for it; an unknown end is no crash."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from support.resources import descriptors_of

from xcached.caller import Process
from xcached.requests import process_ends
from xcached.requests.process_ends import ProcessEnd, ProcessEnds


def pidfds() -> int:
    """Return how many descriptors of this process name a process."""
    return sum(count for target, count in descriptors_of(os.getpid()).items() if "pidfd" in target)


def judged(program: str, *, wait: bool) -> ProcessEnd:
    """Return how a process ended that was watched from its beginning."""

    async def judge() -> ProcessEnd:
        watching, before = ProcessEnds(asyncio.get_running_loop()), pidfds()
        with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as child:
            process = Process(child.pid)
            watching.watch(process)
            told: asyncio.Future[ProcessEnd] = asyncio.get_running_loop().create_future()
            child.stdin.close()
            if wait:
                child.wait()
            else:
                # It has ended, and can still be waited for.
                os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            watching.tell(process, told.set_result)
            ending = await asyncio.wait_for(told, 20)
        watching.forget(process)
        assert pidfds() == before
        return ending

    return asyncio.run(judge())


KILLED = "import os, sys; sys.stdin.read(); os.kill(os.getpid(), {})"
CRASHES = [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE]


@pytest.mark.parametrize("wait", [False, True], ids=["zombie", "waited for"])
def test_a_crash_is_told_from_other_ends(wait):
    if wait and not _knows_afterwards():
        pytest.skip("this kernel does not say how a process ended that was waited for")
    for number in CRASHES:
        assert judged(KILLED.format(int(number)), wait=wait) is ProcessEnd.CRASHED
    threads = "import os, threading; threading.Thread(target=os.abort).start(); threading.Event().wait()"
    assert judged(threads, wait=wait) is ProcessEnd.CRASHED
    for program in ("", "import os; os._exit(134)", KILLED.format(9), KILLED.format(15)):
        assert judged(program, wait=wait) is ProcessEnd.OTHERWISE


def test_under_a_kernel_that_says_nothing_afterwards_it_is_not_known(monkeypatch):
    monkeypatch.setattr(process_ends, "_GET_INFO", 0)
    assert judged(KILLED.format(11), wait=True) is ProcessEnd.UNKNOWN
    assert judged(KILLED.format(11), wait=False) is ProcessEnd.CRASHED


def test_without_pidfds_nothing_is_known(monkeypatch):
    monkeypatch.delattr(process_ends.os, "pidfd_open")

    async def judge() -> list[ProcessEnd]:
        watching, told = ProcessEnds(asyncio.get_running_loop()), []
        process = Process(1)
        watching.watch(process)
        watching.tell(process, told.append)
        watching.forget(process)
        return told

    assert asyncio.run(judge()) == [ProcessEnd.UNKNOWN]


def test_a_daemon_that_leaves_judges_nobody():
    async def judge() -> list[ProcessEnd]:
        watching, told, before = ProcessEnds(asyncio.get_running_loop()), [], pidfds()
        with subprocess.Popen([sys.executable, "-c", KILLED.format(11)], stdin=subprocess.PIPE) as child:
            process = Process(child.pid)
            watching.watch(process)
            watching.close()
            child.communicate()
            watching.tell(process, told.append)
        assert pidfds() == before
        return told

    assert asyncio.run(judge()) == []


def test_a_process_that_goes_on_is_not_waited_for():
    """It has only closed its connection, as an exec does."""

    async def judge() -> list[ProcessEnd]:
        watching, told = ProcessEnds(asyncio.get_running_loop()), []
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
            process = Process(child.pid)
            watching.watch(process)
            watching.tell(process, told.append)
            child.communicate(b"\n")
        watching.forget(process)
        return told

    assert asyncio.run(judge()) == [ProcessEnd.OTHERWISE]


def test_one_that_is_ending_is_waited_for_and_not_for_ever(monkeypatch):
    monkeypatch.setattr(process_ends, "_is_ending", lambda pid: True)

    async def judge(longest: float) -> ProcessEnd:
        monkeypatch.setattr(process_ends, "_LONGEST_END_SECONDS", longest)
        watching, before = ProcessEnds(asyncio.get_running_loop()), pidfds()
        told: asyncio.Future[ProcessEnd] = asyncio.get_running_loop().create_future()
        with subprocess.Popen([sys.executable, "-c", KILLED.format(11)], stdin=subprocess.PIPE) as child:
            process = Process(child.pid)
            watching.watch(process)
            watching.tell(process, told.set_result)
            watching.forget(process)
            assert not told.done()
            if longest:
                child.stdin.close()
            ending = await asyncio.wait_for(told, 20)
        assert pidfds() == before
        return ending

    assert asyncio.run(judge(60.0)) in (ProcessEnd.CRASHED, ProcessEnd.UNKNOWN)
    assert asyncio.run(judge(0.0)) is ProcessEnd.OTHERWISE


def _knows_afterwards() -> bool:
    return judged(KILLED.format(11), wait=True) is not ProcessEnd.UNKNOWN


def test_one_users_processes_that_do_not_end_do_not_take_all_descriptors(monkeypatch):
    """Another user's are judged all the same."""
    monkeypatch.setattr(process_ends, "_is_ending", lambda pid: True)

    async def judge() -> None:
        watching, before = ProcessEnds(asyncio.get_running_loop()), pidfds()
        with subprocess.Popen([sys.executable, "-c", KILLED.format(11)], stdin=subprocess.PIPE) as child:
            told: dict[int, list[ProcessEnd]] = {1: [], 2: []}
            for uid in [1] * 100 + [2]:
                process = Process(child.pid, uid)
                watching.watch(process)
                watching.tell(process, told[uid].append)
                watching.forget(process)
            assert told == {1: [ProcessEnd.OTHERWISE] * 36, 2: []}
            assert pidfds() == before + 65
        while not told[2]:
            await asyncio.sleep(0.01)
        watching.close()

    asyncio.run(asyncio.wait_for(judge(), 20))
