"""``xcache ls``: list the entries of the store."""

from __future__ import annotations

import os
from operator import itemgetter
from typing import Any

import click

from xcache.cli import daemon, daemon_listing, store_file
from xcache.cli.output import Column, ago, counted, duration, emit, json_option, print_line, print_table, size
from xcache.cli.selection import SHORT_KEY, filter_options, filtered
from xcache.cli.writers import writer_name
from xcache.config import config

_TABLE_LIMIT = 50
_DEVICE = Column("device", itemgetter("device_kind"), cut=True)
_USER = Column("user", lambda entry: writer_name(entry["writer_uid"]))
_PINNED = Column("pinned", lambda entry: "yes" if entry["pinned"] else "")
_STALE = Column("stale", lambda entry: "yes" if entry["stale"] else "")
_COLUMNS = (
    Column("key", lambda entry: entry["key"][:SHORT_KEY]),
    Column("module", itemgetter("module_name"), cut=True),
    Column("platform", itemgetter("platform")),
    _DEVICE,
    Column("jaxlib", itemgetter("jaxlib_version")),
    Column("size", lambda entry: size(entry["stored_size"]), "right"),
    Column("compile", lambda entry: duration(entry["compile_seconds"]), "right"),
    Column("hits", lambda entry: str(entry["hits"]), "right"),
    Column("age", lambda entry: ago(entry["created_at"]), "right"),
    Column("used", lambda entry: ago(entry["last_used_at"]), "right"),
    _USER,
    _PINNED,
    _STALE,
)

_QUARANTINED = (
    *(column for column in _COLUMNS if column.title in ("key", "module", "platform", "jaxlib", "size")),
    Column("set aside", lambda row: ago(row["set_aside_at"]), "right"),
    Column("reason", itemgetter("reason")),
)


@click.command()
@click.option(
    "--sort",
    type=click.Choice(tuple(store_file.SORTS)),
    default="used",
    show_default=True,
    help="Last used, newest, largest, most hits or longest compile first, or by name.",
)
@click.option("--reverse", is_flag=True, help="Reverse the order.")
@filter_options
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    help=f"Show at most this many; 0 for all. [default: {_TABLE_LIMIT}, with --json all]",
)
@click.option("--long", is_flag=True, help="Show whole keys.")
@click.option("--quarantined", is_flag=True, help="List the entries that were set aside, and why, instead.")
@json_option
def ls(
    sort: str,
    reverse: bool,
    limit: int | None,
    long: bool,
    quarantined: bool,
    as_json: bool,
    **filters: Any,
) -> None:
    """List the entries. In the store of a whole machine, only root and the daemon's account see those of other users.

    Hits include loads ahead that no program took.

    With --quarantined, list the entries that were set aside because they were damaged, crashed programs, or could not
    be loaded and were replaced. They are no longer served. Their bytes are kept for a while in the file that --json
    names. The other options do not apply.

    \b
    JSON: {"matched": int (without the limit), "entries": [{"key": str, "module_name": str, "platform": str,
           "device_kind": str, "jaxlib_version": str, "raw_size": int, "stored_size": int,
           "compile_seconds": float, "created_at": float, "last_used_at": float, "hits": int,
           "writer_uid": int, "pinned": bool,
           "stale": bool (not served: its toolchain is no longer installed anywhere)}]}
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
    limit = limit if limit is not None else 0 if as_json else _TABLE_LIMIT
    wanted = filtered(filters, sort=sort, reverse=reverse, limit=limit)
    with daemon_listing.open_store_or_listing(settings, latest=True) as store:
        entries, matched = store.entries(wanted) if store else ([], 0)
        total = store.totals()["entries"] if store else 0
        empty = store.empty if store else store_file.EMPTY
    if as_json:
        emit({"matched": matched, "entries": entries})
    elif not total:
        daemon.say_empty(settings, empty)
    elif not matched:
        print_line(f"none of {counted(total, 'entry')} match")
    else:
        _print(entries, long=long)
        if matched > len(entries):
            print_line(f"... and {matched - len(entries)} more (--limit 0 shows all)")


def _list_quarantined(settings: config.Config, as_json: bool) -> None:
    with store_file.open_store(settings) as store:
        rows = store.quarantined() if store else []
    if as_json:
        emit({"quarantined": rows})
    elif rows:
        print_table(_QUARANTINED, rows)
    else:
        print_line("nothing was set aside")


def _print(entries: list[store_file.Row], *, long: bool) -> None:
    # A column is left out if it would say the same, or nothing, in every row.
    is_shown = {
        _DEVICE: any(entry["device_kind"] != entry["platform"] for entry in entries),
        _USER: any(entry["writer_uid"] != os.getuid() for entry in entries),
        _PINNED: any(entry["pinned"] for entry in entries),
        _STALE: any(entry["stale"] for entry in entries),
    }
    shown = [column for column in _COLUMNS if is_shown.get(column, True)]
    if long:
        shown[0] = Column("key", itemgetter("key"))
    print_table(shown, entries)
