"""A daemon's life: alone on its store, quiet, and leaving in good order."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.conversation import Conversation, key_of, talking
from support.places import get_message, new_place, put_message, until

from xcache.wire import commands, framing, protocol

LARGE = b"l" * (protocol.INLINE_LIMIT + 1)


def has_ended(child: subprocess.Popen[bytes]) -> bool:
    return until(lambda: child.poll() is not None)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, "stop"], ids=str)
def test_it_leaves_when_it_is_told_to_and_leaves_nothing_behind(place, how):
    child = place.start_daemon()
    with talking(place) as talk:
        talk.put(key_of("a"), LARGE)
        talk.get(key_of("a"))
        if how == "stop":
            assert talk.ask(commands.Stop("a test")) == protocol.Done()
        else:
            child.send_signal(how)
        assert talk.was_hung_up_on()
    assert has_ended(child)
    assert child.returncode == 0
    assert not place.socket.exists()
    left = ["blobs", "daemon.lock", "daemon.log", "quarantine", "reserve", "store.db"]
    assert sorted(path.name for path in place.dir.iterdir()) == left
    # The hit that the daemon had held back is written.
    assert place.query("SELECT hits FROM entries") == [(1,)]
    assert "Traceback" not in place.said() + (place.dir / "daemon.log").read_text()


def test_a_stopping_daemon_finishes_and_answers_the_requests_in_flight(place):
    """The Stop is read while the writer is still busy with what came before it."""
    child = place.start_daemon()
    payload = os.urandom(8_000_000)
    with talking(place) as talk, talking(place) as other:
        message = put_message(key_of("0"), payload, b"p", payload=None)
        puts = [talk.say(message._replace(key=key_of(str(number))), [payload]) for number in range(8)]
        other.ask(protocol.AskStatus())
        stop = talk.say(commands.Stop("a test"))
        answers = talk.answers([*puts, stop])
        assert talk.was_hung_up_on()
    assert [answers[put] for put in puts] == [protocol.Stored(True)] * 8
    assert has_ended(child)
    place.start_daemon()
    with talking(place) as talk:
        assert all(talk.get(key_of(str(number))) == payload for number in range(8))


def answers_until_it_left(place) -> set[protocol.Message]:
    """Return the answers to a client that goes on asking while the daemon finishes its work and leaves."""
    payload = os.urandom(4_000_000)
    question = framing.encode(1, get_message(key_of("none")))

    def ask_for_ever(asking: Conversation) -> None:
        with contextlib.suppress(OSError):
            while True:
                asking.raw(question * 50)

    with talking(place) as busy, talking(place) as asking:
        thread = threading.Thread(target=ask_for_ever, args=(asking,))
        thread.start()
        for number in range(4):
            busy.say(put_message(key_of(str(number)), payload, b"p", payload=None), [payload])
        busy.say(commands.Stop("a test"))
        answers = set()
        with contextlib.suppress(OSError):
            while True:
                answers.add(asking.hear()[1].lease)
        thread.join()
    return answers


def test_while_it_leaves_nobody_gets_an_error_for_an_answer(place):
    """A connection that ends is asked again elsewhere; an error would be counted and complained about."""
    for _ in range(4):
        child = place.start_daemon()
        assert answers_until_it_left(place) == {0}
        assert has_ended(child)


def test_it_leaves_when_nobody_has_asked_for_a_while(place):
    child = place.start_daemon(XCACHE_IDLE_EXIT="1s")
    with talking(place) as silent:
        assert silent.was_hung_up_on()
    assert has_ended(child)
    assert child.returncode == 0
    assert not place.socket.exists()
    assert "leaving: idle" in (place.dir / "daemon.log").read_text()


@pytest.mark.slow
def test_it_leaves_when_nobody_can_find_it_any_more(place):
    """The end of a session takes the runtime directory away, and the socket with it."""
    child = place.start_daemon()
    with talking(place) as talk:
        talk.put(key_of("a"), b"a")
        place.socket.unlink()
        assert has_ended(child)
    assert child.returncode == 0
    assert place.query("SELECT count(*) FROM entries") == [(1,)]
    place.start_daemon()


def test_it_does_not_leave_in_the_middle_of_an_answer(place):
    """The writer is held up for longer than the idle time."""
    child = place.start_daemon(XCACHE_IDLE_EXIT="1s")
    blocker = sqlite3.connect(place.dir / "store.db", isolation_level=None, check_same_thread=False)
    blocker.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(1.5, blocker.execute, ("COMMIT",))
    timer.start()
    with talking(place) as talk:
        assert talk.put(key_of("a"), b"a") == protocol.Stored(True)
    timer.join()
    blocker.close()
    assert has_ended(child)
    assert place.query("SELECT count(*) FROM entries") == [(1,)]


def test_a_second_daemon_on_the_same_store_is_refused(place):
    place.start_daemon()
    pid = place.daemon_pid()
    second = place.daemon(XCACHE_SOCKET=str(place.root / "other"))
    assert has_ended(second)
    assert second.returncode == 1
    assert place.said().splitlines()[-1] == f"xcached: another daemon serves {place.dir}"
    assert place.daemon_pid() == pid
    assert not (place.root / "other").exists()


def test_a_second_daemon_on_the_same_socket_is_refused(place):
    place.start_daemon()
    pid = place.daemon_pid()
    second = place.daemon(XCACHE_DIR=str(place.root / "other"))
    assert has_ended(second)
    assert second.returncode == 1
    assert place.said().splitlines()[-1] == f"xcached: another daemon listens on {place.socket}"
    assert place.daemon_pid() == pid


def test_a_socket_that_a_killed_daemon_left_is_taken_over(place):
    place.start_daemon().kill()
    assert until(lambda: not place.answers())
    assert place.socket.exists()
    place.start_daemon()


def test_a_file_that_is_no_socket_is_not_removed(place):
    place.socket.write_text("precious")
    child = place.daemon()
    assert has_ended(child)
    assert child.returncode == 1
    assert f"{place.socket}: Address already in use" in place.said()
    assert place.socket.read_text() == "precious"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("XCACHE_MAX_SIZE", "big", "XCACHE_MAX_SIZE='big' (environment) cannot be used; it must be a size"),
        ("XCACHE_DIR", "/proc/none", "/proc/none cannot be made"),
        ("XCACHE_SOCKET", "/proc/none/s", "/proc/none cannot be made"),
        ("XCACHE_SOCKET", "/" + "s" * 107, "too long for a Unix socket"),
    ],
)
def test_why_it_cannot_start_is_said_in_one_line(place, variable, value, said):
    child = place.daemon(**{variable: value})
    assert has_ended(child)
    assert child.returncode == 1
    assert said in place.said().splitlines()[-1]
    assert "Traceback" not in place.said()


def test_a_folder_that_others_can_write_is_no_place_for_a_store(place):
    place.dir.mkdir()
    place.dir.chmod(0o777)
    child = place.daemon()
    assert has_ended(child)
    assert child.returncode == 1
    assert "can be written by other users" in place.said()
    assert list(place.dir.iterdir()) == []


def test_a_planted_database_is_not_believed(place):
    """In a folder like /scratch, with the sticky bit, everybody can leave a store.db full of executables of theirs."""
    if os.getuid() != 0:
        pytest.skip("needs root to be two users")
    place.start_daemon()
    with talking(place) as talk:
        talk.put(key_of("a"), b"evil")
    place.stop()
    place.dir.chmod(0o1777)
    os.chown(place.dir / "store.db", 54321, 54321)
    child = place.daemon()
    assert until(lambda: place.answers() or child.poll() is not None)
    if child.poll() is None:
        with talking(place) as talk:
            assert talk.get(key_of("a")) is None


def test_the_version_is_said(place):
    said = subprocess.run(
        [sys.executable, "-m", "xcached", "--version"], env=place.env, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip()
    assert not place.dir.exists()


WRITE_LOG = """
from xcached.host.logs import logger, start_logging
from xcache.config import config
settings = config.load()
settings.dir.mkdir(mode=0o700)
start_logging(settings, to_stderr=False)
for number in range(40000):
    logger.error(f"{number} " + "x" * 100)
"""


def test_a_daemon_that_makes_its_store_loads_no_array_library(place):
    """sqlite-utils would import numpy and pandas, for nothing that a migration needs."""
    daemon = place.start_daemon()
    assert "numpy" not in Path(f"/proc/{daemon.pid}/maps").read_text()


def test_the_log_stays_bounded(place):
    said = place.run(WRITE_LOG)
    assert (said.returncode, said.stderr) == (0, "")
    logs = list(place.dir.glob("daemon.log*"))
    assert sum(path.stat().st_size for path in logs) <= 2 * 2**20
    assert "39999" in (place.dir / "daemon.log").read_text()


@pytest.mark.parametrize("what", ["a full device", "a directory", "a link to nowhere"])
def test_a_log_that_cannot_be_written_stops_nobody(place, what):
    place.start_daemon()
    place.stop()
    log = place.dir / "daemon.log"
    log.unlink()
    if what == "a directory":
        log.mkdir()
    else:
        log.symlink_to("/dev/full" if what == "a full device" else place.root / "missing" / "log")
    place.start_daemon()
    with talking(place) as talk:
        rude = Conversation(place)
        rude.raw(b"\xff" * 10)
        assert rude.was_hung_up_on()
        rude.close()
        assert talk.put(key_of("a"), b"a").kept


def test_a_clients_words_are_one_line_of_the_log(place):
    child = place.start_daemon()
    talk = Conversation(place)
    talk.ask(protocol.Hello(protocol.VERSION, "v", 1, "x\n2030-01-01 ERROR forged"))
    talk.ask(commands.Stop("because\n2030-01-01 ERROR forged as well"))
    talk.close()
    assert has_ended(child)
    assert not any(line.startswith("2030") for line in (place.dir / "daemon.log").read_text().splitlines())


def test_two_stores_do_not_know_of_each_other(place):
    place.start_daemon()
    with new_place() as elsewhere:
        elsewhere.start_daemon()
        with talking(place) as here, talking(elsewhere) as there:
            here.put(key_of("a"), b"a")
            assert there.get(key_of("a")) is None
        elsewhere.stop()
        assert place.answers()


def test_a_daemon_too_busy_to_take_connections_is_not_taken_for_dead(place):
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(place.socket))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(place.socket))
        child = place.daemon()
        assert until(lambda: child.poll() is not None)
        assert place.said().splitlines()[-1] == f"xcached: another daemon listens on {place.socket}"
        place.socket.unlink()


@pytest.mark.skipif(os.getuid() != 0, reason="needs an account that is not this one")
def test_why_it_does_not_start_is_said_once(place):
    child = place.daemon(XCACHE_DAEMON_USER="daemon")
    assert child.wait(30) == 1
    assert place.said().count("would serve nobody") == 1
