"""A daemon behind a proxy that delays requests of chosen kinds, and keeps their order."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgpack

from support.peers import Talk, fake_daemon, relay
from xcache.wire import commands, protocol

_LENGTH = struct.Struct(">I")

ANSWERS = frozenset(
    kind.__name__
    for kind in (
        *(protocol.Welcome, protocol.Found, protocol.Missing, protocol.Wait, protocol.Prediction),
        *(protocol.Alias, protocol.NoAlias, protocol.NotCacheable, protocol.Files, protocol.Stored),
        *(protocol.Done, protocol.Refused, commands.Removed, commands.Pinned, commands.Entries, commands.Runs),
        *(commands.LedgerRows, commands.StoredProgram, commands.Collected, commands.Seen, protocol.Status),
        *(commands.RemotesChecked, commands.Objects, commands.ObjectsRemoved, commands.Pushed),
        *(commands.Presence, commands.WantedBefore, commands.Exported, commands.EntriesDescribed),
    )
)
# The command line sends these, and a person waits for the answer; a program pins only when an alias is wrong.
ADMINISTRATIVE = frozenset(kind.__name__ for kind in typing.get_args(commands.Message)) - ANSWERS
# All others, so that a new one is among them until somebody says otherwise.
OF_PROGRAMS = frozenset(kind.__name__ for kind in typing.get_args(protocol.Message)) - ANSWERS - ADMINISTRATIVE


class Delaying:
    """Counts the messages it delayed and those it saw, by name."""

    def __init__(self, daemon: Path, kinds: frozenset[str], seconds: float, breaks_at: str = "") -> None:
        """Delay these kinds; end the connection on which the first message named ``breaks_at`` comes."""
        self.held: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.over = threading.Event()
        self._daemon, self._kinds, self._seconds, self._breaks_at = daemon, kinds, seconds, breaks_at

    def behave(self, talk: Talk) -> None:
        """Pass everything on, in both directions."""
        frames = _Frames()

        def before(data: bytes) -> None:
            for name in frames.feed(data):
                self.seen[name] += 1
                if name == self._breaks_at and self.seen[name] == 1:
                    talk.socket.shutdown(socket.SHUT_RDWR)
                    raise ConnectionError
                if name in self._kinds:
                    self.held[name] += 1
                    self.over.wait(self._seconds)

        relay(talk.socket, self._daemon, before_request=before)


class _Frames:
    """Finds the names of the messages in a stream."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[str]:
        self._buffer += data
        names = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            names.append(str(msgpack.unpackb(self._buffer[_LENGTH.size : end])[1]))
            self._buffer = self._buffer[end:]
        return names


@contextlib.contextmanager
def delaying(
    path: Path, daemon: Path, kinds: frozenset[str], seconds: float, breaks_at: str = ""
) -> Iterator[Delaying]:
    """Run such a proxy for the length of the block."""
    made = Delaying(daemon, kinds, seconds, breaks_at)
    with fake_daemon(path, made.behave):
        try:
            yield made
        finally:
            made.over.set()
