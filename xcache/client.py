"""A blocking client: one request, one answer, and no wait without a bound."""

from __future__ import annotations

import array
import contextlib
import logging
import mmap
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from xcache import protocol
from xcache.config import Config
from xcache.errors import ConnectionLostError, ProtocolError, RefusedError, UnavailableError, UncacheableError
from xcache.private import check_directory, check_peer

logger = logging.getLogger("xcache")
Reply = TypeVar("Reply")
Result = TypeVar("Result")

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_RETRY_EVERY = 0.01
_ANCILLARY = socket.CMSG_SPACE(protocol.MAX_DESCRIPTORS * array.array("i").itemsize)
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Entry(NamedTuple):
    """An executable as the daemon handed it over: sealed, and not yet checked."""

    digest: str
    compile_seconds: float
    sealed: bytes
    keep: bytes | mmap.mmap
    """The same bytes at little cost in memory, for as long as somebody may want them again."""


class Connection:
    """One connection to the daemon; not for two threads at once."""

    def __init__(self, path: Path, timeout: float, version: str) -> None:
        """Connect, make sure the daemon is this user's own (or root's), and say hello."""
        self._reader = protocol.FrameReader()
        self._messages: list[tuple[int, protocol.Message]] = []
        self._descriptors: list[int] = []
        self._request = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            check_directory(path.parent)
            self._socket.settimeout(timeout)
            self._socket.connect(os.fspath(path))
            check_peer(self._socket)
            program = Path(sys.argv[0] if sys.argv else "").name[:200]
            hello = protocol.Hello(protocol.VERSION, version, os.getpid(), program)
            self.welcome = self.demand(hello, protocol.Welcome, timeout)
        except OSError as error:
            self.close()
            raise ConnectionLostError(f"{path}: {error.strerror or error}") from None
        except BaseException:
            self.close()
            raise

    def ask(self, message: protocol.Message, timeout: float, descriptors: Sequence[int] = ()) -> protocol.Message:
        """Send a message and return its answer; RefusedError when the daemon says no."""
        deadline = time.monotonic() + timeout
        self._request += 1
        try:
            self._send(protocol.encode(self._request, message), descriptors, deadline)
            while True:
                request, reply = self._receive(deadline)
                if request == self._request:
                    break
        except TimeoutError:
            raise ConnectionLostError(f"no answer within {timeout:g} s") from None
        except OSError as error:
            raise ConnectionLostError(str(error.strerror or error)) from None
        if isinstance(reply, protocol.Refused):
            raise RefusedError(reply.kind, reply.reason)
        return reply

    def demand(
        self, message: protocol.Message, expected: type[Reply], timeout: float, descriptors: Sequence[int] = ()
    ) -> Reply:
        """Send a message to which there is only one right kind of answer."""
        reply = self.ask(message, timeout, descriptors)
        if not isinstance(reply, expected):
            raise ProtocolError(f"a {type(reply).__name__} came where a {expected.__name__} was due")
        return reply

    def take_descriptor(self) -> int:
        """The descriptor that came beside the last answer."""
        if not self._descriptors:
            raise ProtocolError("no descriptor came with the answer")
        return self._descriptors.pop(0)

    def close(self) -> None:
        """Drop the connection and whatever came with it."""
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def wait_for_end(self, timeout: float) -> bool:
        """Whether the daemon closed the connection within ``timeout``: after Stop, that it has left."""
        self._socket.settimeout(timeout)
        try:
            while self._socket.recv(4096):
                pass
        except OSError:
            return False
        return True

    def _send(self, frame: bytes, descriptors: Sequence[int], deadline: float) -> None:
        view = memoryview(frame)
        self._socket.settimeout(_left(deadline))
        if descriptors:
            view = view[socket.send_fds(self._socket, [view], list(descriptors)) :]
        while view:
            self._socket.settimeout(_left(deadline))
            view = view[self._socket.send(view) :]

    def _receive(self, deadline: float) -> tuple[int, protocol.Message]:
        while not self._messages:
            self._socket.settimeout(_left(deadline))
            data, ancillary, _, _ = self._socket.recvmsg(64 * 1024, _ANCILLARY, _CLOSE_ON_EXEC)
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                    self._descriptors += numbers
            if not data:
                raise ConnectionLostError("the daemon closed the connection")
            self._messages += self._reader.feed(data)
        return self._messages.pop(0)


class Client:
    """Connections to one daemon, shared by all threads of a process.

    After a failure nothing is asked for a while (a second, then twice as long each time, a minute at most), so that a
    broken daemon costs a program one timeout and not one for each of its programs.
    """

    def __init__(self, config: Config, version: str, start_daemon: Callable[[], bool] | None = None) -> None:
        """``start_daemon`` sees to it that one is on its way and says whether it is worth waiting for."""
        self._config = config
        self._version = version
        self._start_daemon = start_daemon
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._pause = _FIRST_PAUSE
        self._silent_until = 0.0
        self._process = os.getpid()

    def get(self, key: str) -> Entry | None:
        """The entry under ``key``, not yet checked, or None; UncacheableError where there can be none."""

        def get(connection: Connection, timeout: float) -> Entry | None:
            found = connection.ask(protocol.Get(key), timeout)
            if isinstance(found, protocol.Missing):
                return None
            if isinstance(found, protocol.NotCacheable):
                raise UncacheableError(found.reason)
            if not isinstance(found, protocol.Found):
                raise ProtocolError(f"a {type(found).__name__} came where a Found was due")
            if found.payload is not None:
                return Entry(found.digest, found.compile_seconds, found.payload, found.payload)
            return _read_descriptor(connection.take_descriptor(), found)

        return self._with_connection(get)

    def put(self, message: protocol.Put, sealed: bytes, program: bytes) -> bool:
        """Hand over an executable and its program; whether it was kept (and not there already)."""

        def put(connection: Connection, timeout: float) -> bool:
            with contextlib.ExitStack() as stack:
                descriptors = []
                inline: dict[str, Any] = {}
                for field, content in (("payload", sealed), ("program", program)):
                    inline[field] = content if len(content) <= protocol.INLINE_LIMIT else None
                    if inline[field] is None:
                        descriptors.append(stack.enter_context(_in_memory_file(content)))
                return connection.demand(message._replace(**inline), protocol.Stored, timeout, descriptors).kept

        # The daemon has to write and sync it: that takes longer than an answer, in proportion to the size.
        return self._with_connection(put, patience=len(sealed) / 10e6)

    def mark_not_cacheable(self, key: str, module_name: str, reason: str) -> None:
        """Have it remembered that what ``key`` compiles to cannot be stored."""
        message = protocol.MarkNotCacheable(key, module_name, reason)
        self._with_connection(lambda c, timeout: c.demand(message, protocol.Done, timeout))

    def report(self, counts: dict[str, float]) -> None:
        """Add to the daemon's statistics."""
        self._with_connection(lambda c, timeout: c.demand(protocol.Report(counts), protocol.Done, timeout))

    def close(self) -> None:
        """Close what is open; the client can be used again."""
        with self._lock:
            connections, self._idle = self._idle, []
        if os.getpid() == self._process:
            for connection in connections:
                connection.close()

    def forget_after_fork(self) -> None:
        """In a forked child: leave the parent's connections alone and begin with none."""
        self.__init__(self._config, self._version, self._start_daemon)  # type: ignore[misc]

    def _with_connection(self, work: Callable[[Connection, float], Result], patience: float = 0.0) -> Result:
        if time.monotonic() < self._silent_until:
            raise UnavailableError("not asked again so soon after a failure")
        deadline = time.monotonic() + self._config.timeout
        try:
            result = self._try(work, deadline, patience)
        except TimeoutError:
            self._back_off()
            raise ConnectionLostError(f"no answer within {self._config.timeout:g} s") from None
        except UnavailableError:
            self._back_off()
            raise
        self._pause = _FIRST_PAUSE
        return result

    def _back_off(self) -> None:
        self._silent_until = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _try(self, work: Callable[[Connection, float], Result], deadline: float, patience: float) -> Result:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._use(connection, work, _left(deadline) + patience)
            except ConnectionLostError:
                # It went away between two requests: a daemon that was restarted, or left when idle.
                if time.monotonic() >= deadline:
                    raise
        return self._use(self._connect(deadline), work, _left(deadline) + patience)

    def _use(self, connection: Connection, work: Callable[[Connection, float], Result], timeout: float) -> Result:
        try:
            result = work(connection, timeout)
        except (RefusedError, UncacheableError):
            self._put_back(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._put_back(connection)
        return result

    def _put_back(self, connection: Connection) -> None:
        with self._lock:
            self._idle.append(connection)

    def _connect(self, deadline: float) -> Connection:
        """Connect, starting a daemon when there is none, or asking an older one to make room."""
        replaced = False
        may_wait: bool | None = None
        while True:
            try:
                connection = Connection(self._config.socket, _left(deadline), self._version)
            except ConnectionLostError:
                if may_wait is None:
                    may_wait = self._start_daemon() if self._start_daemon else False
                if not may_wait or time.monotonic() + _RETRY_EVERY >= deadline:
                    raise
                time.sleep(_RETRY_EVERY)
                continue
            theirs = connection.welcome.protocol
            if theirs == protocol.VERSION:
                return connection
            if theirs > protocol.VERSION or replaced or self._start_daemon is None:
                connection.close()
                raise ProtocolError(f"the daemon speaks version {theirs} of the protocol, this program {protocol.VERSION}")
            connection.demand(protocol.Stop("a newer xcache takes over"), protocol.Done, _left(deadline))
            connection.wait_for_end(_left(deadline))
            connection.close()
            replaced = True


def _read_descriptor(descriptor: int, found: protocol.Found) -> Entry:
    """Read an entry handed over as a file; mapping it alone would make a truncated file a fatal signal."""
    with open(descriptor, "rb", buffering=0) as file:
        size = os.fstat(descriptor).st_size
        sealed = file.read(size) or b""
        keep = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if size else b""
    return Entry(found.digest, found.compile_seconds, sealed, keep)


@contextlib.contextmanager
def _in_memory_file(content: bytes) -> Iterator[int]:
    """A descriptor of a file that has no name and holds ``content``."""
    if hasattr(os, "memfd_create"):
        file = open(os.memfd_create("xcache", os.MFD_CLOEXEC), "wb", buffering=0)  # noqa: SIM115
    else:
        file = tempfile.TemporaryFile(buffering=0)  # type: ignore[assignment]  # noqa: SIM115
    with file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        yield file.fileno()


def _left(deadline: float) -> float:
    """Seconds until ``deadline``, never so few that a socket would mean forever or not at all."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
