"""Descriptors on their way to clients: the kernel counts them all for the daemon, and sends no more beyond a limit."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import socket
import struct
import termios
import time
from types import SimpleNamespace

import pytest
from support.conversation import Conversation, key_of, talking
from support.places import PATIENCE, digest, get_message, until

from xcache.wire import framing, protocol
from xcached.caller import Caller, Reply
from xcached.net import session
from xcached.net.sockets import is_unread
from xcached.net.turns import Account

LARGE = os.urandom(100_000)


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    there.settimeout(PATIENCE)
    with here, there:
        yield here, there


def sent(account: Account, here: socket.socket) -> None:
    beside_unread = is_unread(here)
    with open(os.devnull) as file:
        socket.send_fds(here, [b"x"], [file.fileno()])
    account.lend(here, 1, beside_unread=beside_unread)


def test_a_user_may_have_so_many_until_they_are_read(pair):
    here, there = pair
    account = Account(7)
    assert account.may_lend(2)
    sent(account, here)
    assert not account.may_lend(2)
    assert account.may_lend(1)
    sent(account, here)
    assert not account.may_lend(1)
    for _ in range(2):
        _, (descriptor,), _, _ = socket.recv_fds(there, 1, 1)
        os.close(descriptor)
    assert account.may_lend(2)


def test_those_in_answers_that_were_not_sent_count_too(pair):
    account = Account(7)
    account.note_unsent(100, 1)
    assert account.may_lend(1)
    assert not account.may_lend(2)
    account.note_unsent(100, 1)
    assert not account.may_lend(1)
    account.note_unsent(-200, -2)
    assert account.may_lend(2)
    assert account.unsent == 0


def test_those_that_were_read_do_not_count_beside_the_next(pair):
    here, there = pair
    account = Account(7)
    for _ in range(5):
        assert account.may_lend(1)
        sent(account, here)
        _, (descriptor,), _, _ = socket.recv_fds(there, 1, 1)
        os.close(descriptor)
    sent(account, here)
    assert account.may_lend(1)
    assert not account.may_lend(2)


def test_a_lone_user_may_have_as_many_descriptors_as_the_kernel_allows(pair):
    assert Account(7, is_one_of_several=False).may_lend(8)
    assert not Account(7, is_one_of_several=False).may_lend(9)


def test_a_connection_that_ends_counts_until_they_are_read(pair):
    here, there = pair
    account = Account(7)
    for _ in range(2):
        sent(account, here)
    account.close(here)
    account.close_what_was_read()
    assert (account.unclosed, account.is_idle, account.may_lend(1)) == (1, False, False)
    # The client sees the end of it behind what was sent.
    _, (descriptor,), _, _ = socket.recv_fds(there, 1, 1)
    os.close(descriptor)
    assert account.unclosed == 1
    there.close()
    account.close_what_was_read()
    assert (account.unclosed, account.is_idle, account.may_lend(2)) == (0, True, True)


def test_connections_that_have_ended_and_hold_some_are_still_a_users_connections(place):
    place.start_daemon(XCACHE_MAX_CONNECTIONS="3")
    with talking(place) as other:
        rude = Conversation(place)
        rude.greet()
        rude.raw(framing.encode(7, protocol.AskFiles(2)))
        # It has been answered, and is dropped for what it says then.
        assert until(lambda: other.status()["connections"] == 2)
        rude.raw(b"\xff" * 9)
        assert until(lambda: other.status()["connections"] == 1)
        with talking(place):
            answer = _welcomed(place)
            assert isinstance(answer, protocol.Refused) and answer.kind == "too many connections"
            rude.close()
            assert until(lambda: isinstance(_welcomed(place), protocol.Welcome))


def _welcomed(place) -> protocol.Message:
    with contextlib.closing(Conversation(place)) as talk:
        # One that is refused may have been hung up on before it says anything.
        with contextlib.suppress(BrokenPipeError):
            talk.say(protocol.Hello(protocol.VERSION, "test", os.getpid(), "test.py"))
        return talk.hear()[1]


def _arrived(connection: socket.socket) -> int:
    """Bytes that lie unread in a connection."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))[0]


def test_where_the_kernel_sends_no_more_the_answer_is_a_refusal(monkeypatch, tmp_path):
    def send_fds(*_: object) -> int:
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))

    monkeypatch.setattr(session.socket, "send_fds", send_fds)
    lent = os.open(os.devnull, os.O_RDONLY)
    hello = protocol.Hello(protocol.VERSION, "test", os.getpid(), "test.py")
    found = Reply(protocol.Found(digest(b"a"), 1, 1.0, None), (lent,))
    service = SimpleNamespace(
        welcome=lambda: protocol.Welcome(protocol.VERSION, "test", 1, "/test"), handle=lambda *_: found
    )
    server = SimpleNamespace(
        last_request=0.0,
        settings=SimpleNamespace(now=SimpleNamespace(max_requests=8)),
        turns=SimpleNamespace(
            serve_or_queue=lambda session: session.serve(time.monotonic() + 20), resume_waiting=lambda account: None
        ),
        forget=lambda session: None,
    )

    async def ask(here: socket.socket, there: socket.socket) -> list[tuple[int, protocol.Message]]:
        loop, account, reader, heard = asyncio.get_running_loop(), Account(7), framing.FrameReader(), []
        made = session.Session(here, Caller(os.getpid(), 7), account, server, service, loop)
        await loop.sock_sendall(there, framing.encode(1, hello) + framing.encode(2, get_message(key_of("a"))))
        while len(heard) < 2:
            heard += reader.feed(await loop.sock_recv(there, 65536))
        made.close()
        assert account.may_lend(1)
        return heard

    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.setblocking(False)
        (_, greeting), (_, answer) = asyncio.run(asyncio.wait_for(ask(here, there), PATIENCE))
    assert greeting == service.welcome()
    assert (type(answer), answer.kind) == (protocol.Refused, "too many descriptors")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(lent)


@pytest.mark.parametrize("ask", ["files", "entries"])
def test_a_client_that_reads_none_of_them_is_refused(place, ask):
    """Many more than the daemon may have open; another client of the same user waits for nothing."""
    place.start_daemon()
    pid = place.daemon_pid()
    soft = 50
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
    with talking(place) as polite, talking(place) as greedy:
        assert polite.put(key_of("a"), LARGE) == protocol.Stored(True)
        message = protocol.AskFiles(1) if ask == "files" else get_message(key_of("a"))
        requests = []
        for _ in range(60):
            before = _arrived(greedy.socket)
            requests.append(greedy.say(message))
            assert until(lambda before=before: _arrived(greedy.socket) > before)
        answers = list(greedy.answers(requests).values())
        refused = [answer for answer in answers if isinstance(answer, protocol.Refused)]
        assert 0 < len(refused) < 60
        assert {answer.kind for answer in refused} == {"too many descriptors"}
        assert polite.get(key_of("a")) == LARGE
        # The greedy client has read all descriptors sent to it.
        while greedy.descriptors:
            os.close(greedy.descriptors.pop())
        assert greedy.get(key_of("a")) == LARGE
