"""``xcache gc``: enforce every limit now."""

from __future__ import annotations

import contextlib

import click

from xcache.cli import daemon
from xcache.cli.output import counted, emit, json_option, note, print_line, size
from xcache.client.connection import Connection
from xcache.config import config
from xcache.config.config import Config
from xcache.config.table import LIMITS
from xcache.wire import commands, protocol

# The daemon may need this long for a large store, because it serves programs first.
_GC_SECONDS = 3600.0


@click.command()
@json_option
def gc(as_json: bool) -> None:
    """Enforce every limit now, and give space back to the disk.

    The daemon does the same by itself, a little at a time: it evicts entries beyond the limits on number, size, age and
    free disk space, deletes unreferenced files, and returns the database's free pages. It serves programs meanwhile.
    Starts a daemon if none runs.

    \b
    JSON: {"entries": int, "bytes": int (of contents), "files": int, "reasons": {REASON: int (entries)},
           "given_back": int (bytes of the database)}
    """
    settings = config.load()
    with contextlib.closing(daemon.connect_for_change(settings)) as connection:
        _note_other_limits(settings, connection)
        freed = connection.demand(commands.CollectGarbage(), commands.Collected, settings.timeout + _GC_SECONDS)
    if as_json:
        emit(freed._asdict())
        return
    why = ", ".join(f"{count} by {reason}" for reason, count in sorted(freed.reasons.items()))
    print_line(f"evicted {counted(freed.entries, 'entry')}, {size(freed.bytes)}" + (f" ({why})" if why else ""))
    print_line(f"deleted {counted(freed.files, 'file')}; the database gave back {size(freed.given_back)}")


def _note_other_limits(settings: Config, connection: Connection) -> None:
    """Note each limit that this command's environment sets, but the daemon does not have."""
    facts = connection.demand(protocol.AskStatus(), protocol.Status, settings.timeout).facts
    for name in LIMITS:
        if settings.sources[name] == "environment" and facts.get(name) != getattr(settings, name):
            variable = f"XCACHE_{name.upper()}"
            note(f"the daemon uses its own {name}, not {variable} of this command; to pass it on: xcache restart")
