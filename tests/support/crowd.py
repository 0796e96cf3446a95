"""A program that becomes many, each with its own cache, which all begin to ask at the same moment. Run as a script.

They are forked from one that has imported everything, so a hundred of them take little time and memory to start.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import random
import sys
import traceback
from pathlib import Path

from support.places import digest
from xcache.cache import Cache
from xcache.config import config
from xcache.keys import Key
from xcache.request import Request
from xcache.wire import protocol

OWN, SHARED = 20, 200
COMPONENTS = {name: digest(name.encode()) for name in ("program", "options", "flags", "platform", "toolchain")}


class Loadable:
    """A stand-in for an executable of jaxlib."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def keep_alive(self, what: object) -> None:
        self._kept = what


def content_of(name: str) -> bytes:
    """Return what a name compiles to, so that anyone can check it; some names make it too large for a message."""
    choose = random.Random(name)
    return choose.randbytes(choose.randrange(100, 3000) + (protocol.INLINE_LIMIT if name.startswith("large") else 0))


def request_of(name: str) -> Request:
    """Return the request for what a name compiles to."""
    return Request(
        key=Key(digest(name.encode()), COMPONENTS),
        module_name=f"jit_{name}",
        platform="cpu",
        device_kind="cpu",
        jaxlib_version="0.0",
        program=b"program",
        details=dict,
        load=Loadable,
        serialize=lambda executable: executable.raw,
    )


def names_for(program: int, asks: int) -> list[str]:
    """Return what one program asks for: all shared names, some of its own, and repetitions."""
    choose = random.Random(program)
    names = [f"own {program} {n}" for n in range(OWN)] + [f"shared {n}" for n in range(SHARED)]
    names += choose.choices(names, k=asks - len(names))
    choose.shuffle(names)
    return names


def ask(program: int, asks: int) -> dict[str, object]:
    """Ask for everything; return what was compiled, what was wrong, and the statistics."""
    cache = Cache(config.load(), "on", "test")
    compiled: collections.Counter[str] = collections.Counter()
    wrong = []
    for name in names_for(program, asks):

        def compile_now(name: str = name) -> Loadable:
            compiled[name] += 1
            return Loadable(content_of(name))

        outcome = cache.get_or_compile(compile_now, lambda name=name: request_of(name))
        if outcome.executable.raw != content_of(name):
            wrong.append(name)
    # It waits for all puts, if they take no longer than the timeout.
    cache.close()
    counted = dataclasses.asdict(cache.statistics())
    return {"compiled": compiled, "wrong": wrong, "counted": counted}


def main() -> int:
    """Fork the programs, start them together, and wait; return how many failed."""
    programs, asks, results = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    # Import what every cache needs, once for all forks.
    from jaxlib import xla_client  # noqa: F401

    waiting, go = os.pipe()
    children = []
    for program in range(programs):
        child = os.fork()
        if not child:
            os.close(go)
            # This returns when the parent, the last to hold a writing end, has forked them all and closes it.
            os.read(waiting, 1)
            try:
                (results / f"{program}.json").write_text(json.dumps(ask(program, asks)))
            except BaseException:  # noqa: BLE001 - the parent's code must not go on in here
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    os.close(go)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main())
