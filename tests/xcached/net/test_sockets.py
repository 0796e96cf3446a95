"""Descriptors that clients send although the daemon takes none: nothing of theirs is read, waited for, or kept."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conversation import Conversation, key_of, talking
from support.fuse import FLUSH, SilentFile
from support.places import put_message, until

from xcache.wire import commands, framing, protocol
from xcached.net import sockets
from xcached.net.sockets import close_connection
from xcached.store import memory_files

LARGE = b"x" * 100_000


@contextlib.contextmanager
def lingering(count: int) -> Iterator[list[int]]:
    """Yield sockets whose last close waits for an hour, because their peers read nothing."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            sender = socket.create_connection(listener.getsockname())
            stack.enter_context(listener.accept()[0])
            sender.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.send(bytes(65536))
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
            made.append(sender.detach())
        yield made


@contextlib.contextmanager
def silent(place) -> Iterator[tuple[SilentFile, int]]:
    """Yield a file of a file system that never answers, and a descriptor of it."""
    folder = place.root / "mounted"
    folder.mkdir()
    try:
        file = SilentFile(folder, len(LARGE))
    except OSError as error:
        pytest.skip(str(error))
    descriptor = os.open(file.path, os.O_RDONLY)
    try:
        yield file, descriptor
    finally:
        file.close()
        with contextlib.suppress(OSError):
            os.close(descriptor)


def open_in(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def threads_of(pid: int) -> list[str]:
    return [(path / "comm").read_text().strip() for path in Path(f"/proc/{pid}/task").iterdir()]


def hand_over(place, connection: socket.socket, before: bytes, count: int) -> None:
    """Send sockets, and close them here while the daemon is stopped, so that it is their last owner."""
    pid = place.daemon_pid()
    with lingering(count) as sockets:
        os.kill(pid, signal.SIGSTOP)
        try:
            if before:
                connection.sendall(before)
            socket.send_fds(connection, [b"\0"], sockets)
            for each in sockets:
                os.close(each)
        finally:
            os.kill(pid, signal.SIGCONT)
        with contextlib.closing(Conversation(place)) as other:
            # The daemon still serves others meanwhile.
            other.greet()
            assert other.put(key_of("b"), LARGE) == protocol.Stored(True)
            other.ask(commands.Clear())


CASES = {
    "one": (b"", 1),
    "many": (b"", 200),
    "behind what ends the connection": (b"\xff" * 9, 1),
}


@pytest.mark.parametrize(("before", "count"), CASES.values(), ids=list(CASES))
def test_sockets_that_linger_stop_nothing(place, before, count):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    place.start_daemon()
    pid = place.daemon_pid()
    with contextlib.closing(Conversation(place)) as talk:
        talk.greet()
        open_before = open_in(pid)
        hand_over(place, talk.socket, before, count)
        assert talk.was_hung_up_on()
    # No thread of the daemon waits for them, and it has none of them open.
    assert until(lambda: open_in(pid) < open_before + 3)
    assert "xcached-closer" not in threads_of(pid)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_sockets_that_linger_in_a_connection_that_is_refused_stop_nothing(place):
    place.start_daemon(XCACHE_MAX_CONNECTIONS="2")
    with talking(place) as one, talking(place) as two:
        pid = place.daemon_pid()
        with lingering(1) as sockets:
            os.kill(pid, signal.SIGSTOP)
            with contextlib.closing(place.connect()) as third:
                socket.send_fds(third, [b"\0"], sockets)
                os.close(sockets[0])
                os.kill(pid, signal.SIGCONT)
                for talk in (one, two):
                    assert talk.status()["pid"] == pid


def test_a_connection_that_holds_connections_is_closed_with_all_of_them():
    with lingering(1) as sockets:
        here, there = socket.socketpair()
        socket.send_fds(here, [b"\0"], sockets)
        os.close(sockets[0])
        near, far = socket.socketpair()
        socket.send_fds(near, [b"\0"], [there.fileno()])
        there.close()
        close_connection(far, None)
        here.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert here.recv(1) == b""
        here.close()
        near.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
def test_files_that_never_answer_are_never_received(place):
    """More of them than a daemon could spare threads or descriptors for."""
    daemon = place.start_daemon()
    with silent(place) as (file, descriptor), talking(place) as other:
        before = open_in(other.pid)
        for _ in range(40):
            talk = Conversation(place)
            talk.greet()
            talk.raw(b"\0", [descriptor] * 20)
            assert talk.was_hung_up_on()
            talk.close()
        with contextlib.closing(place.connect()) as connection:
            # Beside the very first bytes, and a message that would be a good one.
            socket.send_fds(connection, [b"\0"], [descriptor])
        message = put_message(key_of("a"), LARGE, b"p", payload=None)
        with talking(place) as talk:
            talk.raw(framing.encode(9, message), [descriptor])
            assert talk.was_hung_up_on()
        assert other.put(key_of("b"), LARGE) == protocol.Stored(True)
        assert until(lambda: open_in(other.pid) <= before)
        assert FLUSH not in file.asked
        # The daemon can end, too, and leave its lock to the next one: it never received these files.
        daemon.kill()
        daemon.wait(20)
    place.start_daemon()
    assert place.answers()


def test_the_daemon_closes_none_itself_where_it_can_start_no_process(monkeypatch):
    """It keeps the sockets and tries again: a close that never ends would keep the daemon and its lock for ever."""
    here, there = socket.socketpair()
    tried, start = [], subprocess.Popen

    def starting(*arguments: object, pass_fds: list[int], **options: object) -> subprocess.Popen[bytes]:
        tried.append(list(pass_fds))
        if len(tried) == 1:
            raise BlockingIOError
        return start(*arguments, pass_fds=pass_fds, **options)

    monkeypatch.setattr(subprocess, "Popen", starting)
    monkeypatch.setattr(sockets, "_POLL_SECONDS", 0.01)
    number = there.fileno()
    sockets._Undertaker().take(there, 7)
    assert until(lambda: there.fileno() < 0)
    assert tried == [[number], [number]]
    here.settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        assert here.recv(1) == b""
    here.close()


def test_connections_of_one_user_wait_while_many_of_their_processes_have_not_ended(monkeypatch):
    pairs = [socket.socketpair() for _ in range(4)]
    released, started, processes = os.pipe(), [], []

    def waiting(numbers: list[int]) -> subprocess.Popen[bytes]:
        started.append(list(numbers))
        processes.append(subprocess.Popen(["cat"], stdin=released[0], pass_fds=numbers))
        return processes[-1]

    monkeypatch.setattr(sockets, "_waiting", waiting)
    for name, value in (("_MOST_HUNG_PROCESSES", 1), ("_CONNECTIONS_PER_PROCESS", 2), ("_POLL_SECONDS", 0.01)):
        monkeypatch.setattr(sockets, name, value)
    numbers = [there.fileno() for _, there in pairs]
    undertaker = sockets._Undertaker()
    undertaker.take(pairs[0][1], 7)
    assert until(lambda: len(started) == 1)
    undertaker.take(pairs[1][1], 7)
    # Another user's connection does not wait for that.
    undertaker.take(pairs[2][1], 8)
    assert until(lambda: len(started) == 2)
    # As many as one process closes do not wait, either.
    undertaker.take(pairs[3][1], 7)
    assert until(lambda: len(started) == 3)
    assert started == [[numbers[0]], [numbers[2]], [numbers[1], numbers[3]]]
    for end in released:
        os.close(end)
    # Each is waited for: none stays a zombie.
    assert until(lambda: [process.returncode for process in processes] == [0] * 3)
    for here, _ in pairs:
        here.close()


def test_a_file_that_holds_more_than_its_size_is_not_closed_on_the_serving_thread(monkeypatch):
    closed, close = {}, os.close

    def closing(file: int) -> None:
        closed[file] = threading.current_thread().name
        close(file)

    monkeypatch.setattr(os, "close", closing)
    files = [memory_files.memory_file() for _ in range(2)]
    # 1 is FALLOC_FL_KEEP_SIZE.
    assert ctypes.CDLL(None, use_errno=True).fallocate(files[0], 1, ctypes.c_long(0), ctypes.c_long(4 << 20)) == 0
    assert os.fstat(files[0]).st_size == 0
    memory_files.close_files(files)
    assert until(lambda: files[0] in closed)
    here = threading.current_thread().name
    assert [closed[file] == here for file in files] == [False, True]
