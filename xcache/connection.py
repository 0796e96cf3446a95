"""One connection to the daemon: send a message, get its answer, and no wait without a bound."""

from __future__ import annotations

import array
import os
import select
import socket
import sys
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import TypeVar

from xcache import framing, protocol
from xcache.clock import own_time
from xcache.errors import (
    ConnectionLostError,
    HungUpError,
    NobodyThereError,
    ProtocolError,
    RefusedError,
    TurnedAwayError,
)
from xcache.handlers import let_pass
from xcache.private import check_directory, check_peer

Reply = TypeVar("Reply")

_ANCILLARY = socket.CMSG_SPACE(protocol.MAX_PREDICTED_FILES * array.array("i").itemsize)
_LONGEST_POLL = 1e6
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Connection:
    """One connection to the daemon; not for two threads at once."""

    def __init__(self, path: Path, timeout: float, version: str, trusted: Container[int] | None = None) -> None:
        """Connect, make sure the daemon is this user's own, root's, or of another uid that is trusted; say hello."""
        self._reader = framing.FrameReader()
        self._messages: list[tuple[int, protocol.Message]] = []
        self._descriptors: list[int] = []
        self._request = 0
        try:
            check_directory(path.parent, trusted)
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except FileNotFoundError as error:
            raise NobodyThereError(f"{path}: {error.strerror}") from None
        except OSError as error:
            raise ConnectionLostError(f"{path}: {error.strerror}") from None
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(os.fspath(path))
            check_peer(self._socket, trusted)
            # Waiting is done by poll() alone: with a timeout of its own a socket makes two more calls to the kernel for
            # each send and receive, and as often the GIL has to be had back.
            self._socket.setblocking(False)
            self._readable = select.poll()
            self._readable.register(self._socket, select.POLLIN)
            hello = protocol.Hello(protocol.VERSION, version, os.getpid(), _program())
            self.welcome = self.demand(hello, protocol.Welcome, timeout)
        except RefusedError as error:
            self.close()
            raise TurnedAwayError(f"{path}: {error}") from None
        except (FileNotFoundError, ConnectionRefusedError) as error:
            self.close()
            let_pass(error)
            raise NobodyThereError(f"{path}: {error.strerror}") from None
        except OSError as error:
            self.close()
            let_pass(error)
            raise ConnectionLostError(f"{path}: {error.strerror or error}") from None
        except BaseException:
            self.close()
            raise

    def ask(
        self,
        message: protocol.Message,
        timeout: float,
        descriptors: Sequence[int] = (),
        waiting: Callable[[protocol.Wait], float] | None = None,
    ) -> protocol.Message:
        """Send a message and return its answer; RefusedError when the daemon says no.

        With ``waiting``, the answer may be preceded by words of it; for each, ``waiting`` says how much longer the
        next may take.
        """
        deadline = own_time() + timeout
        self._request += 1
        self._drop_descriptors()
        try:
            # Who hangs up on us may have said why.
            try:
                self._send(framing.encode(self._request, message), descriptors, deadline)
            except (BrokenPipeError, ConnectionResetError) as error:
                let_pass(error)
            while True:
                request, reply = self._receive(deadline)
                if request != self._request:
                    self._drop_descriptors()
                elif waiting is not None and isinstance(reply, protocol.Wait):
                    timeout = waiting(reply)
                    deadline = own_time() + timeout
                else:
                    break
        except (OSError, EOFError) as error:
            let_pass(error)
            if isinstance(error, TimeoutError):
                raise ConnectionLostError(f"no answer within {timeout:g} s") from None
            if isinstance(error, ConnectionError | EOFError):
                raise HungUpError(f"the daemon hung up ({error})") from None
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

    def tell(self, message: protocol.Message, timeout: float) -> None:
        """Send a message that has no answer."""
        self._request += 1
        try:
            self._send(framing.encode(self._request, message), (), own_time() + timeout)
        except OSError as error:
            let_pass(error)
            raise ConnectionLostError(str(error.strerror or error)) from None

    def take_descriptor(self) -> int:
        """The descriptor that came beside the last answer."""
        if not self._descriptors:
            raise ProtocolError("no descriptor came with the answer")
        return self._descriptors.pop(0)

    def close(self) -> None:
        """Drop the connection and whatever came with it."""
        self._socket.close()
        self._drop_descriptors()

    def wait_for_end(self, timeout: float) -> bool:
        """Whether the daemon closed the connection within ``timeout``: after Stop, that it has left."""
        self._socket.settimeout(timeout)
        try:
            while self._socket.recv(4096):
                pass
        except OSError:
            return False
        return True

    def _drop_descriptors(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _send(self, frame: bytes, descriptors: Sequence[int], deadline: float) -> None:
        view = memoryview(frame)
        while view:
            try:
                if descriptors:
                    sent = socket.send_fds(self._socket, [view], list(descriptors))
                else:
                    sent = self._socket.send(view)
            except BlockingIOError as error:
                let_pass(error)
                writable = select.poll()
                writable.register(self._socket, select.POLLOUT)
                _wait(writable, deadline)
                continue
            view, descriptors = view[sent:], ()

    def _receive(self, deadline: float) -> tuple[int, protocol.Message]:
        while not self._messages:
            _wait(self._readable, deadline)
            try:
                data, ancillary, _, _ = self._socket.recvmsg(64 * 1024, _ANCILLARY, _CLOSE_ON_EXEC)
            except BlockingIOError as error:
                let_pass(error)
                continue
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                    self._descriptors += numbers
            if not data:
                raise EOFError("without an answer")
            self._messages += self._reader.feed(data)
        return self._messages.pop(0)


def _wait(ready: select.poll, deadline: float) -> None:
    """Wait until a socket can be read or written; TimeoutError where that takes too long."""
    # poll() counts in milliseconds of 32 bits.
    while not ready.poll(min(left(deadline), _LONGEST_POLL) * 1000):
        pass


def left(deadline: float) -> float:
    """Seconds until ``deadline``, never so few that they would mean forever or not at all."""
    seconds = deadline - own_time()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _program() -> str:
    """What this program is called, as far as text can say it."""
    name = Path(sys.argv[0]).name if sys.argv else ""
    return name.encode("utf-8", "replace").decode()[:200]
