"""Compile on a Dask cluster: each program is a task whose key is the entry's, so that nobody compiles it twice.

A worker process on the cluster's machine does it, as here: the first task starts one, and the next ones use it. The
task returns the entry, which the caller stores. The entry's key is made here and there: a machine of another kind makes
another key, and refuses.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

from xcache.errors import ClusterError, NoWorkerError, WorkerError
from xcache.warming.building import LocalWorkers, Task
from xcache.warming.place import Place
from xcache.warming.process import this_python

_CONNECT_SECONDS = 20.0
# A task may wait for its turn in the cluster's queue as long as for its compile, and its worker process must start.
_MORE_SECONDS = 300.0
_POLL_SECONDS = 0.5
# Worker processes on the cluster's machines end when no task has wanted them for so long.
_IDLE_SECONDS = 30.0
_CLOSE_SECONDS = 5.0
# Results that the cluster keeps for other hosts.
_MOST_KEPT_BYTES = 256 * 1024**2


class DaskWorkers:
    """The workers of a Dask cluster."""

    def __init__(self, address: str) -> None:
        """Connect to the scheduler; raise ClusterError if that fails."""
        try:
            import distributed
            from distributed.comm import addressing
        except ImportError:
            raise ClusterError("this needs the package distributed: pip install 'jax-xcache[dask]'") from None
        for name in ("distributed", "distributed.client"):
            # Each task says what went wrong with it; distributed would add tracebacks.
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._closed = threading.Event()
        # The cluster keeps what somebody still refers to. Another host that wants the same later gets it from there.
        self._lock = threading.Lock()
        self._done: deque[tuple[Any, int]] = deque()
        self._done_bytes = 0
        try:
            # A client that was not told where to connect would wait when it goes.
            addressing.get_address_host_port(address)
            self._client = distributed.Client(address, timeout=_CONNECT_SECONDS, set_as_default=False)
            try:
                self._count = sum(map(int, self._client.nthreads(callback_timeout=_CONNECT_SECONDS).values()))
            except BaseException:
                self.close()
                raise
        except (OSError, ValueError, TypeError) as error:
            raise ClusterError(f"no Dask scheduler answers at {address}: {error}") from None

    def count(self) -> int:
        """Return how many tasks the cluster runs at once."""
        return max(1, self._count)

    def compile(self, task: Task) -> dict[str, Any]:
        """Have the cluster compile."""
        told = (task.message(), tuple(task.place), task.bound)
        try:
            future = self._client.submit(compile_there, *told, key=f"xcache-{task.key}", retries=0)
            try:
                found = self._result_of(future, task.bound)
            except BaseException:
                # To cancel it would be told to all clients, and one that has just asked for the same would lose it.
                future.release()
                raise
        except WorkerError:
            raise
        except CancelledError:
            raise WorkerError("the cluster gave it up, or its scheduler is gone") from None
        except Exception as error:  # noqa: BLE001 - whatever the cluster's machine raised
            raise WorkerError(f"on the cluster: {type(error).__name__}: {error}") from None
        if "packed" in found:
            self._keep(future, len(found["packed"]))
        return found

    def close(self) -> None:
        """Give up what is not done, and disconnect."""
        self._closed.set()
        # The scheduler may be gone, or hang.
        with contextlib.suppress(Exception):
            self._client.close(timeout=_CLOSE_SECONDS)

    def _result_of(self, future: Any, bound: float) -> dict[str, Any]:
        left = bound + _MORE_SECONDS
        while not self._closed.is_set() and left > 0:
            try:
                return _checked(future.result(timeout=_POLL_SECONDS))
            except TimeoutError:
                # The task itself may have raised one.
                if future.status == "error":
                    raise
            # A queue that is long says nothing about this task.
            left -= _POLL_SECONDS if future.status == "pending" and self._is_running(future.key) else 0.0
        raise WorkerError("it was interrupted" if self._closed.is_set() else "the cluster did not do it in time")

    def _keep(self, future: Any, size: int) -> None:
        """Refer to a result until this ends, or there is too much."""
        with self._lock:
            self._done.append((future, size))
            self._done_bytes += size
            while self._done_bytes > _MOST_KEPT_BYTES:
                oldest, size = self._done.popleft()
                self._done_bytes -= size
                oldest.release()

    def _is_running(self, key: str) -> bool:
        # processing() of the client waits for ever for a scheduler that hangs.
        found = self._client.sync(self._client.scheduler.processing, workers=None, callback_timeout=_CONNECT_SECONDS)
        return any(key in keys for keys in found.values())


def _checked(answer: Any) -> dict[str, Any]:
    """Return an answer of the cluster if it has the form of one; raise WorkerError."""
    if not isinstance(answer, dict) or not isinstance(answer.get("packed", b""), bytes):
        raise WorkerError("the cluster gave an answer that cannot be read")
    return answer


def compile_there(message: dict[str, Any], place: tuple[Any, ...], seconds: float) -> dict[str, Any]:
    """Compile on a machine of the cluster, in a worker process."""
    try:
        with _kept.in_use() as workers:
            return workers.ask(Place(*place), message, seconds)
    except NoWorkerError as error:
        return {"refused": str(error)}
    except WorkerError as error:
        return {"failed": str(error)}


class _Kept:
    """The worker processes of this process of the cluster: its tasks use them one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: LocalWorkers | None = None
        self._users = 0
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[LocalWorkers]:
        """Yield the worker processes; they end when nobody has used them for a while."""
        with self._lock:
            workers = self._workers = self._workers or LocalWorkers(this_python())
            self._users += 1
            if self._timer is not None:
                self._timer.cancel()
        try:
            yield workers
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._timer = threading.Timer(_IDLE_SECONDS, self._end)
                    self._timer.daemon = True
                    self._timer.start()

    def _end(self) -> None:
        with self._lock:
            if self._users or self._workers is None:
                return
            workers, self._workers = self._workers, None
        workers.close()


_kept = _Kept()
