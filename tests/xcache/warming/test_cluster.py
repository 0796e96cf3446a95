"""A cluster may answer anything, and costs only the program that was asked for."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import distributed
import pytest

from xcache.errors import WorkerError
from xcache.warming.building import Task
from xcache.warming.cluster import DaskWorkers
from xcache.warming.place import Place

TASK = Task("key", "jit_f", Place(*[""] * len(Place._fields)), {}, b"", 0.0, bytes)


class FakeClient:
    """A client of a cluster whose tasks have ended, all in the same way."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def submit(self, *_: object, key: str, retries: int) -> Any:
        assert (key, retries) == ("xcache-key", 0)
        future: Any = Future()
        future.release = lambda: None
        if isinstance(self._answer, BaseException):
            future.set_exception(self._answer)
            future.status = "error"
        else:
            future.set_result(self._answer)
            future.status = "finished"
        return future

    def nthreads(self, **_: object) -> dict[str, int]:
        return {}

    def close(self, timeout: float) -> None:
        pass


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        *((each, "cannot be read") for each in (None, 5, ["packed"], {"packed": 7})),
        # A wait for an answer raises this, too.
        (TimeoutError("a file system does not answer"), "a file system does not answer"),
    ],
)
def test_a_cluster_that_answers_something_else(monkeypatch, answer, said):
    monkeypatch.setattr(distributed, "Client", lambda *_, **__: FakeClient(answer))
    workers = DaskWorkers("tcp://somewhere")
    with pytest.raises(WorkerError, match=said):
        workers.compile(TASK)
    workers.close()
