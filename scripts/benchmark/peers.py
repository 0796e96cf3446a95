"""What is compared: how a program is told which cache to use, where its store is, and the daemon that belongs to it."""

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

NONE, BUILT_IN, LIMITED, XCACHE = "no cache", "built-in", "built-in, limited", "xcache"
# Far more than any of these stores holds: it is the bookkeeping that is measured.
LIMIT = 20 * 1024**3
READY_WITHIN, GONE_WITHIN = 60.0, 60.0
_TICKS = os.sysconf("SC_CLK_TCK")


def rotated(names: Iterable[Any], by: int) -> list[Any]:
    """The names, another one first in each round: who comes first has no advantage of it."""
    found = list(names)
    by %= len(found)
    return [*found[by:], *found[:by]]


@contextlib.contextmanager
def apart(*servers: int) -> Iterator[None]:
    """This thread on one processor, and the processes of servers on another.

    Which pairs the kernel keeps on one of them is chance otherwise, and decides more than what is compared does.
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
            # It may end at that moment.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), processors)


def built_in(store: Path) -> dict[str, str]:
    """JAX's own cache at its best: everything is kept."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(store),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def limited(store: Path) -> dict[str, str]:
    """The same with a limit to its size."""
    return built_in(store) | {"JAX_COMPILATION_CACHE_MAX_SIZE": str(LIMIT)}


def xcache(store: Path) -> dict[str, str]:
    """xcache as it comes; only where the store is, and that no settings of the user's matter."""
    return {
        "XCACHE": "1",
        "XCACHE_DIR": str(store),
        "XCACHE_SOCKET": str(socket_of(store)),
        "XDG_CONFIG_HOME": str(store.parent / "nothing"),
    }


def socket_of(store: Path) -> Path:
    """Beside the store: its path is short enough."""
    return store.with_suffix(".s")


ENVIRONMENTS: dict[str, Callable[[Path], dict[str, str]]] = {
    NONE: lambda _: {},
    BUILT_IN: built_in,
    LIMITED: limited,
    XCACHE: xcache,
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
        """Seconds of processor time it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory(self) -> int:
        """Bytes of its memory that are resident."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no VmRSS")

    def stop(self) -> None:
        """Have it leave."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(GONE_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass
class Peer:
    """One of what is compared, with the store it uses at the moment."""

    name: str
    folder: Path
    made: int = 0
    daemon: Daemon | None = None
    store: Path = field(init=False)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """An empty store in place of the one there was."""
        self.end()
        self.made += 1
        self.store = self.folder / f"{self.name[-7:].replace(' ', '')}{self.made}"
        self.store.mkdir(mode=0o700)
        if self.name == XCACHE:
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
        """What a program is given."""
        return os.environ | ENVIRONMENTS[self.name](self.store)

    def _remember_libraries(self) -> None:
        """The digests of jaxlib's libraries: made by the first program after an install, and not again."""
        memo = self.folder / "native-digests.json"
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
