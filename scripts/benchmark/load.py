"""A load of many clients on one Unix socket, the same for every server: each has one request under way, always.

``python load.py`` reads what to do from stdin and prints what it measured, both in JSON.
"""

from __future__ import annotations

import base64
import json
import select
import socket
import struct
import sys
import time
from typing import Any

# An answer of xcache begins with its length; ``complete`` knows the end of one of redis.
_LENGTH = struct.Struct(">I")


def complete(kind: str, buffer: bytearray) -> bool:
    """Return whether an answer has come in full."""
    if kind == "xcache":
        return len(buffer) >= 4 and len(buffer) >= 4 + _LENGTH.unpack_from(buffer)[0]
    if buffer[:1] == b"$" and buffer[1:2] != b"-":
        head, found, _ = buffer.partition(b"\r\n")
        return bool(found) and len(buffer) >= len(head) + 2 + int(head[1:]) + 2
    return buffer.endswith(b"\r\n")


def connect(path: str, kind: str, hello: bytes) -> socket.socket:
    """Return a connection that is ready for requests."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(30)
    connection.connect(path)
    if hello:
        connection.sendall(hello)
        buffer = bytearray()
        while not complete(kind, buffer):
            buffer += connection.recv(65536)
    return connection


def drive(path: str, kind: str, hello: bytes, frames: list[bytes], clients: int, seconds: float) -> dict[str, Any]:
    """Send frames, each client its next one when the answer has come, until time or frames are over."""
    # Frames of the kind "once" are sent once each; others go round and round.
    once, kind = kind.endswith(" once"), kind.removesuffix(" once")
    connections = {c.fileno(): c for c in (connect(path, kind, hello) for _ in range(clients))}
    buffers, sent = {number: bytearray() for number in connections}, dict.fromkeys(connections, 0.0)
    poll = select.epoll()
    for number in connections:
        poll.register(number, select.EPOLLIN)
    position, times = 0, []
    started = time.perf_counter()
    end = started + seconds
    for number, connection in connections.items():
        sent[number] = time.perf_counter()
        connection.sendall(frames[position % len(frames)])
        position += 1
    waiting, first_answer = len(connections), b""
    while waiting:
        for number, _ in poll.poll(30):
            buffer = buffers[number]
            buffer += connections[number].recv(262144)
            if not complete(kind, buffer):
                continue
            now = time.perf_counter()
            times.append(now - sent[number])
            first_answer = first_answer or bytes(buffer[:60])
            buffer.clear()
            if now < end and not (once and position >= len(frames)):
                sent[number] = now
                connections[number].sendall(frames[position % len(frames)])
                position += 1
            else:
                waiting -= 1
    took = time.perf_counter() - started
    times.sort()
    return {
        "rate": len(times) / took,
        "median": times[len(times) // 2],
        "quartiles": [times[len(times) // 4], times[3 * len(times) // 4]],
        "count": len(times),
        "first answer": first_answer.decode("latin-1"),
    }


def main() -> None:
    """Run the load that stdin describes."""
    task = json.load(sys.stdin)
    frames = [base64.b64decode(frame) for frame in task["frames"]]
    hello = base64.b64decode(task["hello"])
    print(json.dumps(drive(task["socket"], task["kind"], hello, frames, task["clients"], task["seconds"])))


if __name__ == "__main__":
    main()
