"""Log messages of xcache on the program's stderr."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from xcache.config.config import Config, misspelt
from xcache.wire.texts import printable

logger = logging.getLogger("xcache")


@contextlib.contextmanager
def shown(settings: Config) -> Iterator[None]:
    """Show messages, at the level of the setting ``log``; without that setting, the program decides the level."""
    asked = settings.sources["log"] != "default"
    before = logger.level
    with _at_stderr(logging.NOTSET if asked else logging.WARNING):
        if asked:
            logger.setLevel(settings.log.upper())
        try:
            _warn_of_misspelt_variables()
            yield
        finally:
            if asked:
                logger.setLevel(before)


@functools.cache
def _warn_of_misspelt_variables() -> None:
    """Warn of variables that look like misspelt settings; once, however often the cache is switched on."""
    for variable, meant in misspelt(os.environ).items():
        logger.warning("%s is not a setting, and nothing reads it; did you mean %s?", variable, meant)


def complain(message: str, *arguments: object) -> None:
    """Warn, also when there are no settings to say how."""
    is_shown = any(isinstance(handler, _StderrHandler) for handler in logger.handlers)
    with contextlib.nullcontext() if is_shown else _at_stderr(logging.WARNING):
        logger.warning(message, *arguments)


@contextlib.contextmanager
def _at_stderr(level: int) -> Iterator[None]:
    handler = _StderrHandler(level)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Formatter(logging.Formatter):
    """Formats lines for a terminal, which must not be steered by what another user's process is called."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), kept="\n\t")


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to stderr, prefixed with xcache's name, unless the program has a handler of its own."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.setLevel(level)
        self.setFormatter(_Formatter("xcache: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        handlers = [*logger.handlers, *(logging.getLogger().handlers if logger.propagate else ())]
        if all(isinstance(handler, _StderrHandler) for handler in handlers):
            # The program may have replaced sys.stderr; logging's own last resort looks it up each time, too.
            self.stream = sys.stderr
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        """Ignore the error: stderr may be closed or raise, and there is nowhere else to report it."""
