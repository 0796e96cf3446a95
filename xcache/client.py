"""What a program asks of the daemon: get, put, and a few words about what it counted."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from time import sleep
from typing import Any, NamedTuple, TypeVar

from xcache import protocol
from xcache.clock import monotonic
from xcache.config import Config
from xcache.connection import Connection, left
from xcache.errors import (
    ConnectionLostError,
    DamagedError,
    HungUpError,
    NobodyThereError,
    NotAskedError,
    ProtocolError,
    RefusedError,
    StartingError,
    StoreError,
    UnavailableError,
    UncacheableError,
)
from xcache.launcher import Launcher
from xcache.payload import MAX_RAW_SIZE

Result = TypeVar("Result")

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_RETRY_EVERY = 0.01


class Entry(NamedTuple):
    """An executable as the daemon handed it over: sealed, and not yet checked."""

    digest: str
    compile_seconds: float
    sealed: bytes
    keep: bytes | mmap.mmap
    """The same bytes at little cost in memory, for as long as somebody may want them again."""


class Client:
    """Connections to one daemon, shared by all threads of a process.

    After a failure nothing is asked for a while (a second, then twice as long each time, a minute at most), so that a
    broken daemon costs a program one timeout and not one for each of its programs.
    """

    def __init__(self, config: Config, version: str, launcher: Launcher | None = None) -> None:
        """With a ``launcher``, a daemon is started where there is none."""
        self._config = config
        self._version = version
        self._launcher = launcher
        self._looking = launcher or Launcher(config)
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._pause = _FIRST_PAUSE
        self._silent_until = 0.0

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

        # An empty store is not worth waiting for: the program compiles while the daemon starts.
        return self._with_connection(get, wait_for_start=self._launcher is not None and self._launcher.has_entries())

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
        return self._with_connection(put, patience=(len(sealed) + len(program)) / 10e6)

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
        for connection in connections:
            connection.close()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connections, whatever its other threads were doing with them."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _with_connection(
        self,
        work: Callable[[Connection, float], Result],
        *,
        patience: float = 0.0,
        wait_for_start: bool = True,
    ) -> Result:
        if monotonic() < self._silent_until:
            raise NotAskedError("not asked again so soon after a failure")
        deadline = monotonic() + self._config.timeout
        try:
            result = self._try(work, deadline, patience, wait_for_start)
        except StartingError:
            raise
        except TimeoutError:
            self._back_off()
            raise ConnectionLostError(f"no answer within {self._config.timeout:g} s") from None
        except (UnavailableError, StoreError):
            self._back_off()
            raise
        self._pause = _FIRST_PAUSE
        return result

    def _back_off(self) -> None:
        self._silent_until = monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _try(
        self, work: Callable[[Connection, float], Result], deadline: float, patience: float, wait_for_start: bool
    ) -> Result:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._use(connection, work, left(deadline) + patience)
            except ConnectionLostError:
                # It went away between two requests: a daemon that was restarted, or left when idle.
                if monotonic() >= deadline:
                    raise
        return self._use(self._connect(deadline, wait_for_start), work, left(deadline) + patience)

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

    def _connect(self, deadline: float, wait_for_start: bool) -> Connection:
        """Connect, starting a daemon when there is none, or asking an older one to make room."""
        replaced = started = hung_up = False
        path = self._config.socket
        while True:
            try:
                connection = Connection(path, left(deadline), self._version)
            except HungUpError:
                # One that was leaving, or being killed, at that moment: the next one will be there soon.
                if hung_up:
                    raise
                hung_up = True
                sleep(min(_RETRY_EVERY, left(deadline)))
                continue
            except NobodyThereError as error:
                if self._launcher is None:
                    elsewhere = self._looking.address()
                    if elsewhere is None or elsewhere == path:
                        raise
                    path = elsewhere
                    continue
                # Again and again: one that is leaving holds the store a moment longer than its socket.
                started = started or self._launcher.start()
                # The daemon of this store may have been started where the socket is elsewhere: without XDG_RUNTIME_DIR
                # (cron, sudo), or with another temporary directory (batch jobs).
                path = (not started and self._launcher.address()) or self._config.socket
                if reason := self._launcher.failure():
                    raise UnavailableError(f"the daemon did not start: {reason}") from None
                if not wait_for_start:
                    raise StartingError(str(error)) from None
                sleep(min(_RETRY_EVERY, left(deadline)))
                continue
            theirs = connection.welcome.protocol
            if theirs == protocol.VERSION:
                return connection
            if theirs > protocol.VERSION or replaced or self._launcher is None:
                connection.close()
                raise ProtocolError(
                    f"the daemon speaks version {theirs} of the protocol, this program {protocol.VERSION}"
                )
            with contextlib.closing(connection):
                connection.demand(protocol.Stop("a newer xcache takes over"), protocol.Done, left(deadline))
                connection.wait_for_end(left(deadline))
            replaced = True


def _read_descriptor(descriptor: int, found: protocol.Found) -> Entry:
    """Read an entry handed over as a file; mapping it alone would make a truncated file a fatal signal."""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ProtocolError("what was handed over is not a file")
        if status.st_size != found.stored_size or not 0 < found.stored_size <= MAX_RAW_SIZE:
            raise DamagedError(f"its file has {status.st_size} bytes and not {found.stored_size}")
        sealed = b"".join(_chunks(descriptor, found.stored_size))
        return Entry(found.digest, found.compile_seconds, sealed, mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)


def _chunks(descriptor: int, size: int) -> Iterator[bytes]:
    at = 0
    while at < size and (chunk := os.pread(descriptor, size - at, at)):
        at += len(chunk)
        yield chunk


@contextlib.contextmanager
def _in_memory_file(content: bytes) -> Iterator[int]:
    """A descriptor of a file that has no name and holds ``content``."""
    if hasattr(os, "memfd_create"):
        file = open(os.memfd_create("xcache", os.MFD_CLOEXEC), "wb", buffering=0)  # noqa: SIM115
    else:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    with file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        yield file.fileno()
