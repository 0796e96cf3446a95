"""Strike at each line of xcache's that a program's compile goes through, or at one in ``ONE_LINE_IN`` of them.

sys.settrace stands for a signal: it can be had at each line once, where a real one comes where it pleases. The programs
that import this compile one function first, so that everything is imported.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import jax
import numpy as np

import xcache

_FOLDER = os.path.dirname(xcache.__file__) + os.sep  # noqa: PTH120

x = np.arange(8.0, dtype=np.float32)

Where = tuple[str, int]
# Variables: the share of the lines that is struck, and a number that chooses others.
ONE_IN, SEED = "ONE_LINE_IN", "LINES_SEED"


class EveryLine:
    """Calls ``strike`` once for each line that is met."""

    def __init__(self, strike: Callable[[Where], None], passed_over: Collection[str] = ()) -> None:
        self.met: set[Where] = set()
        self._strike = strike
        self._passed_over = passed_over
        self._strikes_left = 0
        self._one_in, self._seed = (int(os.environ.get(name, usual)) for name, usual in ((ONE_IN, 1), (SEED, 0)))

    def try_all(self, attempt: Callable[[int], None], patience: int = 25, at_once: int = 1) -> None:
        """Make attempts until so many came through untouched that nothing new can be expected."""
        untouched, k = 0, 0
        while untouched < patience:
            before, self._strikes_left = len(self.met), at_once
            faulthandler.dump_traceback_later(20, exit=True)
            sys.settrace(self._trace)
            try:
                attempt(k)
            finally:
                sys.settrace(None)
            untouched = 0 if len(self.met) > before else untouched + 1
            k += 1
        faulthandler.cancel_dump_traceback_later()

    def go_on(self) -> None:
        """Strike on after a strike that raised: Python removes a trace function that raises."""
        sys.settrace(self._trace)

    def _is_chosen(self, where: Where) -> bool:
        name, line = where
        if name == threading.__file__:
            return True
        text = f"{self._seed} {name.removeprefix(_FOLDER)} {line}"
        return zlib.crc32(text.encode()) % self._one_in == 0

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not (name.startswith(_FOLDER) or _is_of_a_lock(frame)) or name in self._passed_over:
            return None
        where = (name, frame.f_lineno)
        if event == "line" and self._strikes_left and where not in self.met and self._is_chosen(where):
            self.met.add(where)
            self._strikes_left -= 1
            self._strike(where)
        return self._trace


def _is_of_a_lock(frame: FrameType) -> bool:
    """Return whether this is a method of threading's conditions and events, called by xcache."""
    caller = frame.f_back
    is_python = frame.f_code.co_filename == threading.__file__
    name = frame.f_code.co_qualname
    return (
        is_python
        and name.startswith(("Condition.", "Event."))
        and caller is not None
        and (caller.f_code.co_filename.startswith(_FOLDER))
    )


def lowered(k: int) -> Any:
    """Return a function of its own for each k, ready to be compiled."""
    return jax.jit(lambda v: v * k + 1).lower(x)


def check(compiled: Any, k: int) -> None:
    """Assert that the executable of ``lowered(k)`` is right."""
    assert np.array_equal(compiled(x), x * k + 1), k


def check_on_another_thread(k: int) -> None:
    """Assert that another thread can compile: no lock is left that this thread holds, and would not notice."""
    thread = threading.Thread(target=lambda: check(lowered(k).compile(), k), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "another thread waits for ever"


def descriptors() -> list[str]:
    """Return this process's open descriptors."""
    return os.listdir("/proc/self/fd")  # noqa: PTH208


def left_open(before: int, most: int) -> int | list[str]:
    """Return how many descriptors are open beyond ``before``, or all of them if that stays ``most`` or more."""
    # Threads that are still ending, and the collector, close theirs later.
    until = time.monotonic() + 20
    while (count := len(descriptors()) - before) >= most and time.monotonic() < until:
        gc.collect()
        time.sleep(0.1)
    return count if count < most else [os.path.realpath(f"/proc/self/fd/{one}") for one in descriptors()]
