"""A module that is lowered late, or never: it stands for the program that an alias names."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import config, source_info_util
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

from xcache.request import Alias

_CONTEXT = ir.Context()
# Held by the thread that has replaced jax's handlers of constants.
_replacing = threading.RLock()
_STATES = [state for state in vars(config).values() if hasattr(state, "swap_local") and not isinstance(state, type)]


class _Living:
    """The number of late modules that somebody may still ask for."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._count = 0
        self._waiting: list[Callable[[], None]] = []

    def begin_in_child(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = threading.RLock()

    def add(self, late: LateModule) -> None:
        """Count a late module until nobody holds it."""
        with self._lock:
            self._count += 1
        weakref.finalize(late, self._remove).atexit = False

    def when_none_is_left(self, call: Callable[[], None]) -> None:
        """Call this now, or when the last late module is gone."""
        with self._lock:
            if self._count:
                self._waiting.append(call)
                return
        call()

    def _remove(self) -> None:
        with self._lock:
            self._count -= 1
            calls, self._waiting = ([], self._waiting) if self._count else (self._waiting, [])
        for call in calls:
            call()


living = _Living()


class LateModule:
    """The program of one lowering that was skipped; jax caches it in place of the module.

    It must not refer to the jaxpr: jax's cache keeps it for as long as the jaxpr lives, so neither would ever be
    collected.
    """

    def __init__(self, alias: Alias, lower: Callable[[Any], Any], constants: list[Any]) -> None:
        self.alias = alias
        # jax's cache of compiles holds this in place of the module, and may compare it with other modules. It is empty,
        # so nobody can compile it by mistake.
        self.stand_in = ir.Module.create(ir.Location.unknown(_CONTEXT))
        self._lower = lower
        self._lock = threading.RLock()
        self._module: Any = None
        # The configuration and the program's constants as they are now; the program can change both.
        self._settings = settings()
        self._constants = [(constant, _content(constant)) for constant in constants]
        # Operations get the source location of the code that had them lowered.
        self._traceback = source_info_util.current().traceback
        living.add(self)

    @property
    def is_lowered(self) -> bool:
        """Whether somebody has asked for the module."""
        return self._module is not None

    def lowered(self, jaxpr: Any) -> Any:
        """Return the module, lowered as it would have been at the time."""
        with self._lock:
            if self._module is None:
                place = source_info_util.user_context(self._traceback)
                with under(self._settings), _replaced(self._constants), place:
                    self._module = self._lower(jaxpr)
                self._settings, self._constants = [], []
            return self._module


class BoundLateModule:
    """A late module together with its jaxpr, held by each of jax's objects that may ask for the module."""

    def __init__(self, late: LateModule, jaxpr: Any) -> None:
        self.late = late
        self._jaxpr = jaxpr

    @property
    def alias(self) -> Alias:
        """The alias that made lowering unnecessary."""
        return self.late.alias

    def lowered(self) -> Any:
        """Return the module, lowered as it would have been at the time."""
        return self.late.lowered(self._jaxpr)

    def __getattr__(self, name: str) -> Any:
        # Another library may look at the module that jax holds.
        return getattr(self.lowered(), name)

    def __str__(self) -> str:
        return str(self.lowered())


def settings() -> list[tuple[Any, Any]]:
    """Return jax's configuration as this thread sees it now."""
    return [(state, state.value) for state in _STATES]


@contextlib.contextmanager
def under(settings: list[tuple[Any, Any]]) -> Iterator[None]:
    """Have this thread see jax's configuration as it was when ``settings`` was called."""
    with contextlib.ExitStack() as undo:
        for state, value in settings:
            now = state.value
            if now is not value and now != value:
                undo.callback(state.set_local, state.swap_local(value))
        yield


def _content(constant: Any) -> np.ndarray[Any, Any]:
    """Return what an array holds now: a copy, unless the program can only delete it."""
    return np.asarray(constant) if isinstance(constant, jax.Array) else np.array(constant)


def _has_changed(constant: Any, before: np.ndarray[Any, Any]) -> bool:
    if isinstance(constant, jax.Array):
        return bool(constant.is_deleted())
    return bool(np.asarray(constant).tobytes() != before.tobytes())


def _begin_in_child() -> None:
    global _replacing
    _replacing = threading.RLock()
    living.begin_in_child()


# The parent may have been lowering on another thread.
os.register_at_fork(after_in_child=_begin_in_child)


@contextlib.contextmanager
def _replaced(constants: list[tuple[Any, Any]]) -> Iterator[None]:
    """Have this thread lower constants as they were, if the program has changed or deleted them since."""
    changed = {id(now): before for now, before in constants if _has_changed(now, before)}
    if not changed:
        yield
        return
    thread, handlers = threading.get_ident(), mlir._constant_handlers

    of_numpy = handlers[np.ndarray]

    def instead(handler: Callable[..., Any], value: Any, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != thread or id(value) not in changed:
            return handler(value, *arguments, **options)
        handler = of_numpy if isinstance(value, jax.Array) else handler
        return handler(changed[id(value)], *arguments, **options)

    # One thread at a time, because two that ended in another order than they began would leave a handler behind.
    with _replacing, contextlib.ExitStack() as undo:
        for kind in {type(now) for now, _ in constants}:
            undo.callback(handlers.__setitem__, kind, handlers[kind])
            handlers[kind] = functools.partial(instead, handlers[kind])
        yield
