"""``xcache ls``: what the store holds."""

from __future__ import annotations

import time
from operator import itemgetter

import click

from xcache import config
from xcache.cli import reading, talking
from xcache.cli.choosing import newer_than_option, older_than_option
from xcache.cli.output import Column, ago, counted, duration, emit, json_option, print_table, size

_SHORT_KEY = 12
_TABLE_LIMIT = 50
_DEVICE = Column("device", itemgetter("device_kind"), cut=True)
_PINNED = Column("pinned", lambda entry: "yes" if entry["pinned"] else "")
_COLUMNS = (
    Column("key", lambda entry: entry["key"][:_SHORT_KEY]),
    Column("module", itemgetter("module_name"), cut=True),
    Column("platform", itemgetter("platform")),
    _DEVICE,
    Column("jaxlib", itemgetter("jaxlib_version")),
    Column("size", lambda entry: size(entry["stored_size"]), "right"),
    Column("compile", lambda entry: duration(entry["compile_seconds"]), "right"),
    Column("hits", lambda entry: str(entry["hits"]), "right"),
    Column("age", lambda entry: ago(entry["created_at"]), "right"),
    Column("used", lambda entry: ago(entry["last_used_at"]), "right"),
    _PINNED,
)

_QUARANTINED = (
    *(column for column in _COLUMNS if column.title in ("key", "module", "platform", "jaxlib", "size")),
    Column("set aside", lambda row: ago(row["set_aside_at"]), "right"),
    Column("reason", itemgetter("reason")),
)


@click.command()
@click.option(
    "--sort",
    type=click.Choice(tuple(reading.SORTS)),
    default="used",
    show_default=True,
    help="Last used, newest, largest, most hits or longest compile first, or by name.",
)
@click.option("--reverse", is_flag=True, help="The other way round.")
@click.option("--name", metavar="TEXT", help="Modules with this in their name, or a name of this pattern (jit_*).")
@click.option("--platform", help="Entries for this platform (cpu, cuda, tpu).")
@click.option("--jaxlib", metavar="VERSION", help="Entries of this jaxlib: 0.10.2, or 0.10 for all of its kind.")
@older_than_option
@newer_than_option
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    help=f"At most so many; 0 for all. [default: {_TABLE_LIMIT}, with --json all]",
)
@click.option("--quarantined", is_flag=True, help="What was set aside, and why, instead.")
@json_option
def ls(
    sort: str,
    reverse: bool,
    name: str | None,
    platform: str | None,
    jaxlib: str | None,
    older_than: float | None,
    newer_than: float | None,
    limit: int | None,
    quarantined: bool,
    as_json: bool,
) -> None:
    """List the entries.

    With --quarantined: those that were damaged or ended the programs which loaded them, and are served no more. Their
    bytes are kept for a while in the file that --json names. The other options do not apply.

    \b
    JSON: {"matched": int (without the limit), "entries": [{"key": str, "module_name": str, "platform": str,
           "device_kind": str, "jaxlib_version": str, "raw_size": int, "stored_size": int,
           "compile_seconds": float, "created_at": float, "last_used_at": float, "hits": int,
           "writer_uid": int, "pinned": bool}]}
    \b
    JSON with --quarantined: {"quarantined": [{"id": int, "key": str, "writer_uid": int, "module_name": str,
           "platform": str, "device_kind": str, "jaxlib_version": str, "compile_seconds": float,
           "created_at": float, "stored_size": int, "blob": str, "reason": str, "set_aside_at": float,
           "file": str or null}]}
    """
    settings = config.load()
    if quarantined:
        _list_quarantined(settings, as_json)
        return
    now = time.time()
    wanted = reading.Wanted(
        name=name,
        platform=platform,
        jaxlib=jaxlib,
        created_before=None if older_than is None else now - older_than,
        created_after=None if newer_than is None else now - newer_than,
        sort=sort,
        reverse=reverse,
        limit=limit if limit is not None else 0 if as_json else _TABLE_LIMIT,
    )
    talking.bring_up_to_date(settings)
    with reading.reading(settings) as store:
        entries, matched = store.entries(wanted) if store else ([], 0)
        total = store.totals()["entries"] if store else 0
    if as_json:
        emit({"matched": matched, "entries": entries})
    elif not total:
        click.echo(reading.EMPTY)
    elif not matched:
        click.echo(f"none of {counted(total, 'entry')} fits")
    else:
        _print(entries)
        if matched > len(entries):
            click.echo(f"... and {matched - len(entries)} more (--limit 0 shows all)")


def _list_quarantined(settings: config.Config, as_json: bool) -> None:
    with reading.reading(settings) as store:
        rows = store.quarantined() if store else []
    if as_json:
        emit({"quarantined": rows})
    elif rows:
        print_table(_QUARANTINED, rows)
    else:
        click.echo("nothing was set aside")


def _print(entries: list[reading.Row]) -> None:
    # On many machines the device is just a cpu, and a narrow terminal has better use for the room.
    pinned = any(entry["pinned"] for entry in entries)
    telling = any(entry["device_kind"] != entry["platform"] for entry in entries)
    silent = [column for column, tells in ((_DEVICE, telling), (_PINNED, pinned)) if not tells]
    print_table([column for column in _COLUMNS if column not in silent], entries)
