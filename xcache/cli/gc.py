"""``xcache gc``: enforce every limit now."""

from __future__ import annotations

import contextlib

import click

from xcache.cli import daemon
from xcache.cli.output import counted, emit, json_option, note, print_line, size
from xcache.client.connector import told_of_ignored
from xcache.config import config
from xcache.wire import commands

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
        if ignored := settings.ignored_by(connection.welcome.settings or {}):
            note(f"{told_of_ignored(ignored)}; to start it with the settings of now: xcache restart")
        freed = connection.demand(commands.CollectGarbage(), commands.Collected, settings.timeout + _GC_SECONDS)
    if as_json:
        emit(freed._asdict())
        return
    why = ", ".join(f"{count} by {reason}" for reason, count in sorted(freed.reasons.items()))
    print_line(f"evicted {counted(freed.entries, 'entry')}, {size(freed.bytes)}" + (f" ({why})" if why else ""))
    print_line(f"deleted {counted(freed.files, 'file')}; the database gave back {size(freed.given_back)}")
