"""The daemon's log: bounded, with one line per message; clients can neither fill it nor forge lines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import logging
import logging.handlers
import os
import stat
import time
from typing import Any

from xcache.config.config import Config
from xcache.errors import StoreError
from xcache.wire.protocol import LOG
from xcached.host.systemd import leads_to_journal

logger = logging.getLogger("xcached")

_FILE_BYTES = 1024 * 1024
_LONGEST_MESSAGE = 2000
# Messages of one kind about one user per period; the first of the next period says how many were left out.
_MOST_ALIKE, _PERIOD_SECONDS = 30, 60.0
_MOST_KINDS = 1000
_NO_FILE = "{} is not a file"
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7


def start_logging(config: Config, *, to_stderr: bool) -> None:
    """Log to a bounded file, and to stderr if asked; to the journal instead if stderr leads there."""
    line = OneLine("%(asctime)s %(process)d %(levelname)s %(message)s")
    if leads_to_journal(2):
        log_to(logging.StreamHandler(), ForJournal())
    else:
        with contextlib.suppress(OSError):
            log_to(_LogFile(config.dir / LOG, maxBytes=_FILE_BYTES, backupCount=1), line)
        if to_stderr or not logger.handlers:
            log_to(logging.StreamHandler(), line)
    for source in (logger, logging.getLogger("asyncio")):
        source.addFilter(Sparing())
    set_level(config)
    # A log that cannot be written must not print errors or stop the daemon.
    logging.raiseExceptions = False


class _LogFile(logging.handlers.RotatingFileHandler):
    """A bounded file; a pipe or socket under its name, whose reader could make the daemon wait, is refused at once."""

    def _open(self) -> io.TextIOWrapper:
        try:
            # The handler closes it.
            file = open(self.baseFilename, "a", encoding="utf-8", errors="backslashreplace", opener=_private)  # noqa: SIM115
        except OSError as error:
            if error.errno == errno.ENXIO:
                raise StoreError(_NO_FILE.format(self.baseFilename)) from None
            raise
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            file.close()
            raise StoreError(_NO_FILE.format(self.baseFilename))
        return file


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def set_level(config: Config) -> None:
    """Set the log level; the daemon's own default is ``info``."""
    logger.setLevel("INFO" if config.sources.get("log") == "default" else config.log.upper())


def note_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:  # noqa: ARG001 - as asyncio calls it
    """Log what failed on an event loop, as messages of one kind: asyncio's own are all different."""
    logger.error("%s", context["message"], exc_info=context.get("exception"))


def log_to(handler: logging.Handler, formatter: logging.Formatter) -> None:
    """Send the log of the daemon and of asyncio to a handler."""
    handler.setFormatter(formatter)
    for source in (logger, logging.getLogger("asyncio")):
        source.addHandler(handler)


class OneLine(logging.Formatter):
    """Formats each message as one line, whatever a client put into it, and indents tracebacks."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line with unprintable characters escaped."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        """Return the traceback indented, so that none of its lines looks like a log line."""
        return "\n".join(f"    {printable(line)}" for line in super().formatException(ei).splitlines())


class ForJournal(OneLine):
    """Formats for the journal, which adds time and process itself: each line starts with its priority."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines, each with the priority of the message's level."""
        priority = next((number for level, number in _PRIORITIES if record.levelno >= level), _DEBUG)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines() or [""])


class Sparing(logging.Filter):
    """Limits repeated messages, by their text and the user (``extra``) they are about."""

    def __init__(self) -> None:
        super().__init__()
        # For each kind: the start of its period, and the messages since.
        self._said: dict[tuple[str, object], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a message; the first of a new period tells how many were left out."""
        if record.levelno < logging.INFO:
            return True
        kind, now = (str(record.msg), getattr(record, "uid", None)), time.monotonic()
        since, count = self._said.get(kind, (now, 0))
        if now - since >= _PERIOD_SECONDS:
            if count > _MOST_ALIKE:
                record.msg = f"{record.getMessage()} ({count - _MOST_ALIKE} more like this were left out)"
                record.args = ()
            since, count = now, 0
        if len(self._said) >= _MOST_KINDS:
            self._said.clear()
        self._said[kind] = since, count + 1
        return count < _MOST_ALIKE


def printable(text: str) -> str:
    """Return text without line breaks or control characters, and not too long."""
    text = text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
