"""Trace a function once more, with nothing that jax remembers: a function that gives another program has no record.

A function that reads a random number, the time, or a value that it changes itself, is found so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import config
from jax._src.lib import _jax

from xcache.errors import UnsupportedError
from xcache.hook.structure import jaxprs
from xcache.hook.structure.encoding import Encoding, MustLowerError

# A value of jax's trace context: where it differs, jax remembers nothing. Making one empties jax's caches; jax has one
# of its own since 0.10, for a cache of its dispatcher.
_CONTEXT: Any = getattr(config, "jax_jit_cpp_cache_obj", None)
if _CONTEXT is None and hasattr(jax, "make_user_context"):
    _CONTEXT = jax.make_user_context()


def check() -> None:
    """Raise UnsupportedError if this version of jax cannot be made to trace anew."""
    if _CONTEXT is None:
        raise UnsupportedError("it always uses what it has traced before")


def compare(traced: Any, trace: Callable[[], Any]) -> None:
    """Raise MustLowerError unless ``trace`` gives what was traced, and nothing that only this process has."""
    if traced.jaxpr.effects:
        raise MustLowerError("effects")
    with _CONTEXT(_jax.PjitFunctionCache(capacity=4096)):
        again = trace()
    (first, constants), (second, others) = map(_described, (traced.jaxpr, again.jaxpr))
    if first != second or traced.out_tree != again.out_tree:
        raise MustLowerError("another program when it is traced again")
    # A trace makes its own constants. What two of them share outlives them, and may differ in the next process.
    if {*map(_place, constants)} & {*map(_place, others)}:
        raise MustLowerError("constant of the program")


def _place(constant: Any) -> int:
    """Return what two arrays have in common only if one is the other, or shows its elements."""
    if isinstance(constant, jax.Array):
        return id(constant)
    place: int = np.asarray(constant).__array_interface__["data"][0]
    return place


def _described(jaxpr: Any) -> tuple[str, list[Any]]:
    encoding = Encoding()
    jaxprs.program(encoding, jaxpr)
    return encoding.digest(), encoding.constants
