"""Requests, caches and asking threads, for tests of the cache within one process."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable

from support.places import Place, digest
from xcache.cache import Cache
from xcache.client.client import Client
from xcache.errors import ConnectionLostError
from xcache.keys import Key
from xcache.request import Outcome, Request

COMPONENTS = {name: digest(name.encode()) for name in ("program", "options", "flags", "platform", "toolchain")}


class Loadable:
    """A stand-in for an executable of jaxlib."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw


def request(name: str = "a", **changes: object) -> Request:
    made = {
        "key": Key(digest(name.encode()), COMPONENTS),
        "module_name": f"jit_{name}",
        "platform": "cpu",
        "device_kind": "cpu",
        "jaxlib_version": "0.0",
        "program": b"program",
        "details": dict,
        "load": Loadable,
        "serialize": lambda executable: executable.raw,
    }
    return Request(**(made | changes))


def compiled() -> Loadable:
    return Loadable(b"executable")


class Asking(threading.Thread):
    """A thread that asks for an executable."""

    def __init__(self, cache: Cache, compile_now: Callable[[], Loadable] = compiled, asked: Request | None = None):
        super().__init__()
        self.cache, self._compile, self._asked = cache, compile_now, asked or request()
        self.outcome: Outcome | None = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self.cache.get_or_compile(self._compile, lambda: self._asked)
        except BaseException as error:  # noqa: BLE001 - raised again by who asks
            self.error = error

    def end(self) -> Outcome:
        self.join(20)
        assert not self.is_alive()
        if self.error:
            raise self.error
        return self.outcome


class Gate:
    """A compile that lasts until a test ends it."""

    def __init__(self, ending: Callable[[], Loadable] = compiled) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()
        self._ending = ending

    def __call__(self) -> Loadable:
        self.begun.set()
        assert self.open.wait(20)
        return self._ending()


def waiting(place: Place) -> int:
    """Return how many clients wait, as the daemon reports."""
    status = place.run("import sys; from xcache.cli import main; sys.argv[1:] = ['status', '--json']; main()")
    return sum(each["waiting"] for each in json.loads(status.stdout)["compiles"])


def fail_once(place: Place, client: Client) -> None:
    """Have a client's question fail, as of a daemon that hangs; the daemon goes on afterwards."""
    daemon = place.daemon_pid()
    os.kill(daemon, signal.SIGSTOP)
    try:
        client.fetch(digest(b"anything"))
    except ConnectionLostError:
        return
    finally:
        os.kill(daemon, signal.SIGCONT)
    raise AssertionError("a daemon that hangs has answered")


def raising(error: BaseException) -> Callable[[], Loadable]:
    def fail() -> Loadable:
        raise error

    return fail


def refuse(executable: Loadable) -> bytes:
    raise RuntimeError("UNIMPLEMENTED: not this one")
