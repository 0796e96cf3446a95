"""The daemon that a program starts is clean of that program: its signals, limits, processors, priority and manager."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import until

from xcached.__main__ import interpreter_options

STARTS = """
import os, resource, signal, sys
from xcache.config import config
from xcache.errors import XcacheError
from xcache.client.launcher import Launcher
{before}
launcher = Launcher(config.load())
try:
    launcher.start()
    launcher.wait(30)
except XcacheError as error:
    print(error)
launcher.close()
"""


def started_by(place, before: str, *under: str, **environment: str) -> str:
    """Have a program start the daemon; return the error that it was told, if any."""
    command = [*under, sys.executable, "-c", STARTS.format(before=before)]
    done = subprocess.run(
        command, env=place.env | environment, cwd=place.root, capture_output=True, text=True, timeout=90
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


SIGNALS = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})
"""


@pytest.mark.parametrize("way", ["by a shell", "without one"])
def test_it_hears_signals_that_its_starter_blocked_or_ignored(place, way):
    by_shell = "import xcache.client.launcher\ndef cannot(*a): raise OSError\nxcache.client.launcher.spawn = cannot\n"
    assert started_by(place, SIGNALS + (by_shell if way == "by a shell" else "")) == ""
    pid = place.daemon_pid()
    assert int(status(pid)["SigBlk"], 16) == 0
    os.kill(pid, signal.SIGTERM)
    assert until(lambda: not Path(f"/proc/{pid}").exists() or status(pid)["State"].startswith("Z"))


SURROUNDINGS = """
import pathlib
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.nice(7)
pathlib.Path("/proc/self/oom_score_adj").write_text("300")
for name, soft in (("CPU", 30), ("FSIZE", 8_000_000), ("NOFILE", 60), ("AS", 8 << 30), ("CORE", 0)):
    kind = getattr(resource, f"RLIMIT_{name}")
    resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))
os.umask(0)
"""


def test_it_has_all_processors_and_as_much_as_the_hard_limits_permit(place):
    assert started_by(place, SURROUNDINGS) == ""
    pid = place.daemon_pid()
    assert os.sched_getaffinity(pid) == os.sched_getaffinity(0)
    assert os.sched_getscheduler(pid) == os.SCHED_OTHER
    for name in ("CPU", "FSIZE", "NOFILE", "AS"):
        soft, hard = resource.prlimit(pid, getattr(resource, f"RLIMIT_{name}"))
        assert soft == hard, name
    if os.getuid() == 0:
        assert os.getpriority(os.PRIO_PROCESS, pid) == 0
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "0\n"
    assert place.socket.stat().st_mode & 0o777 == 0o600


@pytest.fixture
def without_rights():
    """Return the words before a command that keep its process from raising its hard limits."""
    if os.getuid() != 0:
        return ()
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv")
    return ("setpriv", "--inh-caps=-all", "--bounding-set=-all")


HARD = [
    ("CPU", 3, "3 seconds of processor time (its hard limit, ulimit -t)"),
    ("FSIZE", 8_000_000, "8000000 bytes a file (its hard limit, ulimit -f)"),
    ("NOFILE", 40, "40 open files (its hard limit, ulimit -n)"),
]


@pytest.mark.parametrize(("name", "limit", "words"), HARD)
def test_a_hard_limit_that_would_stop_it_is_told_to_the_program(place, without_rights, name, limit, words):
    limited = f"resource.setrlimit(resource.RLIMIT_{name}, ({limit}, {limit}))"
    said = started_by(place, limited, *without_rights)
    assert "the daemon did not start" in said
    assert words in said
    assert not place.answers()


@pytest.mark.parametrize("as_a_shell_would", [False, True])
def test_it_does_not_speak_to_the_manager_of_its_starter(place, as_a_shell_would):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(place.root / "n"))
        told = {"NOTIFY_SOCKET": str(place.root / "n"), "WATCHDOG_USEC": "200000", "LISTEN_FDS": "1", "LISTEN_PID": "1"}
        if as_a_shell_would:
            # Somebody who passes on everything.
            reading, writing = os.pipe()
            command = [sys.executable, "-P", "-m", "xcached", "--ready-fd", str(writing)]
            child = subprocess.Popen(command, env=place.env | told, pass_fds=(writing,), stderr=subprocess.DEVNULL)
            place.adopt(child)
            os.close(writing)
            with open(reading) as ready:
                assert ready.read() == "\nready\n"
        else:
            assert started_by(place, "", **told) == ""
            environment = Path(f"/proc/{place.daemon_pid()}/environ").read_text()
            assert not [name for name in told if name in environment]
        place.stop()
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(1000)


@pytest.mark.parametrize(
    ("given", "own"),
    [
        (["python", "-I", "-B", "-P", "-m", "xcached", "--lock-fd", "3"], 2),
        (["python", "-P", "-m", "xcached"], 0),
        (["python", "/usr/bin/xcached", "--ready-fd", "4"], 2),
    ],
)
def test_beginning_anew_it_is_run_as_before(monkeypatch, given, own):
    """The flags are those it was started with: isolated stays isolated."""
    monkeypatch.setattr(sys, "orig_argv", given)
    monkeypatch.setattr(sys, "argv", ["xcached", *given[len(given) - own :]])
    assert interpreter_options() == given[1 : len(given) - own]
