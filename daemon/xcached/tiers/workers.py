"""Threads for work that may take long or hang. The process does not wait for them, as it does for an executor's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_Work = Callable[[], None]


class Workers:
    """At most so many threads, begun when they are wanted. One that hangs keeps its place."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._idle = threading.Semaphore(0)
        self._works: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()

    async def do(self, work: Callable[[], _T]) -> _T:
        """Return what ``work`` returns. Work that has not begun when the caller is cancelled is not done."""
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def answered() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(work())
                except BaseException as error:  # noqa: BLE001 - it goes to who waits
                    answer.set_exception(error)

        self._works.put(answered)
        if not self._idle.acquire(blocking=False) and self._count < self._most:
            threading.Thread(target=self._run, name="xcached-tier", daemon=True).start()
            self._count += 1
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """End the threads once they have nothing to do."""
        for _ in range(self._count):
            self._works.put(None)
        self._count = 0

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work()
            # Neither the work nor its result lives on with the thread.
            del work
            self._idle.release()
