"""Turn executables into bytes and back, with every supported version of jaxlib.

| behaviour | jaxlib versions |
|---|---|
| ``executable.serialize()`` in place of ``client.serialize_executable(executable)`` | since 0.8.0 |
| a loaded executable forgets the layout of its results, which makes wrong numbers | 0.8.0 to before 0.9.2 |
| loading on CPU logs an ERROR about the compiler's own tuning preferences, twice an executable | 0.8.0 to 0.9.2 |
| ``deserialize_executable`` takes ``host_callbacks`` | since 0.11.0 |
| two threads must not make the first iteration over a ``DeviceList`` at once | until 0.11 |

On CPU, serializing a deserialized executable gives bytes that load and then cannot be run. A program without xcache
never meets this, so serializing such an executable returns the bytes it was loaded from, also after xcache was switched
off.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xcache.errors import UncacheableError
from xcache.signals import reraise_if_the_programs
from xcache.wire import envelope

# Names of operations and of custom call targets, as MLIR bytecode spells them.
# Searched for one by one: a regular expression takes a second for a hundred megabytes of constants.
_BECOME_SORTS = (b"\0sort\0", b"top_k", b"topk", b"TopK")


def iterate_once(devices: Any) -> None:
    """Make the process's first iteration over a ``DeviceList`` under a lock.

    The first iteration makes the iterator's type. If the garbage collector runs meanwhile and calls into Python,
    another thread may get the GIL, and it crashes if it uses the half-made type.
    """
    global _iterated
    if not _iterated:
        with _iterating:
            try:
                iter(devices)
            except TypeError as error:
                reraise_if_the_programs(error)
            _iterated = True


_iterated = False
_iterating = threading.RLock()


def serialize(client: Any, executable: Any) -> bytes:
    """Serialize an executable that this process compiled; raise UncacheableError if jaxlib would load it wrongly."""
    if (0, 8, 0) <= _version() < (0, 9, 2) and not _usual_layouts(executable):
        raise UncacheableError("result layouts that this jaxlib forgets")
    if hasattr(executable, "serialize"):
        return bytes(executable.serialize())
    return bytes(client.serialize_executable(executable))


def must_be_serialized_first(platform: str, program: bytes) -> bool:
    """Return whether the executable may not be serializable once it has run.

    XLA:CPU inserts the comparison functions of sorts when they run, and turns a top_k of most types into a sort. A
    program that this overlooks is serialized first in its next run.
    """
    return platform == "cpu" and any(name in program for name in _BECOME_SORTS)


def deserialize(client: Any, raw: bytes, devices: Any, options: Any, host_callbacks: Sequence[Any] = ()) -> Any:
    """Load an executable from its bytes onto ``devices``."""
    with _quiet.muted() if client.platform == "cpu" and _loading_is_noisy() else contextlib.nullcontext():
        if host_callbacks:
            return client.deserialize_executable(raw, devices, options, host_callbacks)
        return client.deserialize_executable(raw, devices, options)


class FirstGeneration:
    """The stored bytes an executable was loaded from, compressed as in the store.

    They stay in memory: to keep the file instead would take a descriptor per executable, and a program may be short of
    descriptors.
    """

    def __init__(self, key: str, digest: str, sealed: bytes) -> None:
        self._key = key
        self._digest = digest
        self._sealed = sealed

        # Compiles the program as this process has it; None if it is not known how.
        self.compile_anew: Callable[[], Any] | None = None
        # What was asked of it, by the method.
        self._shown: dict[Callable[[Any], Any], Any] = {}

    def raw(self) -> bytes:
        """Return the serialized executable."""
        return envelope.open_sealed(self._key, self._digest, self._sealed)

    def show(self, method: Callable[[Any], Any], loaded: Any) -> Any:
        """Return what a method says of the program compiled here, or of the loaded executable if it cannot be."""
        if method not in self._shown and self.compile_anew is not None:
            try:
                if (compiled := self.compile_anew()) is not None:
                    self._shown[method] = method(compiled)
            except BaseException as error:  # noqa: BLE001 - lowering late or the compiler may raise anything
                reraise_if_the_programs(error)
        return self._shown[method] if method in self._shown else method(loaded)


# By id(). jaxlib's executables cannot be referenced weakly, but each keeps its FirstGeneration alive. When one is
# freed, its entry here goes before another object can get its address.
_loaded: weakref.WeakValueDictionary[int, FirstGeneration] = weakref.WeakValueDictionary()


def remember(executable: Any, generation: FirstGeneration) -> None:
    """Tie an executable to the bytes it came from, for as long as it lives."""
    if hasattr(executable, "keep_alive"):
        executable.keep_alive(generation)
        _loaded[id(executable)] = generation


def show_as_compiled(executable: Any, compile_anew: Callable[[], Any]) -> None:
    """Have a loaded executable show the text of one compiled here, with this program's files and functions.

    The files and functions in a program's text are no part of its key, so an executable has those of the process that
    stored it.
    """
    if (generation := _loaded.get(id(executable))) is not None:
        generation.compile_anew = compile_anew


# How many caches need jaxlib's methods replaced, and what undoes it. Changed under ``process_cache.switching``.
_users = 0
_replaced = contextlib.ExitStack()


@contextlib.contextmanager
def serialize_first_generation() -> Iterator[None]:
    """Make jaxlib serialize each loaded executable as the bytes it was loaded from.

    At the end jaxlib's own methods are back, unless a loaded executable is still there: it needs this to its end.
    """
    global _users
    if not _users:
        _replaced.close()
        _replace_serialize()
    _users += 1
    try:
        yield
    finally:
        _users -= 1
        if not _users and not _loaded:
            _replaced.close()


def _replace_serialize() -> None:
    from jaxlib import xla_client

    # The method moved from the client to the executable in 0.8; some versions have both.
    for owner, name in ((xla_client.LoadedExecutable, "serialize"), (xla_client.Client, "serialize_executable")):
        if hasattr(owner, name):
            original = getattr(owner, name)
            setattr(owner, name, _answering(original))
            _replaced.callback(setattr, owner, name, original)
    # Newer versions have both.
    for name in ("hlo_modules", "get_hlo_text"):
        if hasattr(xla_client.LoadedExecutable, name):
            original = getattr(xla_client.LoadedExecutable, name)
            setattr(xla_client.LoadedExecutable, name, _as_compiled(original))
            _replaced.callback(setattr, xla_client.LoadedExecutable, name, original)


def _answering(original: Callable[..., bytes]) -> Callable[..., bytes]:
    @functools.wraps(original)
    def serialize(*args: Any, **kwargs: Any) -> bytes:
        # The executable is the last positional argument of both methods: self, or the client's argument.
        generation = _loaded.get(id(args[-1])) if args else None
        return original(*args, **kwargs) if generation is None else generation.raw()

    return serialize


def _as_compiled(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def show(executable: Any) -> Any:
        generation = _loaded.get(id(executable))
        return original(executable) if generation is None else generation.show(original, executable)

    return show


def _usual_layouts(executable: Any) -> bool:
    """Return whether all results are laid out with their last dimension innermost: ``{1,0}`` for a matrix."""
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
    """Return whether loading on CPU logs kilobytes of ERROR lines about sound executables.

    The lines complain of ``prefer-no-gather`` and ``prefer-no-scatter``, which XLA adds to the processor's features and
    then misses in the processor. The features that an executable really needs are in its key.
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
        """Restore the level in a forked child, which has none of the threads that were inside."""
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
        """Return the level in force without muting. jaxlib cannot report it, so this follows jax's own rules."""
        levels = {"DEBUG": 0, "INFO": 0, "WARN": 1, "WARNING": 1, "ERROR": 2, "FATAL": 3, "CRITICAL": 3}
        jax = sys.modules.get("jax")
        asked = getattr(jax.config, "jax_logging_level", None) if jax else None
        if asked in levels:
            return levels[asked]
        said = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "")
        # jax asks for warnings and above unless the environment says otherwise.
        return int(said) if said.isdigit() else int(jax is not None)


_quiet = _Quiet()


def _begin_in_child() -> None:
    global _iterating
    _iterating = threading.RLock()
    _quiet.begin_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
