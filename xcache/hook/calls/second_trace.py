"""Trace a function once more, with nothing that jax remembers, and refuse a record if the program differs.

This finds a function that reads a random number, the time, a file, or a value that it changes itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import config
from jax._src.lib import _jax

from xcache.hook.structure import jaxprs  # noqa: F401 - its types of the table
from xcache.hook.structure.encoding import CannotSkipError, Encoding
from xcache.hook.warned import collected_warnings, errors_of_numpy
from xcache.signals import is_from_handler

# A setting in jax's trace context: under a new value jax traces again. Adding a setting clears jax's caches, so use
# jax's own where there is one (since 0.10). Before 0.8 there is neither, and no ``xcache.jit``.
_CONTEXT: Any = config.jax_jit_cpp_cache_obj if hasattr(config, "jax_jit_cpp_cache_obj") else jax.make_user_context()
DIFFERS = "another program when it is traced again"


def _bytes_read() -> tuple[int, int]:
    """Return how many bytes this thread has read from files and pipes, without this look at them and with it."""
    try:
        place = os.open("/proc/thread-self/io", os.O_RDONLY)
    except OSError:  # not Linux
        return 0, 0
    try:
        told = os.read(place, 4096)
    finally:
        os.close(place)
    before = int(told.split()[1])
    return before, before + len(told)


def compare(traced: Any, trace: Callable[[], Any]) -> None:
    """Raise CannotSkipError unless ``trace`` gives what was traced, without a warning, and shares no array with it."""
    if traced.jaxpr.effects:
        raise CannotSkipError("effects")
    with (
        _CONTEXT(_jax.PjitFunctionCache(capacity=4096)),
        collected_warnings() as warnings,
        errors_of_numpy() as errors,
    ):
        _, before = _bytes_read()
        try:
            again = trace()
        except SystemExit as error:
            if is_from_handler(error):
                raise
            # The function does not want to be traced twice.
            raise CannotSkipError(DIFFERS) from None
        after, _ = _bytes_read()
    if after != before:
        raise CannotSkipError("outside the program: a file")
    if warnings or errors:
        # Python may hide it: by default it shows a DeprecationWarning only of the program's main module.
        raise CannotSkipError(f"it warns: {_shown((*warnings, *errors)[0])}")
    (first, constants), (second, others) = map(_described, (traced.jaxpr, again.jaxpr))
    if first != second or out_tree(traced) != out_tree(again):
        raise CannotSkipError(DIFFERS)
    # Each trace makes its own constants. One that both share is older than they are, and the next process may have
    # another.
    if {*map(_identity, constants)} & {*map(_identity, others)}:
        raise CannotSkipError("constant of the program")


def out_tree(traced: Any) -> Any:
    """Return the tree of the results of what was traced; jax 0.8.0 has it under another name."""
    return traced.out_tree if hasattr(traced, "out_tree") else traced._out_tree


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
    encoding.encode(jaxpr)
    return encoding.digest(), encoding.constants
