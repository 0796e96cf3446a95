"""The caches that are compared: how a program is told which to use, where its store is, and its daemon."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NONE, BUILT_IN, LIMITED, XCACHE, JIT = "no cache", "built-in", "built-in, limited", "xcache", "xcache.jit"
# Far more than any of these stores holds: the benchmark measures only the bookkeeping of a limit.
LIMIT = 20 * 1024**3
READY_WITHIN, GONE_WITHIN = 60.0, 60.0
_TICKS = os.sysconf("SC_CLK_TCK")


def rotated(names: Iterable[Any], by: int) -> list[Any]:
    """Return the names with another one first in each round, so that none has an advantage."""
    found = list(names)
    by %= len(found)
    return [*found[by:], *found[:by]]


@contextlib.contextmanager
def apart(*servers: int) -> Iterator[None]:
    """Keep this thread on one processor, and the processes of servers on another.

    Otherwise the kernel puts some pairs on one processor by chance, which changes the figures more than the peers do.
    """
    before = os.sched_getaffinity(0)
    mine, *others = sorted(before)
    try:
        if others:
            os.sched_setaffinity(0, {mine})
            _place(servers, {others[0]})
        yield
    finally:
        os.sched_setaffinity(0, before)
        _place(servers, before)


def _place(processes: Iterable[int], processors: Iterable[int]) -> None:
    for process in processes:
        for thread in Path(f"/proc/{process}/task").iterdir():
            # The thread may end at that moment.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), processors)


def built_in(store: Path) -> dict[str, str]:
    """Return the settings of JAX's own cache at its best: it keeps everything."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(store),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def limited(store: Path) -> dict[str, str]:
    """Return the same settings with a limit to the size."""
    return built_in(store) | {"JAX_COMPILATION_CACHE_MAX_SIZE": str(LIMIT)}


def xcache(store: Path) -> dict[str, str]:
    """Return the settings of xcache as it comes: only the paths of the store, and of no configuration of the user."""
    return {
        "XCACHE": "1",
        "XCACHE_DIR": str(store),
        "XCACHE_SOCKET": str(socket_of(store)),
        "XDG_CONFIG_HOME": str(store.parent / "nothing"),
    }


def jit(store: Path) -> dict[str, str]:
    """Return the settings of xcache for a program that uses ``xcache.jit``."""
    return xcache(store) | {"PROGRAM_SAYS_ITS_VERSION": "1"}


def socket_of(store: Path) -> Path:
    """Return the socket's path: beside the store, whose path is short enough."""
    return store.with_suffix(".s")


ENVIRONMENTS: dict[str, Callable[[Path], dict[str, str]]] = {
    NONE: lambda _: {},
    BUILT_IN: built_in,
    LIMITED: limited,
    XCACHE: xcache,
    JIT: jit,
}


class Daemon:
    """xcache's daemon for one store, from ready to gone."""

    def __init__(self, store: Path, **settings: str) -> None:
        environment = os.environ | xcache(store) | {"XCACHE_IDLE_EXIT": "1h"} | settings
        reading, writing = os.pipe()
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "xcached", "--ready-fd", str(writing)],
            env=environment,
            pass_fds=[writing],
            stdin=subprocess.DEVNULL,
        )
        self.pid = self._process.pid
        os.close(writing)
        try:
            said = b""
            while b"ready\n" not in said:
                left = started + READY_WITHIN - time.perf_counter()
                ready, _, _ = select.select([reading], [], [], max(0.0, left))
                more = os.read(reading, 4096) if ready else b""
                if not more:
                    self.stop()
                    raise RuntimeError(f"the daemon did not start: {said.decode(errors='replace')}")
                said += more
            self.ready_after = time.perf_counter() - started
        finally:
            os.close(reading)

    def cpu(self) -> float:
        """Return the seconds of processor time that the daemon has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory(self) -> int:
        """Return the bytes of the daemon's resident memory."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no VmRSS")

    def stop(self) -> None:
        """Stop the daemon."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(GONE_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass
class Peer:
    """One of the caches that are compared, with its current store."""

    name: str
    folder: Path
    made: int = 0
    daemon: Daemon | None = None
    store: Path = field(init=False)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Replace the store by an empty one."""
        self.end()
        self.made += 1
        self.store = self.folder / f"{self.name[-7:].replace(' ', '')}{self.made}"
        self.store.mkdir(mode=0o700)
        if self.name in (XCACHE, JIT):
            self._remember_libraries()
            self.daemon = Daemon(self.store)

    def end(self) -> None:
        """Leave nothing behind."""
        if self.daemon is not None:
            self.daemon.stop()
            self.daemon = None
        if self.made:
            shutil.rmtree(self.store)

    def environment(self) -> dict[str, str]:
        """Return the environment of a program that uses this cache."""
        return os.environ | ENVIRONMENTS[self.name](self.store)

    def _remember_libraries(self) -> None:
        """Put the digests of jaxlib's libraries into the store; only the first program after an install makes them."""
        memo = self.folder / "library-digests.json"
        if memo.exists():
            shutil.copy(memo, self.store)
            return
        daemon = Daemon(self.store)
        try:
            program = "import jax; jax.jit(lambda v: v + 1)(1)"
            subprocess.run([sys.executable, "-c", program], env=self.environment(), check=True, timeout=120)
        finally:
            daemon.stop()
        shutil.copy(self.store / memo.name, memo)
        shutil.rmtree(self.store)
        self.store.mkdir(mode=0o700)
