"""Where somebody listens for a daemon that does not run yet: no other is started beside it, none woken by looking."""

from __future__ import annotations

import os
import socket
import time

import pytest
from command_line import Shell

from xcache.launcher import Launcher


@pytest.fixture
def manager(place):
    """Listens as a service manager does, and counts who comes."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(place.socket))
    listening.listen()
    listening.setblocking(False)
    yield listening
    listening.close()


def came(listening: socket.socket) -> int:
    count = 0
    while True:
        try:
            listening.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


def test_where_somebody_listens_no_daemon_is_started(place, manager):
    assert Launcher(place.config()).start() is False
    assert came(manager) == 1
    assert not Launcher(place.config()).held()


def test_what_only_looks_does_not_wake_it(place, manager):
    place.dir.mkdir(mode=0o700)
    shell = Shell(place)
    assert shell.json("status")["running"] is False
    assert shell.json("stop") == {"stopped": False, "pid": None}
    shell.say("ls")
    shell.say("stats")
    assert came(manager) == 0


def test_the_lock_says_where_somebody_goes_on_listening(place, manager):
    """A program without the session's variables looks for the socket elsewhere."""
    place.dir.mkdir(mode=0o700)
    (place.dir / "daemon.lock").write_bytes(b"999999\n" + os.fsencode(place.socket))
    launcher = Launcher(place.config(socket=str(place.root / "elsewhere")))
    assert launcher.start() is False
    assert launcher.address() == place.socket
    assert came(manager) == 1


@pytest.mark.parametrize("what", ["a socket nobody listens on", "a file", "an address that is gone"])
def test_what_was_left_behind_keeps_nobody_from_starting_one(place, what):
    if what == "an address that is gone":
        place.dir.mkdir(mode=0o700)
        (place.dir / "daemon.lock").write_bytes(b"999999\n" + os.fsencode(place.root / "gone"))
    elif what == "a file":
        (place.root / "other").write_text("")
        place.dir.mkdir(mode=0o700)
        (place.dir / "daemon.lock").write_bytes(b"999999\n" + os.fsencode(place.root / "other"))
    else:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
            left.bind(str(place.socket))
    launcher = Launcher(place.config())
    assert launcher.start() is True
    launcher.wait(20)
    assert place.answers()


def test_to_look_for_it_costs_a_program_little(place):
    place.start_daemon()
    launcher = Launcher(place.config())
    begin = time.monotonic()
    for _ in range(100):
        assert launcher.start() is False
    # With a daemon there, only the lock is looked at.
    assert (time.monotonic() - begin) / 100 < 0.005
