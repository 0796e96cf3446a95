"""Exceptions of the program's own signal handlers, which come up wherever the main thread happens to be."""

from __future__ import annotations

import functools
import signal
import traceback
from types import CodeType
from typing import Any


def let_pass(error: BaseException) -> None:
    """Raise what a signal handler of the program raised: it is the program's, and no trouble of the cache's."""
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    if codes and any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
        raise error


def _code(handler: Any) -> CodeType | None:
    """The code that runs first when a handler written in Python is called."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    if callable(handler) and not hasattr(handler, "__code__"):
        # An object that can be called; what is written in C has no code here either.
        handler = type(handler).__call__
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None
