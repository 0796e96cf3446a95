"""Trace a function once more, with nothing that jax remembers, and refuse a record if the program differs.

This finds a function that reads a random number, the time, a file, or a value that it changes itself.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import config
from jax._src.lib import _jax

from xcache.errors import UnsupportedError
from xcache.hook.structure import jaxprs
from xcache.hook.structure.encoding import CannotSkipError, Encoding
from xcache.hook.warned import collected_warnings, errors_of_numpy
from xcache.signals import is_from_handler

# A setting in jax's trace context: under a new value jax traces again. Adding a setting clears jax's caches, so use
# jax's own where there is one (since 0.10).
_CONTEXT: Any = getattr(config, "jax_jit_cpp_cache_obj", None)
if _CONTEXT is None and hasattr(jax, "make_user_context"):
    _CONTEXT = jax.make_user_context()


# What Python reports of code that reads from outside of its process.
_READING = frozenset((
    "open", "os.listdir", "os.scandir", "os.system", "os.fork", "os.posix_spawn", "subprocess.Popen", "mmap.__new__",
    "socket.connect", "socket.getaddrinfo", "sqlite3.connect",
))  # fmt: skip
_CODE = (".py", ".pyc", ".so")
# A list for each thread whose reports are wanted.
_watching = threading.local()
DIFFERS = "another program when it is traced again"


def check() -> None:
    """Raise UnsupportedError if this version of jax cannot be made to trace anew."""
    if _CONTEXT is None:
        raise UnsupportedError("this jax cannot trace a function again")


@functools.cache
def _listen() -> None:
    """Have Python report, from now on: it has no way to stop."""
    sys.addaudithook(_note)


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    found = getattr(_watching, "found", None)
    if found is not None and event in _READING and not str(arguments[0]).endswith(_CODE):
        found.append(event)


@contextlib.contextmanager
def _what_is_read() -> Iterator[list[str]]:
    """Collect what this thread reads from outside of the process, but code."""
    _listen()
    _watching.found = found = list[str]()
    try:
        yield found
    finally:
        _watching.found = None


def compare(traced: Any, trace: Callable[[], Any]) -> None:
    """Raise CannotSkipError unless ``trace`` gives what was traced, without a warning, and shares no array with it."""
    if traced.jaxpr.effects:
        raise CannotSkipError("effects")
    with (
        _CONTEXT(_jax.PjitFunctionCache(capacity=4096)),
        collected_warnings() as warnings,
        errors_of_numpy() as errors,
        _what_is_read() as read,
    ):
        try:
            again = trace()
        except SystemExit as error:
            if is_from_handler(error):
                raise
            # The function does not want to be traced twice.
            raise CannotSkipError(DIFFERS) from None
    if read:
        raise CannotSkipError(f"outside the program: {read[0]}")
    if warnings or errors:
        # Python may hide it: by default it shows a DeprecationWarning only of the program's main module.
        raise CannotSkipError(f"it warns: {_shown((*warnings, *errors)[0])}")
    (first, constants), (second, others) = map(_described, (traced.jaxpr, again.jaxpr))
    if first != second or traced.out_tree != again.out_tree:
        raise CannotSkipError(DIFFERS)
    # Each trace makes its own constants. One that both share is older than they are, and the next process may have
    # another.
    if {*map(_identity, constants)} & {*map(_identity, others)}:
        raise CannotSkipError("constant of the program")


def _shown(warning: Any) -> str:
    """Return a warning, which is an object, a text or the name of one of numpy's errors, in one line."""
    kind = f"{type(warning).__name__}: " if isinstance(warning, Warning) else ""
    return " ".join(f"{kind}{warning}".split())[:200]


def _identity(constant: Any) -> int:
    """Return an array's identity, or the address of a numpy array's data, which views share."""
    if isinstance(constant, jax.Array):
        return id(constant)
    place: int = np.asarray(constant).__array_interface__["data"][0]
    return place


def _described(jaxpr: Any) -> tuple[str, list[Any]]:
    encoding = Encoding()
    jaxprs.program(encoding, jaxpr)
    return encoding.digest(), encoding.constants
