"""``xcache stats``: the statistics of the store."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import click

from xcache.cli import daemon, store_file
from xcache.cli.output import ago, duration, emit, json_option, moment, print_facts, print_line, printable, size
from xcache.cli.output import counted as number_of
from xcache.config import config
from xcache.wire import commands, protocol

_COUNTS = ("requests", "hits", "misses", "stores", "evictions", "quarantined", "invalidated")
_INVALIDATED = ("invalidated_by_hand", "stale_removed")
_OF_TIERS = ("uploads_dropped",)
_BYTES = ("bytes_read", "bytes_written")
_SECONDS = ("compile_seconds", "load_seconds", "wait_seconds", "saved_seconds")
_SHOWN_CHANGES = 10
_GROUPS = ("uncacheable", "errors", "lowerings", "calls", "causes")


@click.command()
@click.option("--zero", is_flag=True, help="Reset the statistics and the list of invalidations.")
@json_option
def stats(zero: bool, as_json: bool) -> None:
    """Show hits, misses, and the time the cache saved.

    The counts are of all programs that use this store. The hit rate is of requests that can be cached. "no alias" among
    the reasons for lowerings means that there is none yet, as in a program's first run; "no entry" that there is one,
    and no executable for these flags and devices; "checked" that XCACHE_LOWERING=check compared one. Calls are those of
    functions that xcache.jit made.

    \b
    JSON: {"since": float or null (the beginning), "requests": int, "hits": int, "misses": int,
           "hit_rate": float or null, "stores": int, "evictions": int, "quarantined": int, "invalidated": int,
           "invalidated_by_hand": int (and removed at once), "stale_removed": int (of the others, since),
           "uploads_dropped": int (that waited for remote stores too long), "bytes_read": int,
           "bytes_written": int,
           "compile_seconds": float, "load_seconds": float, "wait_seconds": float, "saved_seconds": float,
           "uncacheable": {REASON: int}, "errors": {KIND: int},
           "lowerings": {"skipped": int, REASON: int}, "calls": {"skipped": int, REASON: int},
           "causes": {CAUSE: int (of misses)}, "other": {NAME: float},
           "invalidations": [{"at": float, "toolchain": str or null, "reason": str, "entries": int,
           "bytes": int}] (the latest)}

    With --zero, it prints the fresh counts.
    """
    settings = config.load()
    if zero:
        with contextlib.closing(daemon.connect_for_change(settings)) as connection:
            connection.demand(commands.ZeroStatistics(), protocol.Done, settings.timeout)
    else:
        daemon.flush(settings)
    with store_file.open_store(settings) as store:
        counted = _arranged(store.statistics() if store else {})
        changes = store.invalidations(_SHOWN_CHANGES) if store else []
    if as_json:
        emit(counted | {"invalidations": changes})
    elif zero:
        print_line("the statistics were reset")
    elif store is None:
        daemon.say_empty(settings)
    else:
        print_facts(_lines(counted))
        if changes:
            print_line()
            print_line("the latest invalidations", bold=True)
            print_facts([_change(change) for change in changes])


def _arranged(amounts: Mapping[str, float]) -> dict[str, Any]:
    """Arrange the rows of the statistics table in the shape that --json documents."""
    left = dict(amounts)
    since = left.pop("since", None)
    counts: dict[str, Any] = {name: int(left.pop(name, 0)) for name in (*_COUNTS, *_INVALIDATED, *_OF_TIERS, *_BYTES)}
    seconds = {name: float(left.pop(name, 0.0)) for name in _SECONDS}
    groups: dict[str, dict[str, int]] = {}
    for group in _GROUPS:
        named = {name: int(left.pop(name)) for name in sorted(left) if name.startswith(f"{group}:")}
        groups[group] = {name.partition(":")[2]: amount for name, amount in named.items()}
    looked_up = counts["hits"] + counts["misses"]
    rate = counts["hits"] / looked_up if looked_up else None
    first = {name: counts.pop(name) for name in ("requests", "hits", "misses")}
    # "other" holds counts of a newer daemon that this command does not know.
    return {"since": since, **first, "hit_rate": rate, **counts, **seconds, **groups, "other": left}


def _lines(counted: Mapping[str, Any]) -> list[tuple[str, str]]:
    rate = counted["hit_rate"]
    lines = [
        ("since", moment(counted["since"]) if counted["since"] else "the beginning"),
        ("requests", str(counted["requests"])),
        ("  hits", str(counted["hits"]) + (f" ({rate:.1%} of what can be cached)" if rate is not None else "")),
        ("  misses", str(counted["misses"])),
        *((f"    {cause}", str(amount)) for cause, amount in counted["causes"].items()),
        ("  uncacheable", str(sum(counted["uncacheable"].values()))),
        *((f"    {reason}", str(amount)) for reason, amount in counted["uncacheable"].items()),
        ("errors", str(sum(counted["errors"].values()))),
        *((f"  {kind}", str(amount)) for kind, amount in counted["errors"].items()),
        *_skipped("lowerings skipped", counted["lowerings"]),
        *_skipped("calls not traced", counted["calls"]),
        ("stored", f"{counted['stores']} ({size(counted['bytes_written'])})"),
        ("evicted", str(counted["evictions"])),
        ("set aside", str(counted["quarantined"])),
        ("invalidated", _invalidated(counted)),
        *([("uploads dropped", str(counted["uploads_dropped"]))] if counted["uploads_dropped"] else []),
        ("read", size(counted["bytes_read"])),
        ("compiling took", duration(counted["compile_seconds"])),
        ("loading took", duration(counted["load_seconds"])),
        ("waiting for others took", duration(counted["wait_seconds"])),
        ("saved", duration(counted["saved_seconds"])),
    ]
    return lines + [(name, f"{amount:g}") for name, amount in counted["other"].items()]


def _skipped(name: str, counted: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the share of what was skipped, and the reasons for the rest."""
    if not counted:
        return []
    skipped, total = counted.get("skipped", 0), sum(counted.values())
    reasons = [(f"  {reason}", str(amount)) for reason, amount in counted.items() if reason != "skipped"]
    return [(name, f"{skipped} of {total} ({skipped / total:.1%})"), *reasons]


def _invalidated(counted: Mapping[str, Any]) -> str:
    by_hand = counted["invalidated_by_hand"]
    by_change = counted["invalidated"] - by_hand
    how = [f"{by_hand} removed by hand"] if by_hand else []
    how += (
        [f"{by_change} by changes of toolchains, {counted['stale_removed']} of them removed"] if by_change > 0 else []
    )
    return f"{counted['invalidated']}" + (f" ({'; '.join(how)})" if how else "")


def _change(change: Mapping[str, Any]) -> tuple[str, str]:
    what = f"{number_of(change['entries'], 'entry')}, {size(change['bytes'])}"
    return f"  {ago(change['at'])}", f"{what}: {printable(change['reason'])}"
