"""An exception that jax would swallow, kept until it can reach the program."""

from __future__ import annotations

import functools
from typing import Any


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
