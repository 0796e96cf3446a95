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
    """Return ``jax.jit(fun, **options)``, which in a later process neither traces nor lowers what it did in this one.

    ``version`` stands for the code and its configuration: all that tracing reads beside the arguments. With a text
    that does not change with them, a later process runs the old program; ``xcache.version_of`` makes a good one.
    Without ``fun``, return a decorator.

    What is returned has a method more than jax's: ``prepare`` loads or compiles what several calls need, side by side,
    and runs nothing. With the cache off, under another transformation, and where tracing has an effect, it is
    ``jax.jit``.
    """
    if not isinstance(version, str):
        raise TypeError(f"version must be a text, not {type(version).__name__}")
    if fun is None:
        return functools.partial(jit, version=version, **options)
    import jax

    plain = jax.jit(fun, **options)
    try:
        from xcache.hook.calls.dispatch import Function

        return Function(fun, plain, version).made
    except (ImportError, AttributeError, UnsupportedError) as error:
        logger.debug("xcache.jit is jax.jit with this version of jax: %s", error)
    plain.prepare = functools.partial(_prepare, plain)
    return plain


def call_of(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and keywords of a call that is to be prepared."""
    return (given.args, given.kwargs) if isinstance(given, inspect.BoundArguments) else (tuple(given), {})


def _prepare(plain: Any, *given: Any) -> None:
    """Compile what these calls need, one after the other."""
    for each in given:
        arguments, keywords = call_of(each)
        plain.lower(*arguments, **keywords).compile()
