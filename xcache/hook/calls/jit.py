"""``xcache.jit``: jax's jit, whose calls are neither traced nor lowered where an earlier process did so."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from xcache.errors import UnsupportedError

logger = logging.getLogger("xcache")


def jit(fun: Callable[..., Any] | None = None, *, version: str, **options: Any) -> Any:
    """Return ``jax.jit(fun, **options)``, whose calls a later process neither traces nor lowers again.

    ``version`` stands for the code and its configuration: all that tracing reads beside the arguments. If it does not
    change with them, a later process runs the old program; ``xcache.version_of`` makes a good one. Without ``fun``,
    return a decorator.

    The function has one more method than jax's: ``prepare`` loads or compiles several calls at once and runs none. The
    function behaves as plain ``jax.jit`` with the cache off, under another transformation, and where tracing has an
    effect.
    """
    if not isinstance(version, str):
        raise TypeError(f"version must be a str, not {type(version).__name__}")
    if not version:
        raise ValueError("version is empty: it has to change with the code and its configuration")
    if fun is None:
        return functools.partial(jit, version=version, **options)
    import jax

    plain, function = jax.jit(fun, **options), None
    try:
        from xcache.hook.calls.dispatch import RecordedFunction

        function = RecordedFunction(fun, plain, version)
    except (ImportError, AttributeError, UnsupportedError) as error:
        logger.debug("xcache.jit is jax.jit with this version of jax: %s", error)
    jitted: Any = plain if function is None else function.jitted
    jitted.prepare = _preparing(plain, function)
    return jitted


def _preparing(plain: Any, function: Any) -> Callable[..., None]:
    def prepare_calls(*calls: Any) -> None:
        """Load or compile what these calls need, several at once, and run nothing.

        Each is a tuple of arguments, or ``inspect.signature(fun).bind(...)`` for a call with keywords. A
        ``jax.ShapeDtypeStruct`` stands for an array. The compiler's exceptions reach the program.
        """
        for call in calls:
            if not isinstance(call, (tuple, list, inspect.BoundArguments)):
                raise TypeError(f"each call is a tuple of arguments, not {type(call).__name__}")
        wanted = [
            (call.args, call.kwargs) if isinstance(call, inspect.BoundArguments) else (tuple(call), {})
            for call in calls
        ]  # fmt: skip
        if function is not None:
            function.prepare(wanted)
            return
        for arguments, keywords in wanted:
            plain.lower(*arguments, **keywords).compile()

    return prepare_calls
