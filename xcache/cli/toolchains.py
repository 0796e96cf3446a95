"""``xcache toolchains`` and ``xcache invalidate``: the compilers of the entries, and removing what they made."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import click

from xcache.cli import Failure, WrongUsage, daemon, store_file
from xcache.cli.config import spelled_time
from xcache.cli.output import (
    Column,
    ago,
    counted,
    duration,
    emit,
    json_option,
    note,
    print_line,
    print_table,
    printable,
    size,
)
from xcache.cli.rm import remove
from xcache.cli.selection import older_than_option
from xcache.config import config

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
    """List the toolchains that compiled the entries, and where they are installed.

    A stale toolchain is no longer installed anywhere: its entries are not served, are evicted first, and are removed
    after a grace time (XCACHE_STALE_GRACE) unless it is installed again. "elsewhere" means an installation that the
    daemon cannot see, such as a container's.

    \b
    JSON: {"toolchains": [{"digest": str, "state": "live", "stale" or "unknown", "platform": str or null,
           "jaxlib_version": str or null, "description": str or null, "first_seen": float or null,
           "stale_since": float or null, "entries": int, "bytes": int, "compile_seconds": float,
           "installations": [{"place": str, "state": "here", "elsewhere" or "gone", "uid": int,
           "seen_at": float}]}]}
    """
    settings = config.load()
    is_watched = daemon.flush(settings)
    with store_file.open_store(settings) as store:
        rows = store.toolchains() if store else []
    if as_json:
        emit({"toolchains": rows})
    elif rows:
        print_table(_COLUMNS, rows)
        if not is_watched:
            note("no daemon runs; this is what the last one saw")
    else:
        daemon.say_empty(settings)


@click.command()
@click.option("--toolchain", metavar="DIGEST", help="Compiled by this toolchain; may be shortened (see toolchains).")
@click.option("--jaxlib", metavar="VERSION", help="Compiled by this jaxlib: 0.10.2, or 0.10 for 0.10.*.")
@click.option("--platform", help="Compiled for this platform (cpu, cuda, tpu).")
@older_than_option
@click.option("--name", metavar="TEXT", help="Modules whose name contains this text or matches this pattern (jit_*).")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
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
    """Remove the entries that match all given options, pinned ones included, so that they are compiled anew.

    At least one option is needed; clear removes everything. Starts a daemon if none runs and there is something to
    remove.

    \b
    JSON: {"matched": int, "removed": int, "bytes": int (that came free, or would), "dry_run": bool}
    """
    settings = config.load()
    given = {
        "toolchain": toolchain,
        "jaxlib": jaxlib,
        "platform": platform,
        "older than": None if older_than is None else spelled_time(older_than),
        "name": name,
    }
    if all(value is None for value in given.values()):
        raise WrongUsage("say which entries: --toolchain, --jaxlib, --platform, --older-than or --name")
    for what, value in given.items():
        # The value is probably of an unset shell variable; as part of a name it would match everything.
        if value == "":
            raise WrongUsage(f"--{what} is empty; to remove everything: xcache clear")
    reason = ", ".join(f"{what} {value}" for what, value in given.items() if value is not None)
    wanted = store_file.Wanted(
        toolchain=toolchain,
        jaxlib=jaxlib,
        platform=platform,
        created_before=None if older_than is None else time.time() - older_than,
        name=name,
    )
    with store_file.open_store(settings) as store:
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
    elif not total:
        daemon.say_empty(settings)
    elif not keys:
        print_line(f"none of {counted(total, 'entry')} match")
    elif dry_run:
        print_line(f"would remove {counted(len(entries), 'entry')}, {size(freed)}")
    else:
        print_line(f"removed {counted(removed, 'entry')}, {size(freed)}")


def _the_one(store: store_file.StoreReader, prefix: str) -> str:
    """Return the digest of the one toolchain that begins with the prefix."""
    found = [row for row in store.toolchains() if row["digest"].startswith(prefix.lower())]
    if not found:
        raise Failure(f"no toolchain begins with {printable(prefix)}; xcache toolchains lists them")
    if len(found) > 1:
        lines = [f"  {row['digest'][:_SHORT]}  {row['platform'] or ''} {row['jaxlib_version'] or ''}" for row in found]
        raise WrongUsage("\n".join([f"more than one toolchain begins with {printable(prefix)}:", *lines]))
    return str(found[0]["digest"])


def _state(row: dict[str, Any]) -> str:
    return f"stale {ago(row['stale_since'])}" if row["state"] == "stale" else str(row["state"])


def _where(row: dict[str, Any]) -> str:
    there = [one for one in row["installations"] if one["state"] != "gone"] or row["installations"]
    if not there:
        return ""
    place = there[0]["place"] + ("" if there[0]["state"] == "here" else f" ({there[0]['state']})")
    # Several users may have announced one place.
    others = len({one["place"] for one in there}) - 1
    return f"{place} and {others} more" if others else str(place)
