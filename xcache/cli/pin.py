"""``xcache pin`` and ``unpin``: exempt entries from the limits, and subject them to the limits again."""

from __future__ import annotations

import contextlib

import click

from xcache.cli import Failure, daemon
from xcache.cli.completion import complete_key
from xcache.cli.output import counted, emit, json_option, print_line, size
from xcache.cli.selection import KEYS_PER_MESSAGE, chosen, print_few
from xcache.config import config
from xcache.wire import commands


@click.command()
@click.argument("prefixes", metavar="KEY...", nargs=-1, required=True, shell_complete=complete_key)
@json_option
def pin(prefixes: tuple[str, ...], as_json: bool) -> None:
    """Keep entries, whatever the limits say.

    They stay until they are unpinned or removed. A KEY may be shortened to four digits. In the store of a whole
    machine you pin and count your own entries, up to your quota or a quarter of the store; root pins those of all
    users. Starts a daemon if none runs.

    \b
    JSON: {"entries": int, "already": int (that were pinned before), "all_entries": int (all that are pinned now),
           "all_bytes": int, "keys": [str]}
    """
    _set("pinned", commands.Pin, prefixes, as_json)


@click.command()
@click.argument("prefixes", metavar="KEY...", nargs=-1, required=True, shell_complete=complete_key)
@json_option
def unpin(prefixes: tuple[str, ...], as_json: bool) -> None:
    """Subject entries to the limits again.

    A KEY may be shortened to four digits. In the store of a whole machine, root unpins the entries of all users.
    Starts a daemon if none runs.

    \b
    JSON: {"entries": int, "already": int (that were not pinned), "all_entries": int (all that are pinned now),
           "all_bytes": int, "keys": [str]}
    """
    _set("unpinned", commands.Unpin, prefixes, as_json)


def _set(done: str, message: type[commands.Pin | commands.Unpin], prefixes: tuple[str, ...], as_json: bool) -> None:
    settings = config.load()
    entries = chosen(settings, prefixes)
    if len(entries) > KEYS_PER_MESSAGE:
        raise Failure(f"at most {KEYS_PER_MESSAGE} entries at once")
    with contextlib.closing(daemon.connect_for_change(settings)) as connection:
        answer = connection.demand(message(list(entries)), commands.Pinned, settings.timeout)
    if as_json:
        emit(answer._asdict() | {"keys": list(entries)})
    else:
        now = f"{counted(answer.all_entries, 'entry')} with {size(answer.all_bytes)}, programs included,"
        stays = "stays" if answer.all_entries == 1 else "stay"
        were = "was" if answer.already == 1 else "were"
        were = f"already {were} pinned" if done == "pinned" else f"{were} not pinned"
        before = f" ({answer.already} {were})" if answer.already else ""
        left = f"{now} {stays} whatever the limits say" if answer.all_entries else "no entry is pinned now"
        print_line(f"{done} {counted(answer.entries, 'entry')}{before}; {left}")
        print_few(entries)
