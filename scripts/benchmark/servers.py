"""The servers that xcache's daemon is measured against: redis over a Unix socket, and a bare round trip over one."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

STARTED_WITHIN = 20.0

ECHO = """
import socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(sys.argv[1])
listener.listen()
answer = bytes(int(sys.argv[2]))
while True:
    connection, _ = listener.accept()
    while connection.recv(65536):
        connection.sendall(answer)
"""


class _Server:
    """A process that listens on a Unix socket."""

    def __init__(self, command: list[str], path: Path) -> None:
        self.path = path
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self.pid = self._process.pid
        deadline = time.monotonic() + STARTED_WITHIN
        while True:
            with contextlib.suppress(OSError):
                self.connect().close()
                return
            if time.monotonic() > deadline or self._process.poll() is not None:
                self.stop()
                raise RuntimeError(f"{command[0]} did not start")
            time.sleep(0.02)

    def connect(self) -> socket.socket:
        """Return a connection to the server."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(os.fspath(self.path))
        return connection

    def stop(self) -> None:
        """Kill the server."""
        self._process.kill()
        self._process.wait()
        self.path.unlink(missing_ok=True)


class Echo(_Server):
    """Answers each request with so many bytes, and does nothing else."""

    def __init__(self, folder: Path, size: int) -> None:
        path = folder / "echo.s"
        super().__init__([sys.executable, "-c", ECHO, str(path), str(size)], path)
        self._size = size

    def client(self) -> socket.socket:
        """Return a connection for ``round_trip``."""
        return self.connect()

    def round_trip(self, connection: socket.socket, request: bytes) -> None:
        """Send one request and read its answer."""
        connection.sendall(request)
        left = self._size
        while left:
            left -= len(connection.recv(65536))


class Redis(_Server):
    """redis-server: in memory alone, or one that syncs each write as xcache does."""

    def __init__(self, folder: Path, *, synced: bool) -> None:
        found = shutil.which("redis-server")
        if found is None:
            raise FileNotFoundError("redis-server")
        own = folder / ("redis-synced" if synced else "redis")
        own.mkdir()
        self._own = own
        path = own / "s"
        settings = {
            "port": "0",
            "unixsocket": str(path),
            "dir": str(own),
            "save": "",
            "appendonly": "yes" if synced else "no",
            "appendfsync": "always",
            "logfile": str(own / "log"),
        }
        super().__init__([found, *(word for name, value in settings.items() for word in (f"--{name}", value))], path)

    def stop(self) -> None:
        """Kill the server, and delete its files."""
        super().stop()
        shutil.rmtree(self._own)

    def client(self) -> RedisClient:
        """Return a connection that speaks its protocol."""
        return RedisClient(self.connect())


def get_frame(key: bytes) -> bytes:
    """Return the bytes that ask redis for a key."""
    return b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key)


def set_frame(key: bytes, value: bytes) -> bytes:
    """Return the bytes that make redis keep a value."""
    return b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (len(key), key, len(value), value)


class RedisClient:
    """GET and SET over one connection, with as little in between as Python allows."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def get(self, key: bytes) -> memoryview | None:
        """Return a value, or None."""
        self._socket.sendall(get_frame(key))
        head = self._socket.recv(65536)
        while b"\r\n" not in head:
            head += self._socket.recv(65536)
        line, _, rest = head.partition(b"\r\n")
        size = int(line[1:])
        if size < 0:
            return None
        whole = bytearray(size + 2)
        whole[: len(rest)] = rest
        view, at = memoryview(whole), len(rest)
        while at < len(whole):
            at += self._socket.recv_into(view[at:])
        return view[:size]

    def set(self, key: bytes, value: bytes) -> None:
        """Keep a value."""
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, len(value))
        # A second call is cheaper than a copy of a large value.
        if len(value) > 1 << 16:
            self._socket.sendall(head)
            self._socket.sendall(value)
            self._socket.sendall(b"\r\n")
        else:
            self._socket.sendall(head + value + b"\r\n")
        answer = self._socket.recv(65536)
        if answer != b"+OK\r\n":
            raise RuntimeError(f"redis said {answer[:100]!r}")

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
