"""A hostile user: floods of one kind until stdin ends. Run as a script, under that user's account.

It sends valid and invalid messages, in any order and number, on as many connections as it gets.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from support.conversation import Conversation, key_of
from support.places import Place, digest, get_message, put_message
from xcache.wire import commands, framing, protocol
from xcache.wire.seals import sealed

_THREADS = 4
_CONNECTIONS = 250
_ITEM = {"options": "o", "devices": "d" * 200, "platform": "cpu", "seconds": 0.1}
_COMPONENTS = {name: digest(name.encode()) for name in ("program", *protocol.DESCRIBED_COMPONENTS)}


class Hostile:
    """Floods by name; several threads and processes call each again and again."""

    def __init__(self, place: Place, seed: str, victims: list[str]) -> None:
        self._place = place
        self._choose = random.Random(seed)
        self._victims = victims
        self._count = 0
        self.floods: dict[str, Callable[[], None]] = {
            "gets on every connection": self.gets,
            "gets whose answers nobody reads": self.unread,
            "descriptors that nobody takes": self.untaken,
            "predictions": self.predictions,
            "histories": self.histories,
            "small puts": self.small_puts,
            "large puts that are not what they say": self.false_puts,
            "leases": self.leases,
            "waits": self.waits,
            "toolchains": self.toolchains,
            "half messages": self.half_messages,
            "garbage": self.garbage,
            "connections": self.connections,
            "connections that say something": self.saying_connections,
            "another's keys": self.another_users_keys,
            "clearing": self.clearing,
            "loads and ends": self.loads,
            "anything": self.anything,
        }

    def gets(self) -> None:
        """Send many small requests at once, on as many connections as there are."""
        with self._many(_CONNECTIONS // _THREADS) as talks:
            frames = b"".join(framing.encode(n, get_message(key_of(str(n)))) for n in range(2, 300))
            self._say_all(talks, frames * 4)
            self._hear_some(talks)

    def unread(self) -> None:
        """Ask, and read no answer."""
        with self._many(_CONNECTIONS // _THREADS) as talks:
            key = self._own_entry()
            self._say_all(talks, b"".join(framing.encode(n, get_message(key)) for n in range(2, 200)))
            time.sleep(1.0)

    def untaken(self) -> None:
        """Leave files of the daemon, and of large entries, unread in connections."""
        with self._many(_CONNECTIONS // _THREADS) as talks:
            get = get_message(self._own_entry(100_000))
            asked = [protocol.AskFiles(2) if n % 2 else get for n in range(2, 600)]
            self._say_all(talks, b"".join(framing.encode(n, each) for n, each in enumerate(asked, 2)))
            time.sleep(1.0)

    def predictions(self) -> None:
        """Store long histories, and ask for predictions again and again."""
        with self._many(8) as talks:
            remember = protocol.Remember("p", str(self._choose.random()), self._items(800), {"o": b"o"})
            self._say_all(talks[:2], framing.encode(2, remember))
            predict = framing.encode(3, protocol.Predict("p" * 6000, "a" * 1000))
            known = framing.encode(4, protocol.Predict("p", ""))
            self._say_all(talks, (predict + known) * 50)
            self._hear_some(talks)

    def histories(self) -> None:
        """Store more histories than any program does."""
        with self._many(16) as talks:
            frames = [
                framing.encode(
                    n, protocol.Remember(f"p {n}", str(self._choose.random()), self._items(400), {"o": b"o"})
                )
                for n in range(2, 8)
            ]
            self._say_all(talks, b"".join(frames) * 10)
            self._hear_some(talks)

    def small_puts(self) -> None:
        """Put sixty-four entries at a time on each of thirty connections."""
        with self._many(30) as talks:
            for talk in talks:
                frames = [
                    framing.encode(n, put_message(self._fresh(), os.urandom(30_000), os.urandom(30_000)))
                    for n in range(2, 20)
                ]
                self._say_all([talk], b"".join(frames))
            self._hear_some(talks)

    def false_puts(self) -> None:
        """Put sparse files of gigabytes, which cost their sender nothing."""
        with self._many(8) as talks:
            for talk in talks:
                talk.socket.setblocking(True)
                (file,) = talk.files(1)
                with file:
                    file.truncate(1 << 30)
                    fcntl.fcntl(file, fcntl.F_ADD_SEALS, 0xF)
                message = put_message(self._fresh(), b"", b"p", digest=digest(b"no"), stored_size=1 << 30)
                talk.raw(framing.encode(2, message._replace(payload=None)))
            self._hear_some(talks)

    def leases(self) -> None:
        """Take leases without compiling."""
        with self._many(40) as talks:
            for talk in talks:
                frames = [framing.encode(n, get_message(self._fresh(), 600.0)) for n in range(2, 400)]
                self._say_all([talk], b"".join(frames))
            self._hear_some(talks)

    def waits(self) -> None:
        """Wait for a holder that does nothing."""
        with self._many(60) as talks:
            frames = [framing.encode(n, get_message(key_of(f"waited for {n}"), 600.0)) for n in range(2, 60)]
            self._say_all(talks, b"".join(frames))
            time.sleep(1.0)
            self._hear_some(talks)

    def toolchains(self) -> None:
        """Announce a file that is then removed, and very many files that do not exist."""
        file = Path.cwd() / f"{threading.get_ident()}-{self._next()}"
        file.write_bytes(b"x")
        there = file.stat()
        mark = {
            "path": str(file),
            "size": 1,
            "mtime_ns": there.st_mtime_ns,
            "inode": there.st_ino,
            "digest": digest(b"x"),
        }
        nowhere = [mark | {"path": f"/{self._next()}/{'x' * 3000}/{n}"} for n in range(200)]
        with self._many(4) as talks:
            frames = [
                framing.encode(2, protocol.Announce(_COMPONENTS["toolchain"], "cpu", "1", "", [mark])),
                framing.encode(3, protocol.Announce(digest(os.urandom(8)), "cpu", "1", "x" * 9000, nowhere)),
            ]
            self._say_all(talks, b"".join(frames) * 5)
            file.unlink()
            self._hear_some(talks)

    def half_messages(self) -> None:
        """Begin a large message on every connection, and never finish it."""
        with self._many(_CONNECTIONS // _THREADS) as talks:
            frame = framing.encode(2, protocol.Remember("p", "", self._items(1500), {"o": b"o"}))
            self._say_all(talks, frame[:-1])
            time.sleep(1.0)

    def garbage(self) -> None:
        """Send invalid frames, and messages with impossible values."""
        for _ in range(30):
            with self._many(1) as talks:
                self._say_all(talks, self._choose.choice([os.urandom(200), b"\0\0\0\x05" + b"\n" * 5, b"\xff" * 50]))
                self._hear_some(talks)

    def connections(self) -> None:
        """Connect and leave."""
        for _ in range(100):
            with contextlib.suppress(OSError):
                self._place.connect().close()

    def saying_connections(self) -> None:
        """Connect, send a frame that is no message, and leave, without waiting for anything."""
        for _ in range(1000):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connecting:
                connecting.setblocking(False)
                connecting.connect(os.fspath(self._place.socket))
                connecting.send(b"\0\0\0\1x")

    def another_users_keys(self) -> None:
        """Overwrite, mark, complain of, remove and crash on another user's entries."""
        with self._many(4) as talks:
            for key in self._victims:
                messages = [
                    put_message(key, b"evil", b"program", overwrite=True),
                    protocol.MarkNotCacheable(key, "m", "evil"),
                    protocol.Complain(key, digest(b"x"), "evil\nevil", False),
                    commands.Remove([key], "evil"),
                    commands.Pin([key]),
                    commands.Unpin([key]),
                    protocol.Loading(key, digest(b"x"), False),
                    get_message(key, 600.0),
                    protocol.Release(key, 1),
                ]
                self._say_all(talks, b"".join(framing.encode(n, m) for n, m in enumerate(messages, 2)))
            self._hear_some(talks)

    def clearing(self) -> None:
        """Send requests that cost the writer thread more than the client."""
        with self._many(8) as talks:
            keys = [self._fresh() for _ in range(1000)]
            messages = [
                *(put_message(key, b"1", b"program") for key in keys[:50]),
                commands.Remove(keys, "no reason"),
                commands.Pin(keys),
                commands.Clear(),
                commands.Sync(),
                commands.CollectGarbage(),
                commands.ZeroStatistics(),
                protocol.AskStatus(),
                protocol.Report({f"errors:{n} {self._next()}": 1 for n in range(500)}),
            ]
            self._say_all(talks, b"".join(framing.encode(n, m) for n, m in enumerate(messages, 2)))
            self._hear_some(talks)

    def loads(self) -> None:
        """Leave while loading an entry."""
        key = self._own_entry()
        for _ in range(20):
            with self._many(1) as talks:
                talks[0].socket.settimeout(5)
                talks[0].get(key)
                talks[0].say(protocol.Loading(key, digest(key.encode() * 400), False))

    def anything(self) -> None:
        """Send a little of each kind, mixed, whole and in parts."""
        kinds: list[Callable[[], protocol.Message]] = [
            lambda: get_message(self._fresh(), self._choose.choice([0.0, 600.0, -1.0, float("nan")])),
            lambda: put_message(self._fresh(), os.urandom(self._choose.randrange(30_000)), b"p"),
            lambda: put_message(self._fresh(), b"x", b"p", compile_seconds=9e15),
            lambda: protocol.Predict("p", ""),
            lambda: protocol.Remember("p", "", self._items(self._choose.randrange(300)), {"o": b"o"}),
            lambda: protocol.AskAlias(self._fresh()),
            lambda: protocol.RememberAliases([[*sealed(self._fresh(), digest(b"raw program"), b"f" * 1024)]] * 300),
            lambda: protocol.DropAlias(self._fresh()),
            lambda: protocol.Loading(self._fresh(), digest(b"x"), True),
            lambda: protocol.Complain(self._fresh(), digest(b"x"), "\n" * 1000, True),
            lambda: protocol.Report({"requests": 2.0**60}),
            lambda: commands.Remove([self._fresh()]),
            lambda: protocol.MarkNotCacheable(self._fresh(), "m" * 9000, "r"),
            lambda: commands.Stop("please"),
            lambda: protocol.Hello(protocol.VERSION, "2", 1, "again"),
            lambda: protocol.Welcome(1, "", 1, ""),
            protocol.Loaded,
            protocol.AskStatus,
            commands.Sync,
            commands.Clear,
        ]
        with self._many(20) as talks:
            for talk in talks:
                frames = [framing.encode(n, self._choose.choice(kinds)()) for n in range(2, 60)]
                data = b"".join(frames)
                self._say_all([talk], data[: self._choose.choice([len(data), self._choose.randrange(len(data))])])
            self._hear_some(talks)

    def _items(self, count: int) -> list[dict[str, protocol.Scalar]]:
        return [{"key": key_of(str(n)), **_ITEM} for n in range(count)]

    def _own_entry(self, size: int = 25_600) -> str:
        key = key_of(f"hostile {size}")
        with self._many(1) as talks:
            talks[0].socket.settimeout(5)
            talks[0].put(key, bytes(size))
        return key

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _fresh(self) -> str:
        return key_of(f"{os.getpid()} {threading.get_ident()} {self._next()}")

    @contextlib.contextmanager
    def _many(self, count: int):
        talks: list[Conversation] = []
        try:
            with contextlib.suppress(OSError, AssertionError):
                for _ in range(count):
                    talks.append(Conversation(self._place))
                    talks[-1].socket.settimeout(5)
                    talks[-1].greet()
            for talk in talks:
                talk.socket.setblocking(False)
            if not talks:
                raise ConnectionError
            yield talks
        finally:
            for talk in talks:
                talk.close()

    def _say_all(self, talks: list[Conversation], data: bytes) -> None:
        """Send to each connection as much as it takes within a moment."""
        left = {talk.socket: memoryview(data) for talk in talks}
        until = time.monotonic() + 1.0
        while left and time.monotonic() < until:
            for writable in select.select([], list(left), [], 0.1)[1]:
                try:
                    left[writable] = left[writable][writable.send(left[writable]) :]
                except OSError:
                    del left[writable]
                    continue
                if not left[writable]:
                    del left[writable]

    def _hear_some(self, talks: list[Conversation]) -> None:
        """Read the answers that come within a moment."""
        sockets: list[socket.socket] = [talk.socket for talk in talks if talk.socket.fileno() >= 0]
        until = time.monotonic() + 0.5
        while sockets and time.monotonic() < until:
            for readable in select.select(sockets, [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    data, _, _, _ = readable.recvmsg(1 << 20)
                    if data:
                        continue
                sockets.remove(readable)


def main() -> None:
    """Flood with one kind, on some threads, until stdin ends; print a line for each round."""
    place = Place(Path(sys.argv[1]))
    place.socket = Path(os.environ["XCACHE_SOCKET"])
    kind, seed, victims = sys.argv[2], sys.argv[3], sys.argv[4:]
    over = threading.Event()

    def flood(number: int) -> None:
        hostile = Hostile(place, f"{seed} {number}", victims)
        while not over.is_set():
            try:
                with contextlib.suppress(OSError, AssertionError):
                    hostile.floods[kind]()
            except Exception:  # noqa: BLE001 - the parent is to know
                traceback.print_exc()
                os._exit(1)
            os.write(1, b".")

    for number in range(_THREADS):
        threading.Thread(target=flood, args=(number,), daemon=True).start()
    sys.stdin.read()
    over.set()
    os._exit(0)


if __name__ == "__main__":
    main()
