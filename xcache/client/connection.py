"""One connection to the daemon: send a message and get its answer, with a deadline for every wait."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import select
import socket
import sys
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, TypeVar

from xcache.clock import own_time, pause
from xcache.descriptors import identity, is_still
from xcache.errors import (
    ConnectionLostError,
    HungUpError,
    NoAnswerError,
    NobodyThereError,
    ProtocolError,
    RefusedError,
    TurnedAwayError,
)
from xcache.signals import reraise_if_the_programs
from xcache.wire import framing, protocol
from xcache.wire.ownership import check_directory, check_peer

Reply = TypeVar("Reply")
# Answers to other requests before the one that is waited for, and reads after the deadline: the answer may be there.
_MOST_STRAYS, _MOST_LATE_READS = 1000, 32
_ANCILLARY = socket.CMSG_SPACE(protocol.MAX_PREDICTED_FILES * array.array("i").itemsize)
# While the queue of the daemon's listening socket is full, the client tries again this often, for this long.
_CONNECT_RETRY_SECONDS, _CONNECT_SECONDS = 0.002, 1.0
# poll() takes milliseconds as a 32-bit integer.
_MAX_POLL_SECONDS = 1e6
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_STDERR = 2
# Writing to a daemon that has gone must not raise SIGPIPE, which ends a program by default.
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class Connection:
    """One connection to the daemon; only one thread may use it at a time."""

    def __init__(self, path: Path, timeout: float, version: str, trusted: Container[int] | None = None) -> None:
        """Connect, check that the daemon's uid is this user's, root's or in ``trusted``, and exchange greetings."""
        self._reader = framing.FrameReader()
        self._messages: list[tuple[int, protocol.Message]] = []
        self._descriptors: list[int] = []
        self._request = 0
        # Whether a lease was granted on it.
        self.has_lease = False
        deadline = own_time() + timeout
        try:
            check_directory(path.parent, trusted)
            self._socket = _stream()
            self._identity = identity(self.fileno())
        except FileNotFoundError as error:
            raise NobodyThereError(f"{path}: {error.strerror}") from None
        except OSError as error:
            raise ConnectionLostError(f"{path}: {error.strerror}") from None
        try:
            _connect(self._socket, path, deadline)
            self.path = path
            # If a service manager listens on the socket, the peer is the manager.
            self.listener = check_peer(self._socket, trusted)
            # Only poll() waits. A socket with a timeout makes two more system calls for each send and receive, and has
            # to get the GIL back after each.
            self._socket.setblocking(False)
            self._readable = select.poll()
            self._readable.register(self, select.POLLIN)
            hello = protocol.Hello(protocol.VERSION, version, os.getpid(), _program())
            self.welcome = self.demand(hello, protocol.Welcome, left(deadline))
        except RefusedError as error:
            self.close()
            raise TurnedAwayError(f"{path}: {error}") from None
        except (FileNotFoundError, ConnectionRefusedError) as error:
            self.close()
            reraise_if_the_programs(error)
            raise NobodyThereError(f"{path}: {error.strerror}") from None
        except OSError as error:
            self.close()
            reraise_if_the_programs(error)
            raise ConnectionLostError(f"{path}: {error.strerror or error or 'no answer in time'}") from None
        except BaseException:
            self.close()
            raise

    def ask(
        self,
        message: protocol.Message,
        timeout: float,
        waiting: Callable[[Any], float] | None = None,
        notice: type[Any] = protocol.Wait,
    ) -> protocol.Message:
        """Send a message and return its answer; raise RefusedError if the daemon refuses.

        With ``waiting``, messages of the type ``notice`` may precede the answer. For each, ``waiting`` returns the
        seconds that the next message may take.
        """
        deadline = own_time() + timeout
        self._request += 1
        self._drop_descriptors()
        try:
            # A daemon that has hung up may have sent its reason before.
            try:
                self._send(framing.encode(self._request, message), deadline)
            except (BrokenPipeError, ConnectionResetError) as error:
                reraise_if_the_programs(error)
            strays = 0
            while True:
                request, reply = self._receive(deadline)
                if request != self._request:
                    self._drop_descriptors()
                    strays += 1
                    if strays > _MOST_STRAYS:
                        raise ProtocolError("the daemon keeps answering what was not asked")
                    if strays > _MOST_LATE_READS:
                        left(deadline)
                elif waiting is not None and isinstance(reply, notice):
                    self._drop_descriptors()
                    timeout = waiting(reply)
                    deadline = own_time() + timeout
                else:
                    break
        except (OSError, EOFError) as error:
            reraise_if_the_programs(error)
            if isinstance(error, TimeoutError):
                raise NoAnswerError(timeout) from None
            if isinstance(error, ConnectionError | EOFError):
                raise HungUpError(f"the daemon hung up ({error})") from None
            raise ConnectionLostError(str(error.strerror or error)) from None
        if isinstance(reply, protocol.Refused):
            raise RefusedError(reply.kind, reply.reason)
        return reply

    def demand(self, message: protocol.Message, expected: type[Reply], timeout: float) -> Reply:
        """Send a message and return its answer; raise ProtocolError unless it is of the ``expected`` type."""
        reply = self.ask(message, timeout)
        if not isinstance(reply, expected):
            raise ProtocolError(f"the daemon answered {type(reply).__name__} instead of {expected.__name__}")
        return reply

    def tell(self, message: protocol.Message) -> None:
        """Send a message that has no answer; raise ConnectionLostError if the daemon does not take it at once."""
        self._request += 1
        try:
            self._send(framing.encode(self._request, message), own_time())
        except OSError as error:
            reraise_if_the_programs(error)
            raise ConnectionLostError(str(error.strerror or error)) from None

    def take_descriptor(self) -> int:
        """Return the next descriptor that came with the last answer."""
        if not self._descriptors:
            raise ProtocolError("no descriptor came with the answer")
        return self._descriptors.pop(0)

    def fileno(self) -> int:
        """Return the socket's descriptor, for select and poll."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection and the descriptors that came with it."""
        self._detach_if_closed()
        self._socket.close()
        self._drop_descriptors()

    def wait_for_end(self, timeout: float) -> bool:
        """Return whether the daemon closed the connection within ``timeout``; after Stop, that means it has ended."""
        deadline = own_time() + timeout
        try:
            while (rest := deadline - own_time()) > 0:
                self._socket.settimeout(rest)
                if not self._socket.recv(4096):
                    return True
        except OSError:
            pass
        return False

    def _detach_if_closed(self) -> bool:
        """Return whether the program has closed the socket; its number may be another file's, and is not closed."""
        descriptor = self.fileno()
        if descriptor >= 0 and is_still(descriptor, self._identity):
            return False
        self._socket.detach()
        return True

    def _check_own(self) -> None:
        if self._detach_if_closed():
            raise ConnectionAbortedError(errno.ECONNABORTED, "the program has closed the connection")

    def _drop_descriptors(self) -> None:
        # Ctrl-C must not leave a closed one in the list: its number may be a file of the program's next time.
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _send(self, frame: bytes, deadline: float) -> None:
        view = memoryview(frame)
        while view:
            self._check_own()
            try:
                view = view[self._socket.send(view, _NO_SIGNAL) :]
            except BlockingIOError as error:
                reraise_if_the_programs(error)
                writable = select.poll()
                writable.register(self, select.POLLOUT)
                _wait(writable, deadline)

    def _receive(self, deadline: float) -> tuple[int, protocol.Message]:
        late_reads = 0
        while not self._messages:
            self._check_own()
            _wait(self._readable, deadline)
            self._check_own()
            late_reads += own_time() >= deadline
            if late_reads > _MOST_LATE_READS:
                # It sends an answer so slowly that there is always a little of it.
                raise TimeoutError
            try:
                data, ancillary, _, _ = self._socket.recvmsg(64 * 1024, _ANCILLARY, _CLOSE_ON_EXEC)
            except BlockingIOError as error:
                reraise_if_the_programs(error)
                continue
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                    self._descriptors += numbers
                    if len(self._descriptors) > protocol.MAX_PREDICTED_FILES:
                        raise ProtocolError("the daemon sent more descriptors than an answer may have")
            if not data:
                raise EOFError("without an answer")
            self._messages += self._reader.feed(data)
        return self._messages.pop(0)


def _wait(ready: select.poll, deadline: float) -> None:
    """Wait until a socket can be read or written; raise TimeoutError at the deadline."""
    # A thread that gets no turn until the deadline finds its answer there all the same.
    while not ready.poll(max(0.0, min(deadline - own_time(), _MAX_POLL_SECONDS)) * 1000):
        left(deadline)


def left(deadline: float) -> float:
    """Return the seconds until ``deadline``, always above zero; raise TimeoutError when it has passed."""
    seconds = deadline - own_time()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _program() -> str:
    """Return this program's name, with what is not text replaced."""
    arguments = getattr(sys, "argv", None)
    name = Path(str(arguments[0])).name if arguments else ""
    return name.encode("utf-8", "replace").decode()[:200]


def _stream() -> socket.socket:
    """Return a socket above 2; were it stdout or stderr, the program's output would go to the daemon."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if made.fileno() > _STDERR:
        return made
    with made:
        return socket.socket(fileno=fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1))


def _connect(connecting: socket.socket, path: Path, deadline: float) -> None:
    """Connect; try again for a moment while the queue of the listening socket is full."""
    deadline = min(deadline, own_time() + _CONNECT_SECONDS)
    while True:
        connecting.settimeout(left(deadline))
        try:
            connecting.connect(os.fspath(path))
        except BlockingIOError:
            if own_time() + _CONNECT_RETRY_SECONDS >= deadline:
                raise
            pause(_CONNECT_RETRY_SECONDS)
        else:
            return
