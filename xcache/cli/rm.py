"""``xcache rm`` and ``xcache clear``. Only the daemon changes the store, so both start one if none runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import click

from xcache.cli import daemon, store_file
from xcache.cli.completion import complete_key
from xcache.cli.output import confirm, counted, emit, json_option, print_line, size
from xcache.cli.selection import KEYS_PER_MESSAGE, chosen, print_few
from xcache.config import config
from xcache.config.config import Config
from xcache.errors import ClosedStoreError
from xcache.wire import commands

# The daemon takes at most this long to delete an entry and its file.
_SECONDS_PER_ENTRY = 0.02


@click.command()
@click.argument("prefixes", metavar="KEY...", nargs=-1, required=True, shell_complete=complete_key)
@json_option
def rm(prefixes: tuple[str, ...], as_json: bool) -> None:
    """Remove entries, pinned ones too.

    A KEY may be shortened to four digits. If one of them fits no entry or several, nothing is removed. In the store
    of a whole machine you remove your own entries; root removes those of all users. Starts a daemon if none runs.

    \b
    JSON: {"removed": int, "bytes": int, "keys": [str]}
    """
    settings = config.load()
    entries = chosen(settings, prefixes)
    done = remove(settings, list(entries))
    if as_json:
        emit({"removed": done.entries, "bytes": done.bytes, "keys": list(entries)})
    else:
        print_line(f"removed {counted(done.entries, 'entry')}, {size(done.bytes)}")
        # The daemon does not say which of them it left.
        if done.entries >= len(entries):
            print_few(entries)


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask first.")
@json_option
def clear(yes: bool, as_json: bool) -> None:
    """Remove every entry, and what was set aside, after asking. Statistics stay: see stats --zero.

    In the store of a whole machine you remove your own entries; root removes those of all users. Starts a daemon if
    none runs and there is something to remove.

    \b
    JSON: {"removed": int, "bytes": int}
    """
    settings = config.load()
    try:
        with store_file.open_store(settings) as store:
            totals = store.totals() if store else {"entries": 0, "bytes": 0}
            anything = totals["entries"] or (store and store.quarantined())
        what = f"{counted(totals['entries'], 'entry')} ({size(totals['bytes'])}) in {settings.dir}"
    except ClosedStoreError:
        totals, anything, what = {"entries": 0}, True, f"all of your entries in {settings.dir}"
    if anything:
        if not yes:
            confirm(f"Remove {what}?")
        removed = _demand(settings, commands.Clear(), totals["entries"])
    else:
        removed = commands.Removed(0, 0)
    if as_json:
        emit({"removed": removed.entries, "bytes": removed.bytes})
    elif anything:
        print_line(f"removed {counted(removed.entries, 'entry')}, {size(removed.bytes)}")
    else:
        daemon.say_empty(settings)


def remove(settings: Config, keys: Sequence[str], reason: str = "") -> commands.Removed:
    """Have the daemon remove entries, a batch at a time, and record the ``reason``."""
    entries = freed = 0
    for start in range(0, len(keys), KEYS_PER_MESSAGE):
        some = list(keys[start : start + KEYS_PER_MESSAGE])
        done = _demand(settings, commands.Remove(some, reason), len(some))
        entries, freed = entries + done.entries, freed + done.bytes
    return commands.Removed(entries, freed)


def _demand(settings: Config, message: commands.Remove | commands.Clear, entries: int) -> commands.Removed:
    with contextlib.closing(daemon.connect_for_change(settings)) as connection:
        return connection.demand(message, commands.Removed, settings.timeout + entries * _SECONDS_PER_ENTRY)
