"""A process that is started without being anybody's child: the program's own waits and handlers never meet it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.program_files import program_text

from xcache.client import launcher, spawning

pytestmark = pytest.mark.skipif(not spawning.can_spawn(), reason="needs glibc 2.34 on x86-64")


def run(command: str, **environment: str) -> str:
    """Return the bytes that a spawned shell wrote to its ready descriptor."""
    reading, writing = os.pipe()
    ready = fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(writing)
    with open(os.devnull) as lock:
        held = fcntl.fcntl(lock, fcntl.F_DUPFD_CLOEXEC, 10)
        try:
            spawning.spawn(["/bin/sh", "-c", command], environment, held, ready)
        finally:
            os.close(held)
            os.close(ready)
            with open(reading) as said:
                text = said.read()
    return text


def test_it_has_what_it_was_given_and_nothing_else():
    left_open = os.open("/etc/passwd", os.O_RDONLY)
    os.set_inheritable(left_open, True)
    try:
        listed = run("cd /proc/self/fd; for f in 0 1 2 3 4 5 6 7 8 9; do [ -e $f ] && readlink $f >&4; done; pwd >&4")
    finally:
        os.close(left_open)
    *links, _ = listed.splitlines()
    assert links[:2] == [os.devnull, links[1]]
    assert links[1] == links[2] == links[4]
    assert links[3] == os.devnull
    assert len(links) == 5
    assert run("pwd >&4; echo $A >&4; env | grep -vE '^(PWD|OLDPWD|SHLVL|_)=' >&4", A="b=c") == "/\nb=c\nA=b=c\n"


def test_it_is_in_a_session_of_its_own_with_all_signals():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        said = run("exec cat /proc/self/status /proc/self/stat >&4")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    status = dict(line.split(":\t", 1) for line in said.splitlines() if ":\t" in line)
    assert int(status["SigBlk"], 16) == 0
    # glibc keeps two for itself.
    assert int(status["SigIgn"], 16) & ~(0b11 << 31) == 0
    _, ppid, pgrp, session, *_ = said.splitlines()[-1].rpartition(")")[2].split()
    assert int(ppid) != os.getpid()
    assert pgrp == session == status["Pid"]


def test_a_command_that_cannot_be_run_is_an_error():
    with pytest.raises(OSError, match="/no/such/thing cannot be run"):
        spawning.spawn(["/no/such/thing"], {}, 10, 11)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_no_wait_and_no_handler_of_the_program_meets_it(place):
    done = place.run(program_text("wait_for_any_child"))
    assert (done.stdout, done.stderr) == ("[] []\nTrue\n", "")


def test_by_a_shell_a_handler_is_called_only_for_a_child_of_the_programs(place):
    done = place.run(program_text("reap_in_a_handler"))
    assert (done.stdout, done.stderr) == ("[]\n1\n", "")


def test_among_threads_signals_and_forks(place, campaign):
    rounds = min(campaign.rounds(200), 20_000)
    command = [sys.executable, "-c", program_text("spawn_among_threads"), str(rounds)]
    done = subprocess.run(command, env=place.env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{rounds} 4 set()\n", "")
    campaign.counts["faults tried"] += rounds


def test_a_handler_that_raises_leaves_the_mask_as_it_was(monkeypatch):
    class StopError(Exception):
        pass

    def interrupt(number, frame):
        raise StopError

    held = threading.Event()
    monkeypatch.setattr(signal, "valid_signals", lambda: held.set() or os.kill(os.getpid(), signal.SIGUSR1) or ())
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(StopError):
            run("true")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert held.is_set()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_where_the_kernel_makes_no_such_child_a_shell_starts_the_daemon(place, monkeypatch):
    def not_permitted(*arguments):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    for name, value in place.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launcher, "spawn", not_permitted)
    starting = launcher.Launcher(place.config())
    assert starting.start()
    starting.wait(20)
    assert place.answers()
    assert Path(f"/proc/{place.daemon_pid()}/cwd").readlink() == Path("/")
