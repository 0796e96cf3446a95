"""``xcache rm`` and ``xcache clear``: only the daemon changes the store, so these start one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import click

from xcache import config, protocol
from xcache.cli import reading, talking
from xcache.cli.choosing import all_chosen
from xcache.cli.output import counted, emit, json_option, size
from xcache.config import Config
from xcache.errors import ClosedStoreError

# Well within what one message may hold.
_KEYS_AT_ONCE = 1000
# Deleting entries and their files takes a daemon at most this long each.
_SECONDS_PER_ENTRY = 0.02


@click.command()
@click.argument("prefixes", metavar="KEY...", nargs=-1, required=True)
@json_option
def rm(prefixes: tuple[str, ...], as_json: bool) -> None:
    """Remove entries.

    Each KEY may be the beginning of one, as ls prints it. Where one of them fits no entry or several, nothing is
    removed. In the store of a whole machine whole keys are needed, and one's own entries are removed. Starts a daemon
    when none runs.

    \b
    JSON: {"removed": int, "bytes": int, "keys": [str]}
    """
    settings = config.load()
    keys = all_chosen(settings, prefixes)
    done = remove(settings, keys)
    if as_json:
        emit({"removed": done.entries, "bytes": done.bytes, "keys": keys})
    else:
        click.echo(f"removed {counted(done.entries, 'entry')}, {size(done.bytes)}")


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask first.")
@json_option
def clear(yes: bool, as_json: bool) -> None:
    """Remove every entry, and what was set aside, after asking. Statistics stay: see stats --zero.

    In the store of a whole machine these are one's own; root removes everybody's. Starts a daemon when none runs and
    there is something to remove.

    \b
    JSON: {"removed": int, "bytes": int}
    """
    settings = config.load()
    try:
        with reading.reading(settings) as store:
            totals = store.totals() if store else {"entries": 0, "bytes": 0}
            anything = totals["entries"] or (store and store.quarantined())
        what = f"{counted(totals['entries'], 'entry')} ({size(totals['bytes'])}) in {settings.dir}"
    except ClosedStoreError:
        totals, anything, what = {"entries": 0}, True, f"all of your entries in {settings.dir}"
    if anything:
        if not yes:
            click.confirm(f"Remove {what}?", abort=True, err=True)
        removed = _demand(settings, protocol.Clear(), totals["entries"])
    else:
        removed = protocol.Removed(0, 0)
    if as_json:
        emit({"removed": removed.entries, "bytes": removed.bytes})
    elif anything:
        click.echo(f"removed {counted(removed.entries, 'entry')}, {size(removed.bytes)}")
    else:
        click.echo(reading.EMPTY)


def remove(settings: Config, keys: Sequence[str], reason: str = "") -> protocol.Removed:
    """Have entries removed, some at a time; a ``reason`` is written down with how many there were."""
    entries = freed = 0
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        some = list(keys[start : start + _KEYS_AT_ONCE])
        done = _demand(settings, protocol.Remove(some, reason), len(some))
        entries, freed = entries + done.entries, freed + done.bytes
    return protocol.Removed(entries, freed)


def _demand(settings: Config, message: protocol.Remove | protocol.Clear, entries: int) -> protocol.Removed:
    with contextlib.closing(talking.reach_for_change(settings)) as connection:
        return connection.demand(message, protocol.Removed, settings.timeout + entries * _SECONDS_PER_ENTRY)
