"""``xcache toolchains`` and ``xcache invalidate``: what compiled the entries, and what is of no more use."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import click

from xcache import config
from xcache.cli import Failure, Misunderstood, reading, talking
from xcache.cli.changing import remove
from xcache.cli.choosing import older_than_option
from xcache.cli.output import Column, ago, counted, duration, emit, json_option, note, print_table, printable, size
from xcache.cli.settings import length

_SHORT = 12
_COLUMNS = (
    Column("toolchain", lambda row: row["digest"][:_SHORT]),
    Column("platform", lambda row: row["platform"] or ""),
    Column("jaxlib", lambda row: row["jaxlib_version"] or ""),
    Column("state", lambda row: _state(row)),
    Column("entries", lambda row: str(row["entries"]), "right"),
    Column("size", lambda row: size(row["bytes"]), "right"),
    Column("compile", lambda row: duration(row["compile_seconds"]), "right"),
    Column("where", lambda row: _where(row), cut=True),
)


@click.command()
@json_option
def toolchains(as_json: bool) -> None:
    """List what compiled the entries, and where that is installed.

    What is stale is installed nowhere any more: its entries are not served, go first when room is needed, and are
    removed after a grace time (XCACHE_STALE_GRACE), unless it is installed again. "elsewhere" are installations that
    the daemon cannot see, such as a container's.

    \b
    JSON: {"toolchains": [{"digest": str, "state": "live", "stale" or "unknown", "platform": str or null,
           "jaxlib_version": str or null, "description": str or null, "first_seen": float or null,
           "stale_since": float or null, "entries": int, "bytes": int, "compile_seconds": float,
           "installations": [{"place": str, "state": "here", "elsewhere" or "gone", "uid": int,
           "seen_at": float}]}]}
    """
    settings = config.load()
    is_watched = talking.bring_up_to_date(settings)
    with reading.reading(settings) as store:
        rows = store.toolchains() if store else []
    if as_json:
        emit({"toolchains": rows})
    elif rows:
        print_table(_COLUMNS, rows)
        if not is_watched:
            note("no daemon runs; this is what the last one saw")
    else:
        click.echo(reading.EMPTY)


@click.command()
@click.option("--toolchain", metavar="DIGEST", help="Compiled by this one; its beginning will do (see toolchains).")
@click.option("--jaxlib", metavar="VERSION", help="Compiled by this jaxlib: 0.10.2, or 0.10 for all of its kind.")
@click.option("--platform", help="For this platform (cpu, cuda, tpu).")
@older_than_option
@click.option("--name", metavar="TEXT", help="Modules with this in their name, or a name of this pattern (jit_*).")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
def invalidate(
    toolchain: str | None,
    jaxlib: str | None,
    platform: str | None,
    older_than: float | None,
    name: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove the entries that fit all of these, so that they are compiled anew.

    Pinned ones too. At least one of the options is needed; for everything there is clear. Starts a daemon when none
    runs and there is something to remove.

    \b
    JSON: {"matched": int, "removed": int, "bytes": int (that came free, or would), "dry_run": bool}
    """
    settings = config.load()
    given = {
        "toolchain": toolchain,
        "jaxlib": jaxlib,
        "platform": platform,
        "older than": None if older_than is None else length(older_than),
        "name": name,
    }
    if all(value is None for value in given.values()):
        raise Misunderstood("say which entries: --toolchain, --jaxlib, --platform, --older-than or --name")
    for what, value in given.items():
        # Of a variable that is not set, most likely; taken for the beginning of a name it would fit everything.
        if value == "":
            raise Misunderstood(f"--{what} says nothing; for everything there is clear")
    reason = ", ".join(f"{what} {value}" for what, value in given.items() if value is not None)
    wanted = reading.Wanted(
        toolchain=toolchain,
        jaxlib=jaxlib,
        platform=platform,
        created_before=None if older_than is None else time.time() - older_than,
        name=name,
    )
    with reading.reading(settings) as store:
        if store and toolchain is not None:
            wanted = dataclasses.replace(wanted, toolchain=_the_one(store, toolchain))
        entries, _ = store.entries(wanted) if store else ([], 0)
        total = store.totals()["entries"] if store else 0
        freed = store.freed_by(wanted) if store and dry_run else 0
    keys = list(dict.fromkeys(entry["key"] for entry in entries))
    removed = 0
    if keys and not dry_run:
        removed, freed = remove(settings, keys, f"by hand: {reason}")
    if as_json:
        emit({"matched": len(entries), "removed": removed, "bytes": freed, "dry_run": dry_run})
    elif not keys:
        click.echo(f"none of {counted(total, 'entry')} fits" if total else reading.EMPTY)
    elif dry_run:
        click.echo(f"would remove {counted(len(entries), 'entry')}, {size(freed)}")
    else:
        click.echo(f"removed {counted(removed, 'entry')}, {size(freed)}")


def _the_one(store: reading.StoreReader, prefix: str) -> str:
    """The toolchain that begins like this."""
    found = [row for row in store.toolchains() if row["digest"].startswith(prefix.lower())]
    if not found:
        raise Failure(f"no toolchain begins with {printable(prefix)}; xcache toolchains lists them")
    if len(found) > 1:
        lines = [f"  {row['digest'][:_SHORT]}  {row['platform'] or ''} {row['jaxlib_version'] or ''}" for row in found]
        raise Misunderstood("\n".join([f"more than one toolchain begins with {printable(prefix)}:", *lines]))
    return str(found[0]["digest"])


def _state(row: dict[str, Any]) -> str:
    return f"stale {ago(row['stale_since'])}" if row["state"] == "stale" else str(row["state"])


def _where(row: dict[str, Any]) -> str:
    there = [one for one in row["installations"] if one["state"] != "gone"] or row["installations"]
    if not there:
        return ""
    place = there[0]["place"] + ("" if there[0]["state"] == "here" else f" ({there[0]['state']})")
    return f"{place} and {len(there) - 1} more" if len(there) > 1 else str(place)
