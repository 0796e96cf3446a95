"""The daemon talks to a service manager over real sockets, without systemd as PID 1."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conversation import key_of, talking
from support.places import PATIENCE, Place, until
from support.program_files import program_text

from xcache.client.connection import Connection
from xcache.errors import StoreError, TurnedAwayError
from xcache.wire import commands, protocol
from xcached.host import systemd
from xcached.host.logs import ForJournal
from xcached.host.systemd import Manager, inherited, turn_away


class Listener:
    """Receives the messages of a service to its manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(10)
        self.heard: list[str] = []

    def hears(self, word: str) -> bool:
        """Return whether a message with a line that begins so comes."""
        with contextlib.suppress(TimeoutError):
            while not any(line.startswith(word) for line in (self.heard[-1:] or [""])[0].splitlines()):
                self.heard.append(self.socket.recv(65536).decode())
            return True
        return False


@pytest.fixture
def listener(place) -> Iterator[Listener]:
    made = Listener(place.root / "notify")
    yield made
    made.socket.close()


@pytest.fixture
def activator(place) -> Iterator[subprocess.Popen[bytes]]:
    """Listen on the place's socket, and start the daemon when a client connects."""
    if not shutil.which("systemd-socket-activate"):
        pytest.skip("there is no systemd-socket-activate")
    with place.said_file().open("ab") as said:
        child = subprocess.Popen(
            [
                "systemd-socket-activate",
                f"--listen={place.socket}",
                "--fdname=xcached",
                *(
                    f"--setenv={name}={value}"
                    for name, value in place.env.items()
                    if name.startswith(("XCACHE", "PYTHON"))
                ),
                sys.executable,
                "-P",
                "-m",
                "xcached",
            ],
            env=place.env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stderr=said,
        )
    place.adopt(child)
    # Bound is not yet listening; the first who gets through has it started.
    assert until(place.answers)
    return child


def test_it_says_when_it_is_ready_and_that_it_lives_and_leaves(place, listener):
    child = place.start_daemon(NOTIFY_SOCKET=str(listener.path), WATCHDOG_USEC="200000")
    assert listener.hears("READY=1")
    ready = listener.heard[-1].splitlines()
    assert f"STATUS=serves {place.dir}, 0 connections" in ready
    assert f"MAINPID={child.pid}" in ready
    for _ in range(3):
        listener.heard.append("")
        assert listener.hears("WATCHDOG=1")
    child.send_signal(signal.SIGHUP)
    assert listener.hears("RELOADING=1")
    (moment,) = (line for line in listener.heard[-1].splitlines() if line.startswith("MONOTONIC_USEC="))
    assert 0 <= time.clock_gettime(time.CLOCK_MONOTONIC) - int(moment.partition("=")[2]) / 1e6 < 10
    assert listener.hears("READY=1")
    child.send_signal(signal.SIGTERM)
    assert listener.hears("STOPPING=1")


def test_a_loop_that_hangs_gives_no_sign_of_life(place, listener):
    child = place.start_daemon(NOTIFY_SOCKET=str(listener.path), WATCHDOG_USEC="200000")
    assert listener.hears("WATCHDOG=1")
    child.send_signal(signal.SIGSTOP)
    try:
        listener.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            for _ in range(20):
                listener.socket.recv(65536)
    finally:
        child.send_signal(signal.SIGCONT)


def test_a_manager_who_is_busy_is_told_all_the_same(place, listener):
    """So many messages wait for the manager that the kernel takes no more."""
    said = True
    while said:
        said = False
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, contextlib.suppress(BlockingIOError):
            other.setblocking(False)
            while True:
                other.sendto(b"something", str(listener.path))
                said = True
    place.daemon(NOTIFY_SOCKET=str(listener.path))
    assert until(place.answers)
    time.sleep(0.2)
    assert listener.hears("READY=1")


def test_an_abstract_socket_is_told_as_well_and_a_dead_one_does_no_harm(place):
    name = f"xcache-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0{name}")
        listening.settimeout(5)
        Manager({"NOTIFY_SOCKET": f"@{name}"}).ready("two\nlines")
        assert b"STATUS=two lines" in listening.recv(1000).splitlines()
    Manager({"NOTIFY_SOCKET": f"@{name}"}).ready("nobody there")
    Manager({"NOTIFY_SOCKET": str(place.root / "none")}).heartbeat()
    Manager({}).heartbeat()


@pytest.mark.parametrize(
    ("environment", "every"),
    [
        ({"WATCHDOG_USEC": "3000000"}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_how_often_it_gives_a_sign_of_life(environment, every):
    assert Manager({"NOTIFY_SOCKET": "/none"} | environment).watch_every == every
    assert Manager(environment).watch_every is None


def test_the_first_client_starts_it_and_the_socket_stays(place, activator):
    inode = place.socket.stat().st_ino
    with talking(place) as talk:
        assert talk.put(key_of("a"), b"a") == protocol.Stored(True)
        # The daemon has replaced the activator in the same process, as under systemd.
        assert talk.pid == activator.pid
        talk.ask(commands.Stop("a test"))
    assert until(lambda: activator.poll() is not None)
    assert place.socket.stat().st_ino == inode
    # The lock file still says where the socket is.
    assert (place.dir / "daemon.lock").read_bytes().endswith(b"\n" + os.fsencode(place.socket))


def test_a_damaged_database_leaves_the_socket_in_hand(place, activator):
    with talking(place) as talk:
        talk.put(key_of("a"), b"a")
    with contextlib.suppress(OSError):
        place.execute("INSERT INTO statistics VALUES ('hits', 1) ON CONFLICT (name) DO UPDATE SET amount = 0")
        place.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with (place.dir / "store.db").open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(200_000))

    def begun_anew() -> bool:
        with contextlib.suppress(OSError, ConnectionError), talking(place) as talk:
            talk.put(key_of("b"), b"b")
        return "restarting" in (place.dir / "daemon.log").read_text()

    def stores_in_a_fresh_one() -> bool:
        # A client that came just before the daemon began anew was sent away.
        with contextlib.suppress(OSError, ConnectionError), talking(place) as talk:
            return talk.put(key_of("c"), b"c") == protocol.Stored(True) and talk.pid == activator.pid
        return False

    assert until(begun_anew)
    assert until(stores_in_a_fresh_one)


def test_one_that_was_started_beside_it_makes_way(place):
    beside = place.daemon(XCACHE_SOCKET=str(place.root / "beside"))
    assert until((place.root / "beside").exists)
    assert until(lambda: b"beside" in (place.dir / "daemon.lock").read_bytes())
    if not shutil.which("systemd-socket-activate"):
        pytest.skip("there is no systemd-socket-activate")
    command = ["systemd-socket-activate", f"--listen={place.socket}", sys.executable, "-P", "-m", "xcached"]
    passed_on = [f"--setenv={name}" for name in place.env if name.startswith(("XCACHE", "PYTHON"))]
    with place.said_file().open("ab") as said:
        child = subprocess.Popen([command[0], *passed_on, *command[1:]], env=place.env, cwd="/", stderr=said)
    place.adopt(child)
    # Bound is not yet listening; the first who gets through has it started.
    assert until(place.answers)
    with talking(place) as talk:
        assert talk.pid == child.pid
    assert until(lambda: beside.poll() == 0)
    assert "the service manager's daemon takes over" in (place.dir / "daemon.log").read_text()


def test_one_whose_name_was_taken_leaves_by_itself_and_the_one_that_took_it_stays(place):
    """A request to stop would reach the new one instead: the two sockets have the same name."""
    if not shutil.which("systemd-socket-activate"):
        pytest.skip("there is no systemd-socket-activate")
    beside = place.start_daemon()
    command = ["systemd-socket-activate", f"--listen={place.socket}", sys.executable, "-P", "-m", "xcached"]
    passed_on = [f"--setenv={name}" for name in place.env if name.startswith(("XCACHE", "PYTHON"))]
    inode = place.socket.stat().st_ino
    with place.said_file().open("ab") as said:
        child = subprocess.Popen([command[0], *passed_on, *command[1:]], env=place.env, cwd="/", stderr=said)
    place.adopt(child)
    assert until(lambda: place.socket.exists() and place.socket.stat().st_ino != inode)
    assert until(place.answers)
    assert until(lambda: beside.poll() == 0)
    with talking(place) as talk:
        assert talk.pid == child.pid
        talk.status()
    assert "the service manager's daemon takes over" not in (place.dir / "daemon.log").read_text()
    assert child.poll() is None
    with talking(place) as talk:
        assert talk.put(key_of("a"), b"a") == protocol.Stored(True)


def test_one_that_cannot_start_tells_each_client_why(place):
    """If it ended at once, the service manager would give up for good."""
    if not shutil.which("systemd-socket-activate"):
        pytest.skip("there is no systemd-socket-activate")
    (place.root / "settings.toml").write_text('max_size = "lots"')
    passed_on = [f"--setenv={name}" for name in place.env if name.startswith(("XCACHE", "PYTHON"))]
    passed_on.append(f"--setenv=XCACHE_CONFIG={place.root / 'settings.toml'}")
    command = ["systemd-socket-activate", f"--listen={place.socket}", *passed_on]
    with place.said_file().open("ab") as said:
        child = subprocess.Popen([*command, sys.executable, "-P", "-m", "xcached"], env=place.env, cwd="/", stderr=said)
    place.adopt(child)
    assert until(place.answers)
    for _ in range(3):
        # This holds also for a client that writes before the daemon accepts it.
        with pytest.raises(TurnedAwayError, match="cannot start: max_size='lots'"):
            Connection(place.socket, 10, "1")
    assert child.poll() is None
    child.terminate()
    assert until(lambda: child.poll() is not None, 5)


def test_a_daemon_that_cannot_start_leaves_once_its_problem_may_be_solved(place, monkeypatch):
    """The client hears no old reason: hung up on, it connects again, and systemd starts the next daemon."""
    monkeypatch.setattr(systemd, "_TURN_AWAY_SECONDS", 1e6)
    solved = threading.Event()
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        listener.bind(str(place.socket))
        listener.listen()
        away = threading.Thread(target=turn_away, args=(listener, "some reason", solved.is_set))
        away.start()
        try:
            with pytest.raises(TurnedAwayError, match="some reason"):
                Connection(place.socket, 10, "1")
        finally:
            solved.set()
            away.join(PATIENCE)
        assert not away.is_alive()


@pytest.mark.parametrize(
    ("kind", "count", "names", "problem"),
    [
        ("datagrams", "1", "xcached", "is not a Unix socket that listens for streams"),
        ("internet", "1", "xcached", "is not a Unix socket that listens for streams"),
        ("deaf", "1", "xcached", "is not a Unix socket that listens for streams"),
        ("abstract", "1", "xcached", "has no path"),
        ("file", "1", "xcached", "is not a socket"),
        ("good", "2", "a:b", "2 sockets were handed over and none is called xcached"),
    ],
)
def test_a_descriptor_that_cannot_be_the_socket_is_refused(place, kind, count, names, problem):
    run = subprocess.run(
        [sys.executable, "-c", program_text("hand_over_a_socket"), kind, count, names],
        env=place.env,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert run.returncode == 1
    assert problem in run.stderr
    assert "Traceback" not in run.stderr


def test_a_descriptor_handed_to_another_process_is_not_taken():
    assert inherited({}) is None
    assert inherited({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) is None
    assert inherited({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0"}) is None
    with pytest.raises(StoreError, match="cannot be used"):
        inherited({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "5000", "LISTEN_FDNAMES": "a:" * 4000 + "xcached"})


def test_lines_for_the_journal_have_a_priority_each():
    def line(level: int, text: str) -> str:
        return ForJournal().format(logging.LogRecord("xcached", level, "", 0, text, (), None))

    assert line(logging.ERROR, "a\nb") == "<3>a\\nb"
    assert [line(level, "a")[:3] for level in (logging.CRITICAL, logging.WARNING, logging.INFO, logging.DEBUG)] == [
        "<3>", "<4>", "<6>", "<7>",
    ]  # fmt: skip
    assert line(logging.INFO, "") == "<6>"


def test_where_stderr_is_the_journal_there_is_no_file(place: Place):
    reading, writing = os.pipe()
    found = os.fstat(writing)
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "xcached"],
        env=place.env | {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"},
        cwd="/",
        stderr=writing,
    )
    place.adopt(child)
    os.close(writing)
    assert until(place.answers)
    child.terminate()
    child.wait(20)
    with os.fdopen(reading, "rb") as journal:
        lines = journal.read().splitlines()
    assert lines
    assert all(one.startswith(b"<6>") for one in lines)
    assert not (place.dir / "daemon.log").exists()
