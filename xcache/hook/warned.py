"""Notes of what Python and numpy warn of while jax lowers or traces: without that work, nobody would be warned."""

from __future__ import annotations

import contextlib
import os
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

    numpy gives its warnings from C, where nobody can count them.
    """
    errors: list[str] = []
    with np.errstate(all="call", call=lambda kind, _: errors.append(kind)):
        yield errors


def modules_that_warn() -> list[types.ModuleType]:
    """Return the modules of jax that use Python's ``warnings``."""
    # A copy, as wherever another thread may import a module meanwhile: making pairs of its items may run Python code.
    modules = [module for name, module in sys.modules.copy().items() if name.startswith("jax.")]
    return [module for module in modules if getattr(module, "__dict__", {}).get("warnings") is warnings]


class CountingWarnings(types.ModuleType):
    """Python's ``warnings``, for modules of jax that may warn while jax lowers."""

    def __init__(self, count: Callable[[], None]) -> None:
        super().__init__("warnings")
        self.__wrapped__ = warnings
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
    outer = _collecting.warned
    warned: list[Any] = []
    try:
        _collecting.warned = warned
        with _replaced_warnings:
            yield warned
    finally:
        _collecting.warned = outer


class _Collecting(threading.local):
    """Where this thread's warnings go; None for where they always go."""

    warned: list[Any] | None = None


class _ReplacedWarnings:
    """The functions that warn, replaced while any thread collects warnings: threads may end in another order."""

    def __init__(self) -> None:
        # Ctrl-C may arrive while this thread holds the lock.
        self._lock = threading.RLock()
        self._threads = 0
        self._originals: dict[str, Any] = {}
        self._made = {"warn": self._warn, "warn_explicit": self._warn_explicit}

    def begin_in_child(self) -> None:
        """Renew the lock in a forked child, because another thread of the parent may have held it."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        with self._lock:
            self._threads += 1
            if self._threads == 1 and warnings.warn is not self._made["warn"]:
                self._originals = {name: getattr(warnings, name) for name in self._made}
                vars(warnings).update(self._made)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if self._threads == 0:
                for name, original in self._originals.items():
                    if getattr(warnings, name) is self._made[name]:
                        setattr(warnings, name, original)

    def _warn(self, message: Any, category: Any = None, stacklevel: int = 1, *others: Any, **options: Any) -> None:
        if _collecting.warned is not None:
            _collecting.warned.append(message)
        else:
            self._originals["warn"](message, category, stacklevel + 1, *others, **options)

    def _warn_explicit(self, message: Any, *others: Any, **options: Any) -> None:
        if _collecting.warned is not None:
            _collecting.warned.append(message)
        else:
            self._originals["warn_explicit"](message, *others, **options)


_collecting = _Collecting()
_replaced_warnings = _ReplacedWarnings()
os.register_at_fork(after_in_child=_replaced_warnings.begin_in_child)
