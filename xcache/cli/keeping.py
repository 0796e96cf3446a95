"""``xcache pin``, ``unpin`` and ``gc``: what stays whatever the limits say, and enforcing them now."""

from __future__ import annotations

import contextlib

import click

from xcache import config, protocol
from xcache.cli import Failure, talking
from xcache.cli.choosing import all_chosen
from xcache.cli.output import counted, emit, json_option, size

# Well within what one message may hold.
_MOST_KEYS = 1000
# One pass over a large store, beside what programs ask for meanwhile.
_LONGEST_PASS = 3600.0


@click.command()
@click.argument("prefixes", metavar="KEY...", nargs=-1, required=True)
@json_option
def pin(prefixes: tuple[str, ...], as_json: bool) -> None:
    """Keep entries, whatever the limits say.

    They stay until they are unpinned or removed. Each KEY may be the beginning of one, as ls prints it; in the store of
    a whole machine whole keys are needed, one's own entries are pinned, and they may not take more than one's quota.
    Starts a daemon when none runs.

    \b
    JSON: {"entries": int, "all_entries": int (all that are pinned now), "all_bytes": int, "keys": [str]}
    """
    _set("pinned", protocol.Pin, prefixes, as_json)


@click.command()
@click.argument("prefixes", metavar="KEY...", nargs=-1, required=True)
@json_option
def unpin(prefixes: tuple[str, ...], as_json: bool) -> None:
    """Let entries go as all others do when room runs out.

    Each KEY may be the beginning of one, as ls prints it. Starts a daemon when none runs.

    \b
    JSON: {"entries": int, "all_entries": int (all that are pinned now), "all_bytes": int, "keys": [str]}
    """
    _set("unpinned", protocol.Unpin, prefixes, as_json)


@click.command()
@json_option
def gc(as_json: bool) -> None:
    """Enforce every limit now, and give room back to the disk.

    The daemon does the same by itself, a little at a time: entries go that are too many, too large or too old, or for
    which the disk has no room; files that nothing refers to are deleted, and the database gives its free pages back.
    Programs are served meanwhile. Starts a daemon when none runs.

    \b
    JSON: {"entries": int, "bytes": int (of contents), "files": int, "reasons": {REASON: int (entries)},
           "given_back": int (bytes of the database)}
    """
    settings = config.load()
    with contextlib.closing(talking.reach_for_change(settings)) as connection:
        freed = connection.demand(protocol.CollectGarbage(), protocol.Collected, settings.timeout + _LONGEST_PASS)
    if as_json:
        emit(freed._asdict())
        return
    why = ", ".join(f"{count} by {reason}" for reason, count in sorted(freed.reasons.items()))
    click.echo(f"evicted {counted(freed.entries, 'entry')}, {size(freed.bytes)}" + (f" ({why})" if why else ""))
    click.echo(f"deleted {counted(freed.files, 'file')}; the database gave back {size(freed.given_back)}")


def _set(done: str, message: type[protocol.Pin | protocol.Unpin], prefixes: tuple[str, ...], as_json: bool) -> None:
    settings = config.load()
    keys = all_chosen(settings, prefixes)
    if len(keys) > _MOST_KEYS:
        raise Failure(f"at most {_MOST_KEYS} entries at once")
    with contextlib.closing(talking.reach_for_change(settings)) as connection:
        answer = connection.demand(message(keys), protocol.Pinned, settings.timeout)
    if as_json:
        emit(answer._asdict() | {"keys": keys})
    else:
        now = f"{counted(answer.all_entries, 'entry')} with {size(answer.all_bytes)}"
        click.echo(f"{done} {counted(answer.entries, 'entry')}; {now} stay whatever the limits say")
