"""Collect what jax is about to compile instead of compiling it: ``xcache.prebuild`` has it compiled elsewhere."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Wanted(NamedTuple):
    """The arguments of jax's ``compile_or_get_cached``."""

    backend: Any
    computation: Any
    devices: Any
    compile_options: Any
    host_callbacks: Any
    executable_devices: Any
    pgle_profiler: Any = None


class _Collected(Exception):  # noqa: N818 - it takes the arguments past jax
    def __init__(self, wanted: Wanted) -> None:
        super().__init__()
        self.wanted = wanted


class _Thread(threading.local):
    is_collecting = False


_thread = _Thread()


def stop_if_collecting(skipping: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Leave jax with these arguments of its function, if this thread collects them; the module is a real one then."""
    if _thread.is_collecting:
        wanted = Wanted(*arguments, **options)
        late = skipping.late(wanted.computation)
        raise _Collected(wanted if late is None else wanted._replace(computation=late.lowered()))


def collected(compile_now: Callable[[], object]) -> Wanted | None:
    """Return what a call has jax compile; None if it did without the hook, and has compiled it."""
    try:
        with _collecting():
            compile_now()
    except _Collected as found:
        return found.wanted
    return None


@contextlib.contextmanager
def _collecting() -> Iterator[None]:
    before, _thread.is_collecting = _thread.is_collecting, True
    try:
        yield
    finally:
        _thread.is_collecting = before
