"""A mixed load on a daemon: puts small and large, overwrites, bursts and equal keys; gets and removals."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from support.acknowledged import Known, Ledger
from support.conversation import Conversation, key_of
from support.places import Place
from xcache.errors import RefusedError
from xcache.wire import commands, protocol

_KEYS = 24
_SHARED_KEYS = 12
# Some contents are shared by many entries, some are large enough for a file.
_PROGRAMS = [b"program %d " % number * size for number, size in enumerate((1, 10, 1000, 5000))]
LARGEST_PROGRAM = 64_000


class Load:
    """Some clients, each with a connection and a thread of its own."""

    def __init__(self, place: Place, ledger: Ledger, seed: str, clients: int = 3, *, evicting: bool = False) -> None:
        self._ledger = ledger
        self._evicting = evicting
        self.operations = 0
        self._threads = [
            threading.Thread(target=self._run, args=(place, f"{client}", random.Random(f"{seed} {client}")))
            for client in range(clients)
        ]
        self._over = threading.Event()

    def start(self) -> None:
        """Start the clients."""
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Wait until all clients have noticed that the daemon is gone, or stop them."""
        self._over.set()
        for thread in self._threads:
            thread.join(60)
            if thread.is_alive():
                self._ledger.wrong.append("a client hangs")

    def _run(self, place: Place, name: str, choose: random.Random) -> None:
        try:
            talk = Conversation(place)
        except OSError:
            return
        try:
            talk.greet()
            client = Client(talk, self._ledger, name, choose, evicting=self._evicting)
            while not self._over.is_set():
                client.do_something()
                self.operations += 1
        except TimeoutError:
            self._ledger.wrong.append("a client got no answer")
        except OSError:
            # The daemon was killed, as intended.
            pass
        except BaseException as error:
            self._ledger.wrong.append(f"a client met {error!r}")
            raise
        finally:
            talk.close()


class _Asked(NamedTuple):
    """A Put that was sent."""

    request: int
    key: str
    content: bytes
    before: Known
    began: float


class Client:
    """One client of the load. With ``refused``, the daemon may refuse, which changes nothing."""

    def __init__(
        self,
        talk: Conversation,
        ledger: Ledger,
        name: str,
        choose: random.Random,
        *,
        evicting: bool = False,
        refused: bool = False,
    ) -> None:
        self._talk = talk
        self._ledger = ledger
        self._name = name
        self._choose = choose
        self._evicting = evicting
        self._may_be_refused = refused
        self._ways: dict[Callable[[], None], int] = {
            self.put_anything: 30,
            self._burst: 10,
            self._put_the_same: 10,
            self._get_anything: 30,
            self._remove: 5,
        }

    def do_something(self) -> None:
        """Do one operation."""
        (way,) = self._choose.choices(list(self._ways), list(self._ways.values()))
        way()

    def do_everything(self) -> None:
        """Do every kind of operation: rows and files, overwrites, reads, removals, and many at once."""
        row, file, other = (key_of(f"{self._name} {name}") for name in ("row", "file", "other"))
        small, large = self._choose.randbytes(500), self._choose.randbytes(70_000)
        self._put(row, small, _PROGRAMS[0])
        self._put(file, large, _PROGRAMS[3])
        self._get(row)
        self._get(file)
        self._put(other, self._choose.randbytes(40_000), self._choose.randbytes(40_000))
        self._put(file, small, _PROGRAMS[0])
        self._put(row, large, _PROGRAMS[2])
        self._remove(other)
        self._burst(4)
        self._get(row)

    def put_anything(self) -> None:
        """Store something under some key, and wait for the answer."""
        self._wait_for(self._begin_put(self._own_key(), self._content()))

    def _put(self, key: str, content: bytes, program: bytes) -> None:
        self._wait_for(self._begin_put(key, content, overwrite=True, program=program))

    def _burst(self, most: int = 8) -> None:
        keys = {self._own_key() for _ in range(most)}
        begun = [self._begin_put(key, self._content()) for key in sorted(keys)]
        # Small entries overtake large ones.
        answers = self._talk.answers([asked.request for asked in begun])
        for asked in begun:
            self._take(asked, answers[asked.request])

    def _put_the_same(self) -> None:
        """Put what other clients put too, perhaps at the same time."""
        name = f"shared {self._choose.randrange(_SHARED_KEYS)}"
        content = key_of(name).encode() * (1000 if name.endswith("1") else 10)
        self._wait_for(self._begin_put(key_of(name), content, overwrite=False))

    def _get_anything(self) -> None:
        self._get(self._own_key())

    def _get(self, key: str) -> None:
        try:
            content = self._talk.get(key)
        except RefusedError as error:
            self._was_refused("Get", error)
            return
        wrong = self._ledger.found(key, content, evicting=self._evicting)
        if wrong:
            self._ledger.wrong.append(f"while running: {wrong}")

    def _remove(self, key: str | None = None) -> None:
        key = key or self._own_key()
        self._ledger.begins_to_remove(key)
        answer = self._talk.ask(commands.Remove([key]))
        if isinstance(answer, commands.Removed):
            self._ledger.has_removed(key)
        else:
            self._was_refused("Remove", answer)

    def _begin_put(
        self, key: str, content: bytes, *, overwrite: bool | None = None, program: bytes | None = None
    ) -> _Asked:
        began = time.monotonic()
        before = self._ledger.begins_to_put(key, content)
        if overwrite is None:
            overwrite = self._choose.random() < 0.5
        program = program or self._choose.choice(_PROGRAMS)
        request = self._talk.begin_put(key, content, program, overwrite=overwrite)
        return _Asked(request, key, content, before, began)

    def _wait_for(self, asked: _Asked) -> None:
        self._take(asked, self._talk.answer(asked.request))

    def _take(self, asked: _Asked, answer: protocol.Message) -> None:
        self._ledger.has_put(asked.key, asked.content, answer, asked.before, asked.began)
        if not isinstance(answer, protocol.Stored):
            self._was_refused("Put", answer)

    def _was_refused(self, what: str, answer: object) -> None:
        if not self._may_be_refused:
            self._ledger.wrong.append(f"a {what} was answered by {answer}")

    def _own_key(self) -> str:
        return key_of(f"{self._name} {self._choose.randrange(_KEYS)}")

    def _content(self) -> bytes:
        most = self._choose.choice((50, 3_000, 32_000, 60_000, 200_000))
        return self._choose.randbytes(self._choose.randrange(most))
