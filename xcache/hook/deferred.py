"""Exceptions that jax would swallow, kept until they can reach the program: at a compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from xcache.errors import CompileInGuardError

_lift: Callable[[], None] | None = None


def raise_at_next_compile(error: BaseException) -> None:
    """Make jax's next compile raise this error, once."""
    from jax._src import compiler

    original = compiler.compile_or_get_cached

    @functools.wraps(original)
    def interrupted(*arguments: Any, **options: Any) -> Any:
        if compiler.compile_or_get_cached is not interrupted:
            # Another library has wrapped this function, so it cannot be taken out.
            return original(*arguments, **options)
        compiler.compile_or_get_cached = original
        # The traceback leads into xcache, which is of no use to the program.
        raise error.with_traceback(None)

    compiler.compile_or_get_cached = interrupted


def forbid_compiles(why: str) -> None:
    """Make each of jax's compiles raise CompileInGuardError, until ``allow_compiles``."""
    global _lift
    from jax._src import compiler

    original = compiler.compile_or_get_cached

    @functools.wraps(original)
    def forbidden(*_: Any, **__: Any) -> Any:
        raise CompileInGuardError(f"nothing is compiled, because XCACHE_ON_MISS cannot be kept: {why}; xcache is off")

    def lift() -> None:
        if compiler.compile_or_get_cached is forbidden:
            compiler.compile_or_get_cached = original

    _lift = lift
    compiler.compile_or_get_cached = forbidden


def allow_compiles() -> None:
    """Undo ``forbid_compiles``, if it was called: the program has decided for itself."""
    global _lift
    if _lift is not None:
        _lift()
        _lift = None
