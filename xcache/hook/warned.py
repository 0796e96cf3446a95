"""Notes of what Python and numpy warn of while jax lowers or traces: without that work, nobody would be warned."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


@contextlib.contextmanager
def errors_of_numpy() -> Iterator[list[str]]:
    """Have this thread note numpy's floating-point errors in a list, in place of all that they would give otherwise.

    What numpy gives comes from C, where nobody can count it.
    """
    errors: list[str] = []
    with np.errstate(all="call", call=lambda kind, _: errors.append(kind)):
        yield errors


def modules_that_warn() -> list[types.ModuleType]:
    """Return the modules of jax that use Python's ``warnings``."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("jax._src.")]
    return [module for module in modules if getattr(module, "__dict__", {}).get("warnings") is warnings]


class CountingWarnings(types.ModuleType):
    """Python's ``warnings``, for modules of jax that may warn while jax lowers."""

    def __init__(self, count: Callable[[], None]) -> None:
        super().__init__("warnings")
        self._count = count

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def warn(self, message: Any, category: Any = None, stacklevel: int = 1, *others: Any, **options: Any) -> None:
        """Count a warning, and give it for the caller's line."""
        self._count()
        warnings.warn(message, category, stacklevel + 1, *others, **options)


@contextlib.contextmanager
def collected_warnings() -> Iterator[list[Any]]:
    """Yield a list that gets what this thread warns of meanwhile; nobody else does, because the first trace said it.

    ``warnings.catch_warnings`` would have Python give warnings again that it gives only once.
    """
    warned: list[Any] = []
    thread = threading.get_ident()

    def warn(message: Any, category: Any = None, stacklevel: int = 1, *others: Any, **options: Any) -> None:
        if threading.get_ident() == thread:
            warned.append(message)
        else:
            originals["warn"](message, category, stacklevel + 1, *others, **options)

    def warn_explicit(message: Any, *others: Any, **options: Any) -> None:
        if threading.get_ident() == thread:
            warned.append(message)
        else:
            originals["warn_explicit"](message, *others, **options)

    made = {"warn": warn, "warn_explicit": warn_explicit}
    originals = {name: getattr(warnings, name) for name in made}
    try:
        vars(warnings).update(made)
        yield warned
    finally:
        for name, original in originals.items():
            if getattr(warnings, name) is made[name]:
                setattr(warnings, name, original)
