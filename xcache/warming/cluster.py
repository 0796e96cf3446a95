"""Compile on a Dask cluster: each program is a task whose key is the entry's, so that nobody compiles it twice.

A task runs a worker process of its own on the cluster's machine, as here, and returns the entry, which the caller
stores. The entry's key is made here and there: a machine of another kind makes another key, and refuses.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from xcache.errors import ClusterError, NoWorkerError, WorkerError
from xcache.warming.building import Task
from xcache.warming.place import Place
from xcache.warming.process import Worker, this_python

_CONNECT_SECONDS = 20.0
# A task may wait for its turn in the cluster's queue as long as for its compile, and its worker process must start.
_MORE_SECONDS = 300.0
_POLL_SECONDS = 0.5


class DaskWorkers:
    """The workers of a Dask cluster."""

    def __init__(self, address: str) -> None:
        """Connect to the scheduler; raise ClusterError if that fails."""
        try:
            import distributed
        except ImportError:
            raise ClusterError("this needs the package distributed: pip install 'jax-xcache[dask]'") from None
        self._closed = threading.Event()
        self._distributed = distributed
        try:
            self._client = distributed.Client(address, timeout=_CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            raise ClusterError(f"no Dask scheduler answers at {address}: {error}") from None

    def count(self) -> int:
        """Return how many tasks the cluster runs at once."""
        return max(1, sum(map(int, self._client.nthreads().values())))

    def compile(self, task: Task) -> dict[str, Any]:
        """Have the cluster compile."""
        future = self._client.submit(
            compile_there, task.message(), tuple(task.place), task.bound, key=f"xcache-{task.key}", retries=0
        )
        left = task.bound + _MORE_SECONDS
        try:
            while not self._closed.is_set() and left > 0:
                with contextlib.suppress(self._distributed.TimeoutError):
                    found: dict[str, Any] = future.result(timeout=_POLL_SECONDS)
                    return found
                # A queue that is long says nothing about this task.
                left -= _POLL_SECONDS if future.status == "pending" and self._is_running(future.key) else 0.0
        except Exception as error:  # noqa: BLE001 - whatever the cluster's machine raised
            raise WorkerError(f"on the cluster: {type(error).__name__}: {error}") from None
        finally:
            if not future.done():
                future.cancel()
            future.release()
        raise WorkerError("it was interrupted" if self._closed.is_set() else "the cluster did not do it in time")

    def close(self) -> None:
        """Cancel what is not done, and disconnect."""
        self._closed.set()
        self._client.close()

    def _is_running(self, key: str) -> bool:
        return any(key in keys for keys in self._client.processing().values())


def compile_there(message: dict[str, Any], place: tuple[Any, ...], seconds: float) -> dict[str, Any]:
    """Compile on a machine of the cluster, in a process of its own."""
    try:
        with contextlib.closing(Worker(this_python(), Place(*place))) as worker:
            return worker.ask(message, seconds)
    except NoWorkerError as error:
        return {"refused": str(error)}
    except WorkerError as error:
        return {"failed": str(error)}
