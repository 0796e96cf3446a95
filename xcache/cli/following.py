"""Follow what the daemon sees, through its restarts: for ``xcache monitor``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from xcache.cli import daemon
from xcache.client.connection import Connection
from xcache.config.config import Config
from xcache.errors import HungUpError, UnavailableError, XcacheError
from xcache.wire import commands

# The daemon says something twice a second.
_SILENCE_SECONDS = 5.0
_RETRY_SECONDS = 0.5

Told = commands.Seen | str
"""The daemon's view, or the reason why nobody knows it at the moment."""


def follow(settings: Config, tell: Callable[[Told], None], *, once: bool = False) -> None:
    """Tell what the daemon sees, again and again; while there is none, tell that, and wait for one.

    ``once``: return after the first Seen, and raise an error where there is none. An error on the first attempt is also
    raised, unless it only means that no daemon runs.
    """
    is_first = True
    while True:
        try:
            connection = daemon.find(settings)
            if connection is None:
                problem = _absent(settings)
                if once:
                    raise UnavailableError(problem)
            else:
                with contextlib.closing(connection):
                    problem = _listen(connection, settings, tell, once=once)
                if once:
                    return
        except XcacheError as error:
            if is_first or once:
                raise
            problem = str(error)
        is_first = False
        tell(f"{problem}; waiting")
        time.sleep(_RETRY_SECONDS)


class _Enough(Exception):  # noqa: N818 - nothing went wrong
    """The first Seen was told."""


def _listen(connection: Connection, settings: Config, tell: Callable[[Told], None], *, once: bool) -> str:
    """Tell what the daemon says until the connection ends; return why it ended."""

    def heard(seen: commands.Seen) -> float:
        tell(seen)
        if once:
            raise _Enough
        return _SILENCE_SECONDS

    try:
        connection.ask(commands.Watch(), settings.timeout, waiting=heard, notice=commands.Seen)
    except _Enough:
        return ""
    except HungUpError:
        pass
    return f"the daemon (process {connection.welcome.pid}) has left"


def _absent(settings: Config) -> str:
    """Return the sentence for the case that no daemon runs."""
    where = f"for {settings.dir}" if not settings.daemon_user else f"on {settings.socket}"
    return f"no daemon runs {where} (a program with XCACHE=1 starts one, and so does xcache start)"
