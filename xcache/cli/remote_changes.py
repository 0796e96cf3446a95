"""``xcache remote rm``, ``gc`` and ``push``: change what the remote stores have."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import click

from xcache.cli import Failure, WrongUsage, remote_details, remote_keys
from xcache.cli.completion import complete_key
from xcache.cli.output import counted, emit, json_option, note, print_line, progress, size
from xcache.cli.remote_asking import Object, Problems, Remotes, asking, tier_option
from xcache.cli.remote_details import Wanted
from xcache.cli.selection import SHORT_KEY, duration_option, older_than_option
from xcache.config import config
from xcache.wire import commands

_OLD_SECONDS = 90 * 86400.0
_LOOK_SECONDS = 0.1


@click.command()
@click.argument("prefixes", metavar="KEY...", nargs=-1, required=True, shell_complete=complete_key)
@tier_option
@json_option
def rm(prefixes: tuple[str, ...], tier: str | None, as_json: bool) -> None:
    """Remove entries from the remote stores; the copies on machines stay.

    A KEY may be shortened to four digits where the store can list what it has; an HTTP cache needs all 64. If one of
    them fits no entry or several, nothing is removed. A run, which says what a program wanted, may have a copy of a
    small entry, which stays. To have nobody load what a key signed: xcache key revoke.

    \b
    JSON: {"removed": [{"remote": str, "key": str, "bytes": int or null}],
           "problems": [{"remote": str, "kind": str, "problem": str}]}

    Exit status 1 if a store fails, or nothing was removed.
    """
    settings = config.load()
    problems, removed = Problems(), list[dict[str, Any]]()
    with asking(settings) as remotes:
        for name, entries in remote_keys.chosen(settings, remotes, remotes.named(tier), prefixes).items():
            for key, count in entries.items():
                with problems.of(name):
                    if sum(there for _, there in remotes.remove(name, [remote_keys.object_name(key)])):
                        removed.append({"remote": name, "key": key, "bytes": count})
    if as_json:
        emit({"removed": removed, "problems": problems.found})
    else:
        keys = list(dict.fromkeys(row["key"] for row in removed))
        print_line(f"removed {counted(len(keys), 'entry')}, {size(sum(row['bytes'] or 0 for row in removed))}")
        for row in removed:
            print_line(f"  {row['key'][:SHORT_KEY]}  {row['remote']}")
        if removed:
            note("what programs wanted (runs) may still have copies of small entries; see --help")
    problems.tell()
    if not removed:
        click.get_current_context().exit(1)


@click.command()
@older_than_option
@click.option("--jaxlib", metavar="VERSION", help="Entries that this jaxlib made: 0.10.2, or 0.10 for 0.10.*.")
@click.option("--stale", is_flag=True, help="Entries of toolchains that are stale here (xcache toolchains).")
@tier_option
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@json_option
def gc(
    older_than: float | None, jaxlib: str | None, stale: bool, tier: str | None, dry_run: bool, as_json: bool
) -> None:
    """Remove the objects of the remote stores that match all given options; by default those older than 90 days.

    --jaxlib and --stale are for the time after an upgrade, and take entries of any age unless --older-than says more.
    Stale is what this machine no longer has: another machine that shares the store may still use it, and compiles and
    uploads again what it misses. So run it when all machines are upgraded, first with --dry-run, which lists the
    toolchains. A stale toolchain is known here for XCACHE_STALE_GRACE; --jaxlib needs no such knowledge.

    The beginning of each entry says what made it, a request for each. An entry stays if no trusted key has signed that,
    or if it cannot be read. Runs, which say what programs wanted, stay, too, with copies of small entries:
    machines renew them, and they go by their age.

    It removes nothing beyond the namespace of the settings. An old entry may be wanted still: then it is compiled, and
    uploaded, once more. Redis does not know how old its objects are: there only --jaxlib and --stale do
    anything, and its address takes a ?ttl=90d. HTTP caches and buckets have rules of their own.

    \b
    JSON: {"older_than": float or null, "jaxlib": str or null, "stale": bool, "dry_run": bool,
           "remotes": [{"name": str, "matched": int, "without_time": int (that stay, because their age is not known),
           "unknown": int (that stay, because nobody trusted says what made them), "removed": int,
           "bytes": int (removed, or that would be), "toolchains": [{"toolchain": str, "platform": str,
           "jaxlib_version": str, "objects": int, "bytes": int}] (of what matched, with --jaxlib or --stale)}],
           "problems": [{"remote": str, "kind": str, "problem": str}]}

    Exit status 1 if a store fails.
    """
    settings = config.load()
    if jaxlib == "":
        # The value is probably of an unset shell variable.
        raise WrongUsage("--jaxlib is empty; without it, gc removes what is old")
    by_maker = stale or jaxlib is not None
    seconds = _OLD_SECONDS if older_than is None and not by_maker else older_than
    before, problems, rows = None if seconds is None else time.time() - seconds, Problems(), list[dict[str, Any]]()
    with asking(settings) as remotes:
        wanted = Wanted(jaxlib, remote_details.stale_toolchains(settings) if stale else None)
        for name in remotes.named(tier):
            with problems.of(name):
                row: dict[str, Any] = {"name": name, "matched": 0, "without_time": 0, "unknown": 0, "removed": 0}
                row |= {"bytes": 0, "toolchains": []}
                found = list(remotes.objects(name, remote_keys.ENTRIES if by_maker else ""))
                if before is not None:
                    found = _old(found, before, row)
                if by_maker:
                    found = _made_by(wanted, remotes, name, found, row)
                row["matched"] = len(found)
                rows.append(row)
                if dry_run:
                    row["bytes"] = sum(each.size for each in found)
                else:
                    _remove(remotes, found, row)
    if as_json:
        asked = {"older_than": seconds, "jaxlib": jaxlib, "stale": stale, "dry_run": dry_run}
        emit(asked | {"remotes": rows, "problems": problems.found})
    else:
        for row in rows:
            _tell(row, dry_run=dry_run)
        if wanted.toolchains is not None and not wanted.toolchains:
            note("no toolchain is stale here; see xcache toolchains")
    problems.tell()


@click.command()
@click.option("--all", "even_quick", is_flag=True, help="Also what compiled faster than no-upload-below demands.")
@tier_option
@duration_option(
    "--wait", "Until all is uploaded, this long at most (60s, 5m); then status 1 if something waits still."
)
@json_option
def push(even_quick: bool, tier: str | None, wait: float | None, as_json: bool) -> None:
    """Queue all that the store here has and may share, also what it had before a remote store was set.

    The daemon uploads it behind the programs, the dearest first, and leaves out what is there already: xcache status
    shows how much waits. Entries from other machines are not shared, nor, in the store of a whole machine, those of
    users who are not in trusted_writers.

    \b
    JSON: {"remotes": [{"name": str, "entries": int, "runs": int (what programs wanted), "left": int (that had no room;
           push again later), "waiting": int (only with --wait: to be uploaded still)}]}
    """
    with asking(config.load()) as remotes:
        rows: list[dict[str, Any]] = list(remotes.push(remotes.named(tier)[0] if tier else "", even_quick=even_quick))
        if wait is not None:
            _wait(remotes, rows, wait)
    if as_json:
        emit({"remotes": rows})
    else:
        for row in rows:
            left = f"; {row['left']} had no room: push again later" if row["left"] else ""
            queued = f"{counted(row['entries'], 'entry')} and {counted(row['runs'], 'run')}"
            print_line(f"{row['name']}: queued {queued}{left}")
        if not rows:
            raise Failure("no remote store that takes uploads")
    late = [row for row in rows if row.get("waiting")]
    for row in late:
        note(f"{row['name']}: {counted(row['waiting'], 'object')} wait still; see xcache status")
    if late:
        click.get_current_context().exit(1)


def _wait(remotes: Remotes, rows: Sequence[dict[str, Any]], seconds: float) -> None:
    """Wait until nothing waits to be uploaded to these stores, or so long; note for each what does."""
    until = time.monotonic() + seconds
    while True:
        waiting = remotes.waiting()
        for row in rows:
            row["waiting"] = waiting.get(row["name"], 0)
        if time.monotonic() >= until or not any(row["waiting"] for row in rows):
            return
        time.sleep(_LOOK_SECONDS)


def _old(objects: Iterable[Object], before: float, row: dict[str, Any]) -> list[Object]:
    """Return the objects that were written before a moment, and count them."""
    old = []
    for each in objects:
        if each.modified_at is None:
            row["without_time"] += 1
        elif each.modified_at < before:
            old.append(each)
    return old


def _made_by(
    wanted: Wanted, remotes: Remotes, name: str, objects: Sequence[Object], row: dict[str, Any]
) -> list[Object]:
    """Return the entries among these objects that are meant, and count them by toolchain."""
    if wanted.toolchains is not None and not wanted.toolchains:
        return []
    details = remote_details.of_one(remotes, name, objects)
    row["unknown"] = len(objects) - sum(each["state"] in (commands.OK, commands.GONE) for each in details.values())
    fitting = [(each, said) for each, said in details.items() if wanted.fits(said)]
    row["toolchains"] = remote_details.by_toolchain(fitting)
    return [each for each, _ in fitting]


def _tell(row: dict[str, Any], *, dry_run: bool) -> None:
    """Say what was removed from one store, or would be, and what stays."""
    what = f"{counted(row['matched'] if dry_run else row['removed'], 'object')}, {size(row['bytes'])}"
    print_line(f"{row['name']}: {'would remove' if dry_run else 'removed'} {what}")
    remote_details.print_toolchains(row["toolchains"])
    if row["without_time"]:
        note(f"{row['name']}: {counted(row['without_time'], 'object')} of unknown age stay; see --help")
    if row["unknown"]:
        told = f"left {counted(row['unknown'], 'entry')}: damaged, or signed by no trusted key"
        note(f"{row['name']}: {told}; xcache remote ls --details says more")


def _remove(remotes: Remotes, old: Sequence[Object], row: dict[str, Any]) -> None:
    """Remove objects of one store, with a bar on a terminal."""
    at = 0
    with progress(len(old), row["name"]) as advance:
        for done, removed in remotes.remove(row["name"], [each.name for each in old]):
            row["removed"] += removed
            row["bytes"] += sum(each.size for each in old[at : at + done])
            at += done
            advance(done)
