"""Build the entries that are missing, several at once, and put them into the store of this process's daemon."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Literal, NamedTuple, Protocol

from xcache.client.client import Client
from xcache.client.contents import HeldLease, SealedEntry
from xcache.errors import NoWorkerError, UncacheableError, WorkerError, XcacheError
from xcache.threads import processors, usual_stack
from xcache.warming.frames import unpacked
from xcache.warming.place import Place
from xcache.warming.process import Worker
from xcache.wire import protocol

# A compile may take as long as the first of these, or as many times what it took before, but no more than the last.
_LEAST_SECONDS, _TIMES, _MOST_SECONDS = 300.0, 10.0, 86400.0
# If nobody knows how long it takes.
_UNKNOWN_SECONDS = 3600.0
# The main thread looks for Ctrl-C as often.
_POLL_SECONDS = 0.5


class Task(NamedTuple):
    """An entry to build: its key and that key's components, what it is compiled from, and where."""

    key: str
    module_name: str
    place: Place
    components: dict[str, str]
    options: bytes
    # How long compiling took before; 0 if nobody knows.
    seconds: float
    # Reads the program when its turn has come: only those that are being compiled are in memory.
    program: Callable[[], bytes]

    @property
    def bound(self) -> float:
        """Seconds after which its process is given up."""
        known = min(max(_LEAST_SECONDS, _TIMES * self.seconds), _MOST_SECONDS)
        return known if self.seconds else _UNKNOWN_SECONDS

    def message(self) -> dict[str, Any]:
        """Return the message to a worker."""
        return {
            "action": "compile",
            "platform": self.place.platform,
            "program": self.program(),
            "options": self.options,
            "components": self.components,
        }


class Outcome(NamedTuple):
    """The outcome of a task.

    ``built`` and ``there`` have an entry now. ``refused`` means that only the process that lowered it can compile it;
    ``failed``, that its compile failed.
    """

    task: Task
    kind: Literal["built", "there", "refused", "failed"]
    reason: str = ""
    compile_seconds: float = 0.0


class Workers(Protocol):
    """Processes that compile, here or on other machines."""

    def compile(self, task: Task) -> dict[str, Any]:
        """Return the answer of a worker; raise XcacheError if there is none. Thread-safe."""

    def count(self) -> int:
        """Return how many compile at once, unless the user says otherwise."""

    def close(self) -> None:
        """End what is going on; a thread that waits for it gets an XcacheError."""


class LocalWorkers:
    """Workers on this machine: as many processes as threads ask at once, each for one place at a time."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._is_closed = False

    def compile(self, task: Task) -> dict[str, Any]:
        """Have a worker of the task's place compile."""
        return self.ask(task.place, task.message(), task.bound)

    def ask(self, place: Place, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer of a worker of this place; one that fails is not used again."""
        worker = self._take(place)
        try:
            answer = worker.ask(message, seconds)
        except BaseException:
            self._give_up(worker)
            raise
        with self._lock:
            self._busy.discard(worker)
            self._idle.append(worker)
        return answer

    def count(self) -> int:
        """Return the number of processors."""
        return processors()

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for worker in self._busy:
                worker.kill()
        for worker in idle:
            worker.close()

    def _take(self, place: Place) -> Worker:
        with self._lock:
            worker = next((each for each in self._idle if each.place == place), None)
            other = self._idle.pop() if worker is None and self._idle else None
            if worker is not None:
                self._idle.remove(worker)
                self._busy.add(worker)
        if other is not None:
            other.close()
        if worker is not None and not worker.is_running:
            # It ended while nobody asked it, which is not the next task's fault.
            self._give_up(worker)
            worker = None
        if worker is None:
            worker = Worker(self._python, place)
            with self._lock:
                self._busy.add(worker)
        if self._is_closed:
            self._give_up(worker)
            raise WorkerError("it was interrupted")
        return worker

    def _give_up(self, worker: Worker) -> None:
        with self._lock:
            self._busy.discard(worker)
        worker.close()


def workers_of(python: str, dask: str | None) -> Workers:
    """Return the workers of this machine, or of the Dask cluster at an address; raise ClusterError if there is none."""
    if dask is None:
        return LocalWorkers(python)
    from xcache.warming.cluster import DaskWorkers

    return DaskWorkers(dask)


class Builder:
    """Builds tasks through workers, and stores what they make."""

    def __init__(self, client: Client, workers: Workers, count: int | None, max_wait: float) -> None:
        """Build ``count`` tasks at once, by default as many as ``workers`` says.

        Each waits ``max_wait`` seconds for another process that compiles the same.
        """
        self._client = client
        self._workers = workers
        self._count = count or workers.count()
        self._max_wait = max_wait
        self._announced: set[str] = set()

    def build(self, tasks: Sequence[Task]) -> Generator[Outcome, None, None]:
        """Yield the outcome of each task as it comes. To end this early, close the iterator: all work ends."""
        with ThreadPoolExecutor(self._count, "xcache-build") as threads:
            try:
                with usual_stack():
                    waiting: set[Future[Outcome]] = {threads.submit(self._build, task) for task in tasks}
                while waiting:
                    # A wait without an end would not see Ctrl-C on all systems.
                    done, waiting = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
                    yield from (each.result() for each in done)
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                self._workers.close()

    def _build(self, task: Task) -> Outcome:
        lease = HeldLease()
        try:
            wanted = protocol.Get(
                task.key, self._max_wait, task.module_name[: protocol.MAX_NAME], task.components["program"]
            )
            if isinstance(self._client.get(wanted, lease), SealedEntry):
                return Outcome(task, "there")
            answer = self._workers.compile(task)
            if "packed" in answer:
                answer = unpacked(answer["packed"]) or {"failed": "its process gave no answer"}
            if "refused" in answer:
                return Outcome(task, "refused", str(answer["refused"]))
            if "failed" in answer:
                return Outcome(task, "failed", str(answer["failed"]))
            seconds = self._store(task, answer)
            # The daemon has ended the lease with the put.
            lease.hand_on()
            return Outcome(task, "built", compile_seconds=seconds)
        except UncacheableError as error:
            return Outcome(task, "refused", f"it is marked as not cacheable: {error}")
        except NoWorkerError as error:
            return Outcome(task, "refused", str(error))
        except XcacheError as error:
            return Outcome(task, "failed", str(error))
        finally:
            if held := lease.hand_on():
                self._release(*held)

    def _store(self, task: Task, answer: dict[str, Any]) -> float:
        try:
            put = protocol.Put(**answer["put"])
            announced = protocol.Announce(**answer["announce"])
            sealed, program = bytes(answer["sealed"]), bytes(answer["program"])
        except (KeyError, TypeError):
            raise WorkerError("its process gave an answer that cannot be read") from None
        if put.key != task.key or put.components != task.components:
            raise WorkerError("its process made another key")
        if announced.files and announced.toolchain not in self._announced:
            self._client.announce(announced, in_background=True)
            self._announced.add(announced.toolchain)
        self._client.put(put, sealed, program)
        return put.compile_seconds

    def _release(self, key: str, lease: int) -> None:
        # If this fails, the lease ends with its connection.
        with contextlib.suppress(XcacheError):
            self._client.release(key, lease)
