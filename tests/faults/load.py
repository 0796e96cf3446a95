"""A mixed load on a daemon: puts small and large, overwriting, in bursts and of the same key; gets and removes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from conftest import Place
from conversation import Conversation, key_of

from xcache import protocol

from ledger import Known, Ledger

_KEYS = 24
_SHARED_KEYS = 12
# Some are shared by many entries, some are large enough for a file.
_PROGRAMS = [b"program %d " % number * size for number, size in enumerate((1, 10, 1000, 5000))]


class Load:
    """Some clients, each on a connection and a thread of its own."""

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
        """Begin."""
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
            client = _Client(talk, self._ledger, name, choose, self._evicting)
            while not self._over.is_set():
                client.do_something()
                self.operations += 1
        except TimeoutError:
            self._ledger.wrong.append("a client got no answer")
        except OSError:
            # The daemon was killed, which is what this is about.
            pass
        except BaseException as error:
            self._ledger.wrong.append(f"a client met {error!r}")
            raise
        finally:
            talk.close()


class _Asked(NamedTuple):
    """A Put that was said."""

    request: int
    key: str
    content: bytes
    before: Known
    began: float


class _Client:
    """What one of them does."""

    def __init__(
        self, talk: Conversation, ledger: Ledger, name: str, choose: random.Random, evicting: bool
    ) -> None:
        self._talk = talk
        self._ledger = ledger
        self._name = name
        self._choose = choose
        self._evicting = evicting
        self._ways: dict[Callable[[], None], int] = {
            self._put: 30,
            self._burst: 10,
            self._put_the_same: 10,
            self._get: 30,
            self._remove: 5,
        }

    def do_something(self) -> None:
        """One operation."""
        (way,) = self._choose.choices(list(self._ways), list(self._ways.values()))
        way()

    def _put(self) -> None:
        self._wait_for(self._begin_put(self._own_key(), self._content()))

    def _burst(self) -> None:
        keys = {self._own_key() for _ in range(8)}
        for asked in [self._begin_put(key, self._content()) for key in keys]:
            self._wait_for(asked)

    def _put_the_same(self) -> None:
        """What others put too, at the same time perhaps."""
        name = f"shared {self._choose.randrange(_SHARED_KEYS)}"
        content = key_of(name).encode() * (1000 if name.endswith("1") else 10)
        self._wait_for(self._begin_put(key_of(name), content, overwrite=False))

    def _get(self) -> None:
        key = self._own_key()
        wrong = self._ledger.found(key, self._talk.get(key), evicting=self._evicting)
        if wrong:
            self._ledger.wrong.append(f"while running: {wrong}")

    def _remove(self) -> None:
        key = self._own_key()
        self._ledger.begins_to_remove(key)
        answer = self._talk.ask(protocol.Remove([key]))
        if isinstance(answer, protocol.Removed):
            self._ledger.has_removed(key)
        else:
            self._ledger.wrong.append(f"a Remove was answered by {answer}")

    def _begin_put(self, key: str, content: bytes, overwrite: bool | None = None) -> _Asked:
        began = time.monotonic()
        before = self._ledger.begins_to_put(key, content)
        if overwrite is None:
            overwrite = self._choose.random() < 0.5
        request = self._talk.begin_put(key, content, self._choose.choice(_PROGRAMS), overwrite=overwrite)
        return _Asked(request, key, content, before, began)

    def _wait_for(self, asked: _Asked) -> None:
        answer = self._talk.answer(asked.request)
        self._ledger.has_put(asked.key, asked.content, answer, asked.before, asked.began)
        if not isinstance(answer, protocol.Stored):
            self._ledger.wrong.append(f"a Put was answered by {answer}")

    def _own_key(self) -> str:
        return key_of(f"{self._name} {self._choose.randrange(_KEYS)}")

    def _content(self) -> bytes:
        most = self._choose.choice((50, 3_000, 32_000, 60_000, 200_000))
        return self._choose.randbytes(self._choose.randrange(most))
