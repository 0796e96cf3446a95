"""A Dask cluster: a scheduler and workers, each a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from support.places import free_port, until


@contextlib.contextmanager
def dask_cluster(place, workers: int) -> Iterator[str]:
    """Yield the address of a cluster that runs for the length of the block."""
    address = f"tcp://127.0.0.1:{free_port()}"
    port = address.rpartition(":")[2]
    dask = [sys.executable, "-m", "dask"]
    with contextlib.ExitStack() as stack:
        at = ["--host", "127.0.0.1", "--no-dashboard"]
        _started(stack, place, [*dask, "scheduler", "--port", port, *at], "scheduler")
        # Programs are compiled in processes of their own, so nothing is gained from a nanny.
        at += ["--nthreads", "1", "--no-nanny", "--local-directory", str(place.root)]
        for number in range(workers):
            _started(stack, place, [*dask, "worker", address, *at], f"worker-{number}")
        yield address


def _started(stack: contextlib.ExitStack, place, command: list[str], name: str) -> None:
    said = place.root / f"dask-{name}"
    with said.open("wb") as file:
        env = place.env | {"DASK_TEMPORARY_DIRECTORY": str(place.root)}
        process = subprocess.Popen(command, env=env, cwd=place.root, stdout=file, stderr=file)
    stack.callback(process.wait, 20.0)
    stack.callback(process.terminate)
    ready = "Scheduler at" if name == "scheduler" else "Registered to"
    assert until(lambda: ready in said.read_text() or process.poll() is not None, 60.0)
    assert process.poll() is None, said.read_text()
