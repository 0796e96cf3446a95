"""Recognize the program's own exceptions: Ctrl-C, an exit, and those of its signal handlers.

They surface wherever the main thread happens to be. Every other exception in the cache is the cache's own trouble, even
one that is no ``Exception``, such as ``pytest.fail`` in a test that forbids sockets.
"""

from __future__ import annotations

import functools
import signal
import traceback
from types import CodeType
from typing import Any


def reraise_if_the_programs(error: BaseException) -> None:
    """Raise the error again if it is the program's own, since it is not the cache's to handle."""
    if is_the_programs(error):
        raise error


def is_the_programs(error: BaseException) -> bool:
    """Return whether an exception is the program's own, and not the cache's trouble."""
    return isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)) or is_from_handler(error)


def is_from_handler(error: BaseException) -> bool:
    """Return whether a signal handler that is written in Python has raised an exception."""
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    return bool(codes) and any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code(handler: Any) -> CodeType | None:
    """Return the code of a handler that is written in Python, else None."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    if callable(handler) and not hasattr(handler, "__code__"):
        # A callable object; one that is written in C has no code here either.
        handler = type(handler).__call__
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None
