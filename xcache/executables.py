"""Executables to bytes and back, by jaxlib's ways in all its versions.

| what | since or until which jaxlib |
|---|---|
| ``executable.serialize()`` in place of ``client.serialize_executable(executable)`` | 0.8.0 |
| a loaded executable forgets the layout of its results, and wrong numbers come of it | 0.8.0 to before 0.9.2 |
| loading on CPU logs an ERROR about the compiler's own tuning preferences, twice an executable | 0.8.0 to 0.9.2 |
| ``deserialize_executable`` takes ``host_callbacks`` | 0.11.0 |
| the first iteration over a ``DeviceList`` must not be beside another | until 0.11 |

Serializing an executable that was itself deserialized gives bytes that load and then cannot be run (on CPU). A program
that runs without xcache never meets this, so while xcache is on, serializing such an executable answers with the bytes
it was loaded from.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xcache import payload
from xcache.errors import UncacheableError
from xcache.handlers import let_pass


def iterate_once(devices: Any) -> None:
    """Have the first iteration over a ``DeviceList`` in this process to itself; what comes later needs no care.

    jaxlib makes the iterator's type then. If the garbage collector runs meanwhile and calls into Python, the GIL may go
    to another thread, which crashes if it has use for the half-made type.
    """
    global _iterated
    if not _iterated:
        with _iterating:
            try:
                iter(devices)
            except TypeError as error:
                let_pass(error)
            _iterated = True


_iterated = False
_iterating = threading.RLock()


def serialize(client: Any, executable: Any) -> bytes:
    """The bytes of an executable that was compiled in this process; UncacheableError if they cannot be relied upon."""
    if (0, 8, 0) <= _version() < (0, 9, 2) and not _usual_layouts(executable):
        raise UncacheableError("result layouts that this jaxlib forgets")
    if hasattr(executable, "serialize"):
        return bytes(executable.serialize())
    return bytes(client.serialize_executable(executable))


def must_be_serialized_first(platform: str, program: bytes) -> bool:
    """Whether it cannot be serialized any more once it has run: XLA:CPU puts in the comparisons of sorts then."""
    # The name of an operation, as it stands in the strings of MLIR bytecode.
    return platform == "cpu" and b"\x00sort\x00" in program


def deserialize(client: Any, raw: bytes, devices: Any, options: Any, host_callbacks: Sequence[Any] = ()) -> Any:
    """An executable from its bytes, loaded onto ``devices``."""
    with _quiet.muted() if client.platform == "cpu" and _loading_is_noisy() else contextlib.nullcontext():
        if host_callbacks:
            return client.deserialize_executable(raw, devices, options, host_callbacks)
        return client.deserialize_executable(raw, devices, options)


class FirstGeneration:
    """The bytes an executable was loaded from, sealed as they were stored."""

    def __init__(self, key: str, digest: str, sealed: bytes | mmap.mmap) -> None:
        self._key = key
        self._digest = digest
        self._sealed = sealed

    def raw(self) -> bytes:
        """The serialized executable."""
        return payload.open_sealed(self._key, self._digest, memoryview(self._sealed))


# By identity. jaxlib's executables cannot be referenced weakly, but each keeps alive what it is told to: when one is
# freed its FirstGeneration goes with it, and the entry here before its address can be used again.
_loaded: weakref.WeakValueDictionary[int, FirstGeneration] = weakref.WeakValueDictionary()


def remember(executable: Any, generation: FirstGeneration) -> None:
    """Tie an executable to the bytes it came from, for as long as it lives."""
    if hasattr(executable, "keep_alive"):
        executable.keep_alive(generation)
        _loaded[id(executable)] = generation


@contextlib.contextmanager
def serialize_first_generation() -> Iterator[None]:
    """While this is open, jaxlib serializes loaded executables as the bytes they were loaded from."""
    from jaxlib import xla_client

    with contextlib.ExitStack() as stack:
        # The method moved from the client to the executable in 0.8; both exist for a while.
        for owner, name in ((xla_client.LoadedExecutable, "serialize"), (xla_client.Client, "serialize_executable")):
            if hasattr(owner, name):
                original = getattr(owner, name)
                setattr(owner, name, _answering(original))
                stack.callback(setattr, owner, name, original)
        yield


def _answering(original: Callable[..., bytes]) -> Callable[..., bytes]:
    def serialize(*args: Any, **kwargs: Any) -> bytes:
        # The executable is the last positional argument of both: self, or the one the client is given.
        generation = _loaded.get(id(args[-1])) if args else None
        return original(*args, **kwargs) if generation is None else generation.raw()

    return serialize


def _usual_layouts(executable: Any) -> bool:
    """Whether all results are laid out with their last dimension innermost: ``{1,0}`` for a matrix."""
    for layout in executable.get_output_layouts():
        order = [int(n) for n in re.findall(r"\d+", str(layout).partition("{")[2].partition("}")[0].partition(":")[0])]
        if order != sorted(order, reverse=True):
            return False
    return True


@functools.cache
def _version() -> tuple[int, ...]:
    import jaxlib

    return tuple(int(part) for part in re.findall(r"\d+", jaxlib.__version__)[:3])


@functools.cache
def _loading_is_noisy() -> bool:
    """Whether loading on CPU writes kilobytes of ERROR lines about executables with nothing wrong with them.

    They complain of ``prefer-no-gather`` and ``prefer-no-scatter``, which XLA adds to what it compiles and does not
    find in the processor. What an executable needs of the processor is in its key.
    """
    from jaxlib import utils

    return (0, 8) <= _version() < (0, 10) and hasattr(utils, "absl_set_min_log_level")


class _Quiet:
    """Holds back jaxlib's ERROR lines while any thread is inside ``muted()``."""

    _ERROR_AND_BELOW = 3

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inside = 0

    def begin_in_child(self) -> None:
        """After a fork: the threads that were inside are not here."""
        was_muted, self._lock, self._inside = self._inside > 0, threading.RLock(), 0
        if was_muted:
            from jaxlib import utils

            utils.absl_set_min_log_level(self._usual_level())

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        from jaxlib import utils

        with self._lock:
            self._inside += 1
            if self._inside == 1:
                utils.absl_set_min_log_level(self._ERROR_AND_BELOW)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    utils.absl_set_min_log_level(self._usual_level())

    @staticmethod
    def _usual_level() -> int:
        """The level that was in force: jaxlib lets it be set and not read, so it is worked out as jax does."""
        levels = {"DEBUG": 0, "INFO": 0, "WARN": 1, "WARNING": 1, "ERROR": 2, "FATAL": 3, "CRITICAL": 3}
        jax = sys.modules.get("jax")
        asked = getattr(jax.config, "jax_logging_level", None) if jax else None
        if asked in levels:
            return levels[asked]
        said = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "")
        # jax itself asks for warnings and above when nobody else has asked.
        return int(said) if said.isdigit() else int(jax is not None)


_quiet = _Quiet()


def _begin_in_child() -> None:
    global _iterating
    _iterating = threading.RLock()
    _quiet.begin_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
