"""A Dask cluster: a scheduler and workers, each a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import distributed

from support.places import free_port, until

_DASK = (sys.executable, "-m", "dask")


class Cluster:
    """A cluster that runs; its workers have one thread each."""

    def __init__(self, stack: contextlib.ExitStack, place: Any, under: tuple[str, ...], host: str) -> None:
        port = free_port()
        self.address = f"tcp://{host}:{port}"
        self._stack = stack
        self._place = place
        self._count = 0
        at = ["--host", host, "--port", str(port), "--no-dashboard"]
        self.scheduler = self._started([*under, *_DASK, "scheduler", *at], "Scheduler at")

    def add_worker(self, *under: str, host: str = "127.0.0.1") -> subprocess.Popen[bytes]:
        """Start a worker, perhaps ``under`` a command, and wait until the scheduler knows it."""
        # Programs are compiled in processes of their own, so nothing is gained from a nanny.
        options = ["--host", host, "--no-dashboard", "--nthreads", "1", "--no-nanny"]
        options += ["--local-directory", str(self._place.root)]
        return self._started([*under, *_DASK, "worker", self.address, *options], "Registered to")

    @contextlib.contextmanager
    def asking(self) -> Iterator[Callable[[Callable[..., Any]], Any]]:
        """Yield what has a function run in the scheduler."""
        with distributed.Client(self.address, timeout=20.0, set_as_default=False) as client:
            yield client.run_on_scheduler

    def begun(self) -> Counter[str]:
        """Return how often each task was begun."""
        with self.asking() as ask:
            return Counter(ask(_begun))

    def _started(self, command: list[str], ready: str) -> subprocess.Popen[bytes]:
        self._count += 1
        said = self._place.root / f"dask-{self._count}"
        with said.open("wb") as file:
            env = self._place.with_support | {"DASK_TEMPORARY_DIRECTORY": str(self._place.root)}
            process = subprocess.Popen(command, env=env, cwd=self._place.root, stdout=file, stderr=file)
        self._stack.callback(_ended, process)
        assert until(lambda: ready in said.read_text() or process.poll() is not None, 60.0)
        assert process.poll() is None, said.read_text()
        return process


@contextlib.contextmanager
def dask_cluster(
    place: Any, workers: int = 0, *, under: tuple[str, ...] = (), host: str = "127.0.0.1"
) -> Iterator[Cluster]:
    """Yield a cluster that runs for the length of the block; its scheduler runs ``under`` a command."""
    with contextlib.ExitStack() as stack:
        cluster = Cluster(stack, place, under, host)
        for _ in range(workers):
            cluster.add_worker()
        yield cluster


def wanted(dask_scheduler: Any) -> Counter[int]:
    """Return how many tasks are wanted by so many clients."""
    return Counter(len(task.who_wants or ()) for task in dask_scheduler.tasks.values())


def _begun(dask_scheduler: Any) -> list[str]:
    return [key for key, _, state, *_ in dask_scheduler.transition_log if state == "processing"]


def workers_of(pid: int) -> list[int]:
    """Return the processes that compile for a process."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()
    ]
    return [child for child in children if _is_worker(child)]


def _is_worker(pid: int) -> bool:
    try:
        return b"xcache.warming.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20.0)
    finally:
        process.kill()
