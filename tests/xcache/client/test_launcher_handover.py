"""From one daemon to the next, and to one that somebody else started: no request is lost on the way."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
from support.peers import Talk, fake_daemon
from support.places import get_message, until
from support.starting import with_a_store

from xcache.client.client import Client
from xcache.client.connection import Connection
from xcache.client.launcher import Launcher
from xcache.errors import ProtocolError, StoreError, UnavailableError
from xcache.wire import commands, protocol

KEY = "ab" * 32
pytestmark = pytest.mark.usefixtures("here")


@contextlib.contextmanager
def leaving(place, seconds: float):
    """A daemon that takes no more connections, and has the store for a while yet."""
    with open(place.dir / "daemon.lock", "rb") as lock:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
        timer = threading.Timer(seconds, fcntl.flock, (lock.fileno(), fcntl.LOCK_UN))
        timer.start()
        yield
        timer.join()


def test_while_a_daemon_is_leaving_the_next_one_is_waited_for(place, connected):
    """It unlinks its socket first and writes what is in flight: it can hold the store for half a minute."""
    with_a_store(place)
    with leaving(place, 0.5):
        assert connected(timeout=3).get(get_message(KEY)).lease == 0


def test_a_daemon_that_was_just_told_to_stop_is_followed_by_another(place, connected):
    with_a_store(place)
    for _ in range(3):
        place.start_daemon()
        config = place.config()
        with contextlib.closing(Connection(config.socket, 20, "test")) as connection:
            connection.demand(commands.Stop("test"), protocol.Done, 20)
            assert connection.wait_for_end(20)
        assert connected(timeout=3).get(get_message(KEY)).lease == 0
        place.stop()


def test_looking_whether_a_daemon_has_the_store_does_not_keep_one_from_it(place):
    """``xcache status`` in one terminal, a program or ``xcached`` in another."""
    with_a_store(place)
    stop = threading.Event()

    def look() -> None:
        launcher = Launcher(place.config())
        while not stop.is_set():
            launcher.held()

    onlookers = [threading.Thread(target=look) for _ in range(2)]
    for thread in onlookers:
        thread.start()
    try:
        started = [Launcher(place.config()).start() for _ in range(30)]
    finally:
        stop.set()
        for thread in onlookers:
            thread.join()
    assert started == [True] + [False] * 29


def test_an_older_daemon_is_asked_to_make_room(place, connected):
    """It answers, hangs up, and takes a moment to leave: only then is its store free for another."""
    with_a_store(place)

    def older(talk: Talk) -> None:
        talk.welcome(protocol.VERSION - 1)
        assert isinstance(talk.read(), commands.Stop)
        place.socket.unlink()
        talk.say(protocol.Done())

    with fake_daemon(place.socket, older) as daemon, leaving(place, 0.3):
        assert connected(timeout=3).get(get_message(KEY)).lease == 0
        assert [type(message) for message in daemon.heard] == [protocol.Hello, commands.Stop]
        place.stop()


def test_an_older_daemon_that_stays_is_given_up(place, connected):
    with_a_store(place)

    def stubborn(talk: Talk) -> None:
        talk.welcome(protocol.VERSION - 1)
        talk.read()
        talk.say(protocol.Done())

    with fake_daemon(place.socket, stubborn) as daemon:
        with pytest.raises(ProtocolError, match="speaks version"):
            connected(timeout=3).get(get_message(KEY))
        assert [type(message) for message in daemon.heard] == [protocol.Hello, commands.Stop, protocol.Hello]


def test_an_older_daemon_that_goes_on_talking_is_waited_for_no_longer_than_the_timeout(place, connected):
    with_a_store(place)
    enough = threading.Event()

    def talkative(talk: Talk) -> None:
        talk.welcome(protocol.VERSION - 1)
        talk.read()
        talk.say(protocol.Done())
        # Ten times the timeout: long enough to tell the difference, short enough for a test.
        until_then = time.monotonic() + 3.0
        while time.monotonic() < until_then and not enough.is_set():
            talk.raw(b"more")
            time.sleep(0.01)

    with fake_daemon(place.socket, talkative) as daemon:
        with pytest.raises((UnavailableError, StoreError)):
            connected(timeout=0.3).get(get_message(KEY))
        # The client connected only once: its time was up while the first daemon talked.
        assert daemon.connections == 1
        enough.set()


def test_the_same_store_by_another_way_is_the_same_daemon(place, connected):
    """With or without XDG_RUNTIME_DIR (cron, sudo) and with another TMPDIR (batch jobs), a store has one daemon."""
    with_a_store(place)
    first = connected(socket=place.root / "run" / "s")
    assert first.get(get_message(KEY)).lease == 0
    place.socket = place.root / "run" / "s"
    second = connected(timeout=2, socket=place.root / "tmp" / "s")
    assert second.get(get_message(KEY)).lease == 0


HELD = """
import subprocess, sys
program = "from xcache.config import config; from xcache.client.launcher import Launcher; "
program += "launcher = Launcher(config.load()); "
subprocess.run([sys.executable, "-c", program + "launcher.start(); launcher.wait(20)"], check=True)
subprocess.run([sys.executable, "-c", program + "print(launcher.held())"], check=True)
"""


def test_in_a_container_a_daemon_is_seen_whose_starter_has_ended(place):
    """The kernel shows a lock under the process that took it, and not where that one has no number any more."""
    namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs the right to make a namespace")
    said = subprocess.run(
        [*namespace, sys.executable, "-c", HELD], env=place.env, capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stdout == "True\n"


def test_the_number_of_a_killed_daemon_that_another_process_has_now_is_no_daemon(place):
    """After a restart of the machine, or of a container, where numbers are small and come again."""
    place.start_daemon().kill()
    place.stop()
    lock = place.dir / "daemon.lock"
    lock.write_bytes(b"%d\n%s" % (os.getpid(), bytes(place.socket)))
    assert not Launcher(place.config()).held()


def test_a_program_that_may_start_none_finds_the_stores_daemon_all_the_same(place):
    place.start_daemon()
    config = place.config(timeout=3, socket=place.root / "tmp" / "s")
    # The daemon listens a moment before it writes where.
    assert until(lambda: Launcher(config).address())
    client = Client(config, "test")
    try:
        assert client.get(get_message(KEY)).lease == 0
    finally:
        client.close()
