"""A service manager listens for a daemon that does not run yet: none is started beside it, or woken by looking."""

from __future__ import annotations

import os
import shutil
import socket

import pytest
from support.command_line import Shell
from support.places import until

from xcache.client.launcher import Launcher


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


def test_commands_that_only_look_do_not_wake_the_daemon(place, manager):
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


def test_a_copy_of_a_store_does_not_lead_to_the_daemon_of_the_original(place):
    """Programs with XCACHE_DIR of the copy once used the original, without a word."""
    place.start_daemon()
    # The daemon listens a moment before its lock file says where.
    assert until(lambda: Launcher(place.config()).address() == place.socket)
    copy = place.root / "copy"
    shutil.copytree(place.dir, copy)
    launcher = Launcher(place.config(dir=str(copy), socket=str(place.root / "other")))
    assert launcher.address() is None
    assert launcher.start() is True
    launcher.wait(20)
    assert launcher.address() == place.root / "other"
    shell = Shell(place)
    shell.env |= {"XCACHE_DIR": str(copy), "XCACHE_SOCKET": str(place.root / "other")}
    shell.say("stop")
    assert until(lambda: not launcher.held())


@pytest.mark.parametrize("what", ["a socket nobody listens on", "a file", "an address that is gone"])
def test_leftovers_keep_nobody_from_starting_a_daemon(place, what):
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


def test_a_launcher_asks_only_the_lock_whether_a_daemon_runs(place, monkeypatch):
    place.start_daemon()
    connects: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: connects.append(address))
    assert Launcher(place.config()).start() is False
    assert connects == []
