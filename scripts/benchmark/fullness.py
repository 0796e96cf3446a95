"""Measure what an entry costs among a thousand others, and among a million; beside it JAX's cache with a limit."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

from micro import Times, client_of, get_of, hit, put_of, timed
from peers import Daemon, apart, rotated
from stores import PROGRAM_SIZE, SIZE, copy_of_template, key, settle

from xcache.client.contents import Absent
from xcache.wire import envelope

# Misses are so quick that a busy moment of the machine would spoil most of a few hundred.
_MISSES = 2000


def by_entries(folder: Path, templates: Path, counts: list[int], puts: int, starts: int) -> dict[str, Any]:
    """Measure starts, misses, and puts that each evict, with so many entries in the store."""
    found: dict[str, Any] = {}
    stores = {count: folder / f"entries-{count}" for count in counts}
    for count, store in stores.items():
        copy_of_template(templates, count, store)
        found[str(count)] = {"ready after": [], "memory at the start": [], "miss": [], "put that evicts": []}
    try:
        for _ in range(starts):
            for count, store in stores.items():
                daemon = Daemon(store, XCACHE_MAX_SIZE="0")
                found[str(count)]["ready after"].append(daemon.ready_after)
                time.sleep(0.3)
                found[str(count)]["memory at the start"].append(daemon.memory())
                daemon.stop()
        for work, turns in ((_misses, _MISSES), (_puts, puts)):
            for store in stores.values():
                settle(store)
            work(stores, turns, found)
    finally:
        for store in stores.values():
            shutil.rmtree(store, ignore_errors=True)
    return found


def _misses(stores: dict[int, Path], turns: int, found: dict[str, Any]) -> None:
    """Ask the stores one after the other, so that all of them see the same machine."""
    with contextlib.ExitStack() as stack:
        clients, daemons = {}, {}
        for count, store in stores.items():
            daemons[count] = Daemon(store, XCACHE_MAX_SIZE="0")
            stack.callback(daemons[count].stop)
            clients[count] = stack.enter_context(contextlib.closing(client_of(store)))
            clients[count].get(get_of(key(-1)))
        stack.enter_context(apart(*(daemon.pid for daemon in daemons.values())))
        for turn in range(turns):
            for count, client in rotated(clients.items(), turn):
                wanted = get_of(key(-2 - turn))
                answer = timed(found[str(count)]["miss"], lambda: client.get(wanted))  # noqa: B023 - called at once
                if not isinstance(answer, Absent):
                    raise RuntimeError(f"a miss was none: {answer}")
        for count, daemon in daemons.items():
            found[str(count)]["memory after"] = daemon.memory()


def _puts(stores: dict[int, Path], turns: int, found: dict[str, Any]) -> None:
    with contextlib.ExitStack() as stack:
        clients = {}
        for count, store in stores.items():
            # The entries fill the store: each put has to make room for itself.
            daemon = Daemon(store, XCACHE_MAX_SIZE="0", XCACHE_MAX_ENTRIES=str(count))
            stack.callback(daemon.stop)
            clients[count] = stack.enter_context(contextlib.closing(client_of(store)))
        for turn in range(turns):
            for count, client in rotated(clients.items(), turn):
                fresh, program = key(-(10**10) - turn), os.urandom(PROGRAM_SIZE)
                sealed = envelope.seal(fresh, os.urandom(SIZE - 60))
                message = put_of(fresh, sealed, SIZE - 60, program)
                timed(found[str(count)]["put that evicts"], lambda: client.put(message, sealed, program))  # noqa: B023
                if turn == 0:
                    hit(client, fresh)


def limited(folder: Path, counts: list[int], turns: int) -> dict[str, Times]:
    """Measure the same puts into JAX's cache with a limit, with as many entries as anybody would wait for."""
    from jax._src.lru_cache import LRUCache

    found: dict[str, Times] = {}
    for count in counts:
        place = folder / f"limited-{count}"
        place.mkdir()
        for number in range(count):
            name = key(number)
            (place / f"{name}-cache").write_bytes(bytes(SIZE + PROGRAM_SIZE))
            (place / f"{name}-atime").write_bytes((10**9 + number).to_bytes(8, "little"))
        cache = LRUCache(str(place), max_size=count * (SIZE + PROGRAM_SIZE))
        times: list[float] = []
        for turn in range(turns):
            value = os.urandom(SIZE + PROGRAM_SIZE)
            timed(times, lambda: cache.put(key(-1 - turn), value))  # noqa: B023 - called at once
        found[str(count)] = {"put that evicts": times}
        shutil.rmtree(place)
    return found
