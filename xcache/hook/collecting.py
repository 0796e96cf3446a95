"""Collect what jax is about to compile instead of compiling it: ``xcache.prebuild`` has it compiled elsewhere."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """The arguments of one call of jax's ``compile_or_get_cached``, by jax's names."""

    backend: Any
    computation: Any
    devices: Any
    compile_options: Any
    host_callbacks: Sequence[Any]
    executable_devices: Any
    pgle_profiler: Any = None


class _Collected(Exception):  # noqa: N818 - it takes the arguments past jax
    def __init__(self, asked: Asked) -> None:
        super().__init__()
        self.asked = asked


class _Thread(threading.local):
    is_collecting = False


_thread = _Thread()


def stop_if_collecting(skipping: Any, asked: Asked) -> None:
    """Leave jax with these arguments of its function, if this thread collects them; the module is a real one then."""
    if _thread.is_collecting:
        late = skipping.late(asked.computation)
        raise _Collected(asked if late is None else asked._replace(computation=late.lowered()))


def collected(compile_now: Callable[[], object]) -> Asked | None:
    """Return what a call has jax compile; None if it did without the hook, and has compiled it."""
    try:
        with _collecting():
            compile_now()
    except _Collected as found:
        return found.asked
    return None


@contextlib.contextmanager
def _collecting() -> Iterator[None]:
    before, _thread.is_collecting = _thread.is_collecting, True
    try:
        yield
    finally:
        _thread.is_collecting = before
