"""Reads from and closes sockets to which clients may have sent descriptors, although the daemon takes none.

Any operation on a descriptor that another user opened may block forever: read, ``fstat``, and even close (a FUSE file
system, a lingering socket). No signal ends such a wait, not even SIGKILL. So the daemon peeks before it reads, and
never receives a descriptor.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import select
import shutil
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections import Counter, defaultdict

from xcache.errors import ProtocolError

logger = logging.getLogger("xcached")

_READ_BYTES = 64 * 1024
# Reads that are enough to empty a connection: the kernel buffers less.
_MOST_READS = 1000
# Connections that one helper process closes, the seconds in which it usually ends, and between checks of others.
_CONNECTIONS_PER_PROCESS, _USUAL_CLOSE_SECONDS, _POLL_SECONDS = 100, 0.1, 1.0
# Hung helper processes of one user; beyond it, connections wait until they fill a process.
_MOST_HUNG_PROCESSES = 8


def read_from(connection: socket.socket) -> bytes:
    """Read what has arrived; raise ProtocolError, without reading, if a descriptor comes with it."""
    data, _, flags, _ = connection.recvmsg(_READ_BYTES, 0, socket.MSG_PEEK)
    if flags & socket.MSG_CTRUNC:
        raise ProtocolError("it sent a descriptor")
    # Read just what was peeked at, not data that came since.
    return connection.recv(len(data)) if data else data


def is_unread(connection: socket.socket) -> bool:
    """Return whether data was sent that the client has neither read nor discarded by closing."""
    try:
        return struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))) != (0,)
    except OSError:
        return False


def has_left(connection: socket.socket) -> bool:
    """Return whether the client has closed its end, so that it reads no answer; what it sent before may be unread."""
    waiting = select.poll()
    waiting.register(connection, 0)
    return bool(waiting.poll(0))


def close_connection(connection: socket.socket, uid: int | None) -> None:
    """Close a user's connection without blocking, even on unread descriptors in it whose close may never end."""
    with contextlib.suppress(OSError):
        # Stop new data first.
        connection.shutdown(socket.SHUT_RDWR)
    if _is_empty(connection):
        connection.close()
    else:
        _undertaker.take(connection, uid)


def _is_empty(connection: socket.socket) -> bool:
    """Read all that is left; return whether that was possible."""
    try:
        connection.setblocking(False)
        return any(not read_from(connection) for _ in range(_MOST_READS))
    except ProtocolError:
        return False
    except OSError:
        # It was never connected, or was reset.
        return True


class _Undertaker:
    """Closes connections by the exit of a helper process, so that a close that blocks delays only the helper.

    The daemon never does the last close itself: one that never ends would keep its lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: queue.SimpleQueue[tuple[socket.socket, int | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # By user; waiting connections are closed together.
        self._waiting: defaultdict[int | None, list[socket.socket]] = defaultdict(list)
        self._processes: list[tuple[int | None, subprocess.Popen[bytes]]] = []

    def take(self, connection: socket.socket, uid: int | None) -> None:
        """Queue a connection to be closed; never blocks."""
        self._taken.put((connection, uid))
        with self._lock, contextlib.suppress(RuntimeError):
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="xcached-undertaker", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            is_idle = not self._processes and not any(self._waiting.values())
            with contextlib.suppress(queue.Empty):
                taken = [self._taken.get(timeout=None if is_idle else _POLL_SECONDS)]
                while not self._taken.empty():
                    taken.append(self._taken.get())
                for connection, uid in taken:
                    self._waiting[uid].append(connection)
            self._processes = [(uid, process) for uid, process in self._processes if process.poll() is None]
            hung = Counter(uid for uid, _ in self._processes)
            for uid, waiting in list(self._waiting.items()):
                while len(waiting) >= _CONNECTIONS_PER_PROCESS or (waiting and hung[uid] < _MOST_HUNG_PROCESSES):
                    if not self._bury(waiting[:_CONNECTIONS_PER_PROCESS], uid):
                        break
                    del waiting[:_CONNECTIONS_PER_PROCESS]
                    hung[uid] += 1
                if not waiting:
                    del self._waiting[uid]

    def _bury(self, connections: list[socket.socket], uid: int | None) -> bool:
        """Close connections in a helper process; return False if none can be started now."""
        try:
            process = _waiting([connection.fileno() for connection in connections])
        except OSError as error:
            logger.warning("no process could be started to close connections: %s", error, extra={"uid": uid})
            return False
        for connection in connections:
            # The helper still holds it, so this is not the last close.
            connection.close()
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(_USUAL_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._processes.append((uid, process))
        return True


def _waiting(descriptors: list[int]) -> subprocess.Popen[bytes]:
    """Start a process that holds these descriptors and exits when its standard input is closed."""
    shell = shutil.which("sh", path=os.defpath)
    command = [shell, "-c", "read -r _"] if shell else [sys.executable, "-I", "-S", "-c", "open(0).read()"]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=descriptors,
        env={},
        cwd="/",
    )


_undertaker = _Undertaker()
