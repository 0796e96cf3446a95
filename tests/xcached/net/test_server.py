"""Connections that misbehave are ended, and nobody else notices."""

from __future__ import annotations

import os
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.conversation import Conversation, key_of, talking
from support.places import get_message, put_message, until

from xcache.client.contents import write_sealed
from xcache.wire import commands, framing, protocol

LARGE = b"l" * (protocol.INLINE_LIMIT + 1)
FULL = b"f" * protocol.INLINE_LIMIT


@pytest.fixture
def bystander(place):
    """A client that has stored two entries, and must find both after the test."""
    place.start_daemon()
    with talking(place) as conversation:
        assert conversation.put(key_of("small"), FULL).kept
        assert conversation.put(key_of("large"), LARGE).kept
        # The daemon follows a process that it has handed something to.
        assert conversation.get(key_of("large")) == LARGE
        # Connections that only looked for the daemon are closed: from here on the test can count open files.
        assert until(lambda: conversation.status()["connections"] == 1)
        yield conversation
        assert conversation.get(key_of("small")) == FULL
        assert conversation.get(key_of("large")) == LARGE
        assert conversation.status()["entries"] >= 2
    with talking(place) as newcomer:
        assert newcomer.get(key_of("large")) == LARGE
        assert newcomer.pid == conversation.pid
    assert "Traceback" not in (place.dir / "daemon.log").read_text()


def open_in(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


HELLO = framing.encode(1, protocol.Hello(protocol.VERSION, "test", 1, "test"))
UNMANNERLY = {
    "noise": b"\x00\x00\x00\x05\xc1\xc1\xc1\xc1\xc1",
    "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "an empty frame": struct.pack(">I", 0),
    "a frame above the limit": struct.pack(">I", protocol.MAX_FRAME + 1),
    "the largest length": b"\xff" * 100,
    "no hello": framing.encode(1, protocol.AskStatus()),
    "a welcome for a hello": framing.encode(1, protocol.Welcome(1, "v", 1, "d")),
    "an unknown message": HELLO + struct.pack(">I", 8) + b"\x92\x01\xa5Nobod",
    "a field too few": HELLO + struct.pack(">I", 6) + b"\x92\x01\xa3Get",
    "a request and noise": HELLO + framing.encode(2, get_message("k")) + b"\x00\x00\x00\x01\xc1",
}


def test_a_client_that_breaks_the_protocol_is_hung_up_on(place, bystander):
    for number, (name, said) in enumerate(UNMANNERLY.items(), 1):
        rude = Conversation(place)
        rude.raw(said)
        assert rude.was_hung_up_on(), name
        rude.close()
        assert (place.dir / "daemon.log").read_text().count("was disconnected") == number, name


def test_half_a_frame_holds_up_nobody(place, bystander):
    for said in (b"", b"\x00", HELLO[:-1], HELLO + framing.encode(2, get_message("k"))[:-1]):
        slow, gone = Conversation(place), Conversation(place)
        for each in (slow, gone):
            each.raw(said)
        gone.close()
        assert bystander.get(key_of("small")) == FULL
        slow.close()


def test_a_message_that_is_no_request_is_refused_and_forgiven(place, bystander):
    for message in (protocol.Done(), protocol.Hello(1, "v", 1, "p"), protocol.Found("d", 1, 1.0, b"x")):
        answer = bystander.ask(message)
        assert isinstance(answer, protocol.Refused)
        assert answer.kind == "protocol error"


def test_a_hello_of_any_version_is_answered(place, bystander):
    """A client of another version learns the daemon's number, and can ask the daemon to step aside."""
    for version in (0, protocol.VERSION + 1, -5):
        other = Conversation(place)
        welcome = other.ask(protocol.Hello(version, "other", 1, "p"))
        assert (welcome.protocol, welcome.pid, welcome.directory) == (
            protocol.VERSION,
            bystander.pid,
            str(place.dir),
        )
        other.close()


def test_many_requests_at_once_are_all_answered(place, bystander):
    """More than may be in flight; fewer than fill the socket with answers that nobody reads yet."""
    with talking(place) as eager:
        requests = [
            eager.say(put_message(key_of(f"p{n % 70}"), b"x" * n, b"p") if n % 3 else get_message(key_of("none")))
            for n in range(180)
        ]
        answers = eager.answers(requests)
    assert sorted(answers) == requests
    kinds = [type(answers[request]) for request in requests]
    assert kinds == [protocol.Missing, protocol.Stored, protocol.Stored] * 60


def test_a_client_that_never_reads_is_not_read_from_either(place, bystander):
    """The daemon keeps a bounded number of bytes for a client that does not read, however much it asks for."""
    before = bystander.status()["peak_memory"]
    request = framing.encode(7, get_message(key_of("small")))
    with talking(place) as deaf:
        deaf.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            for _ in range(200):
                deaf.socket.sendall(request * 100)
        assert bystander.get(key_of("large")) == LARGE
        assert bystander.status()["peak_memory"] - before < 8 * 2**20


def test_a_client_that_never_takes_its_answers_leaves_descriptors_to_others(place, bystander):
    """Each large answer is an open file of the daemon's until it has been sent."""
    before = open_in(bystander.pid)
    request = framing.encode(7, get_message(key_of("large")))
    with talking(place) as deaf:
        deaf.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            for _ in range(200):
                deaf.socket.sendall(request * 100)
        assert bystander.get(key_of("large")) == LARGE
        assert open_in(bystander.pid) - before < 200
    assert until(lambda: open_in(bystander.pid) <= before)


def test_files_that_nobody_fills_are_closed(place, bystander):
    before = open_in(bystander.pid)
    with talking(place) as asking:
        for count in (*[1, 2] * 20, 0, 3, -1):
            answer = asking.ask(protocol.AskFiles(count))
            assert isinstance(answer, protocol.Files if count in (1, 2) else protocol.Refused)
        assert open_in(bystander.pid) <= before + 3
        assert asking.get(key_of("none")) is None
    assert until(lambda: open_in(bystander.pid) == before)


def test_a_put_behind_another_request_keeps_its_files(place, bystander):
    """Both arrive in one piece, as they do at a daemon that was busy for a moment."""
    with talking(place) as hasty:
        (file,) = hasty.files(1)
        with file:
            write_sealed(file, LARGE + b"x")
        os.kill(bystander.pid, signal.SIGSTOP)
        asked = hasty.say(get_message(key_of("none")))
        put = hasty.say(put_message(key_of("behind"), LARGE + b"x", b"p", payload=None))
        os.kill(bystander.pid, signal.SIGCONT)
        answers = hasty.answers([asked, put])
        assert (answers[asked].lease, answers[put]) == (0, protocol.Stored(True))


WRONG = {
    "another digest": ({"digest": key_of("other")}, 1, "wrong digest"),
    "a size too large": ({"stored_size": len(LARGE) + 1}, 1, "wrong size"),
    "a size too small": ({"stored_size": len(LARGE) - 1}, 1, "wrong size"),
    "no file": ({}, 0, "protocol error"),
    "a file too many": ({}, 2, "protocol error"),
    "another digest of the program": ({"program_stored_digest": key_of("other")}, 1, "wrong digest"),
}


@pytest.mark.parametrize(("changes", "count", "kind"), WRONG.values(), ids=list(WRONG))
def test_a_put_that_is_not_what_it_says_is_refused_and_leaves_nothing(place, bystander, changes, count, kind):
    before = open_in(bystander.pid)
    files = sorted(place.dir.glob("blobs/*/*"))
    content = b"x" + LARGE[1:]
    message = put_message(key_of("wrong"), content, b"p", payload=None, **changes)
    answer = bystander.ask(message, [content] * count)
    assert isinstance(answer, protocol.Refused)
    assert answer.kind == kind
    assert bystander.get(key_of("wrong")) is None
    assert bystander.status()["entries"] == 2
    assert until(lambda: sorted(place.dir.glob("blobs/*/*")) == files, 2)
    assert until(lambda: open_in(bystander.pid) == before)


def test_two_hundred_connections(place, bystander):
    before = open_in(bystander.pid)
    guests = [Conversation(place) for _ in range(200)]
    for guest in guests:
        guest.greet()
    assert bystander.status()["connections"] == 201
    requests = [guest.say(get_message(key_of("large"))) for guest in guests]
    for guest, request in zip(guests, requests, strict=True):
        assert isinstance(guest.answers([request])[request], protocol.Found)
        guest.close()
    assert until(lambda: bystander.status()["connections"] == 1)
    assert until(lambda: open_in(bystander.pid) == before)


def test_without_a_free_descriptor_nothing_is_lost_and_the_log_stays_quiet(place, bystander):
    """Connections take all descriptors of the daemon: it goes on serving, and drops no entry that it cannot open."""
    limit = open_in(bystander.pid) + 5
    before = resource.prlimit(bystander.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(bystander.pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    guests = [Conversation(place) for _ in range(20)]
    assert until(lambda: open_in(bystander.pid) >= limit)
    for _ in range(20):
        bystander.ask(get_message(key_of("large")))
        time.sleep(0.01)
    resource.prlimit(bystander.pid, resource.RLIMIT_NOFILE, before)
    for guest in guests:
        guest.close()
    assert len((place.dir / "daemon.log").read_text().splitlines()) < 200
    assert bystander.get(key_of("large")) == LARGE


def test_a_client_that_hangs_up_before_the_answer_harms_nobody(place, bystander):
    before = open_in(bystander.pid)
    for number in range(20):
        with talking(place) as hasty:
            hasty.say(put_message(key_of(f"h{number}"), LARGE, b"p", payload=None), [LARGE])
            hasty.say(get_message(key_of("large")))
    assert until(lambda: open_in(bystander.pid) == before)
    # The descriptors are closed a moment before what was read from them is in the store.
    assert bystander.ask(commands.Sync()) == protocol.Done()
    assert all(bystander.get(key_of(f"h{number}")) == LARGE for number in range(20))


CONNECT = """
import contextlib, os, socket
os.setuid(54321)
heard = b""
with socket.socket(socket.AF_UNIX) as stranger:
    stranger.settimeout(20)
    stranger.connect({path!r})
    with contextlib.suppress(ConnectionError):
        stranger.sendall({hello!r})
    with contextlib.suppress(ConnectionError):
        while data := stranger.recv(1000):
            heard += data
print(heard.hex())
"""


def test_a_stranger_is_not_let_in(place, bystander):
    """The daemon turns a stranger away even if the folder and the socket were opened to all by mistake."""
    if os.getuid() != 0:
        pytest.skip("needs root to become a stranger")
    place.root.chmod(0o755)
    place.socket.chmod(0o777)
    said = subprocess.run(
        [sys.executable, "-c", CONNECT.format(path=str(place.socket), hello=HELLO)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    ((_, heard),) = framing.FrameReader().feed(bytes.fromhex(said.stdout))
    assert heard == protocol.Refused("not permitted", "this daemon is not for other users (uid 54321)")
    assert heard.reason in (place.dir / "daemon.log").read_text()


def test_everything_is_for_its_user_alone(place, bystander):
    assert place.socket.stat().st_mode & 0o777 == 0o600
    for path in (place.dir, *place.dir.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
