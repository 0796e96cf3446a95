"""``xcache remote``: check, list and tidy up the remote stores. Only the daemon has their engines, so it is asked."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Iterator
from typing import Any

import click

from xcache.cli import Group, remote_details, remote_keys
from xcache.cli.output import (
    Column,
    ago,
    counted,
    emit,
    json_option,
    print_finding,
    print_line,
    print_table,
    size,
)
from xcache.cli.remote_asking import Object, Problems, asking, tier_option
from xcache.cli.remote_changes import gc, push, rm
from xcache.cli.remote_findings import KEYS, findings
from xcache.cli.selection import SHORT_KEY
from xcache.config import config

_TABLE_LIMIT = 50
# The first parts of names, and what one such object is called.
_KINDS = {"entries": "entry", "runs": "run"}
_CALLED = _KINDS | {"leases": "lease"}
_OTHER = "other"


@click.group(cls=Group)
def remote() -> None:
    """Check, list and tidy up the remote stores that the daemon shares entries with.

    XCACHE_REMOTE names them. The daemon does all of it, with its own settings and credentials, so that each command
    starts a daemon if none runs; only root and the daemon's own account may. A NAME (--tier NAME) is the address of a
    store or a part of it.
    """


@remote.command()
@tier_option
@json_option
def check(tier: str | None, as_json: bool) -> None:
    """Ask each remote store now: write a small object, read it back, compare, and remove it.

    Those that the settings call readonly are only read from. The first line says whether a key signs what is uploaded,
    and whether it is trusted here. A store gets three times XCACHE_REMOTE_TIMEOUT.

    \b
    JSON: {"keys": {"state": str, "found": str, "advice": str, "signer": str, "signer_id": str, "signer_problem": str,
           "why_not_trusted": str (the signer here), "trusted": int (keys), "trusted_file": str,
           "trusted_problem": str},
           "remotes": [{"name": str, "state": "ok", "note" or "wrong", "found": str, "advice": str,
           "kind": str (of trouble; empty: none), "problem": str, "not_removed": str (why), "seconds": float,
           "readonly": bool, "writeonly": bool, "trust": "keys" or "tier", "can_list": bool,
           "rejected": int (objects that were not used since the daemon began), "last_rejected": str (why)}]}

    Exit status 1 if anything is wrong.
    """
    with asking(config.load()) as remotes:
        checked = remotes.check(remotes.named(tier)[0] if tier else "")
    found = list(findings(checked))
    if as_json:
        told: dict[str, dict[str, Any]]
        told = {one.about: {"state": one.state, "found": one.found, "advice": one.advice} for one in found}
        rows = [told[str(each["name"])] | each for each in checked.remotes]
        emit({"keys": told[KEYS] | checked.keys, "remotes": rows})
    else:
        for one in found:
            print_finding(one.state, one.about, one.found, one.advice)
    if any(one.state == "wrong" for one in found):
        click.get_current_context().exit(1)


@remote.command()
@tier_option
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    help=f"Show at most this many; 0 for all. [default: {_TABLE_LIMIT}, with --json all]",
)
@click.option("--details", is_flag=True, help="Read what each entry says that it is: what made it, who signed it.")
@json_option
def ls(tier: str | None, limit: int | None, details: bool, as_json: bool) -> None:
    """List the objects of the remote stores, the newest first.

    An entry has its key, and the name of its module if it is here, too. A run is what a program wanted, with a copy of
    the small ones of its entries. HTTP caches cannot list what they have, and Redis does not know how old it is.

    --details reads the beginning of each entry that is shown, a request for each. An entry that no trusted key has
    signed says of itself what somebody wrote there; it is not loaded here.

    \b
    JSON: {"objects": [{"remote": str, "kind": "entries", "runs" or another, "id": str (of an entry, its key),
           "module_name": str or null, "bytes": int, "modified_at": float or null,
           "details": null (not asked for, or of no entry) or {"state": "ok", "not trusted", "damaged", "unreadable" or
           "gone", "problem": str (why not ok), and where its header could be read "module_name": str,
           "platform": str, "jaxlib_version": str, "toolchain": str, "compile_seconds": float,
           "size": int (that the object should have), "signer": str (the id of a key; empty: nobody)}}],
           "matched": int (without the limit), "problems": [{"remote": str, "kind": str, "problem": str}]}

    Exit status 1 if a store fails.
    """
    settings = config.load()
    most = limit if limit is not None else 0 if as_json else _TABLE_LIMIT
    problems, seen = Problems(), _Seen()
    with asking(settings) as remotes:
        stores = remotes.named(tier)
        found = seen.passing(problems.objects(remotes, stores))
        objects = heapq.nsmallest(most, found, key=_order) if most else sorted(found, key=_order)
        said = remote_details.of_all(remotes, problems, objects) if details else {}
    names = remote_keys.module_names(settings, [each.id for each in objects if each.kind == "entries"])
    if as_json:
        rows = [_told(each) | {"module_name": names.get(each.id), "details": said.get(each)} for each in objects]
        emit({"objects": rows, "matched": seen.count, "problems": problems.found})
    elif objects:
        several = len({each.remote for each in objects}) > 1
        columns = [
            Column("object", lambda each: each.id[:SHORT_KEY]),
            Column("kind", lambda each: _CALLED.get(each.kind, each.kind)),
            Column("name", lambda each: said.get(each, {}).get("module_name") or names.get(each.id, ""), cut=True),
            *(remote_details.columns(said) if details else []),
            Column("size", lambda each: size(each.size), "right"),
            Column("age", lambda each: _age(each.modified_at), "right"),
            *([Column("store", lambda each: each.remote, cut=True)] if several else []),
        ]
        print_table(columns, objects)
        if seen.count > len(objects):
            print_line(f"... and {seen.count - len(objects)} more (--limit 0 shows all)")
        remote_details.tell_problems(said)
    elif len(problems.found) < len(stores):
        print_line("there is nothing")
    problems.tell()


@remote.command()
@tier_option
@click.option("--details", is_flag=True, help="Read of each entry what made it, and count by that, too.")
@json_option
def stats(tier: str | None, details: bool, as_json: bool) -> None:
    """Count the objects of the remote stores and their bytes, with the times of the oldest and the newest.

    HTTP caches cannot list what they have. --details reads the beginning of each entry, a request for each, and counts
    by platform and jaxlib those that a trusted key has signed.

    \b
    JSON: {"remotes": [{"name": str, "kinds": [{"kind": "entries", "runs" or "other", "objects": int, "bytes": int,
           "oldest": float or null, "newest": float or null}],
           "toolchains": null (not asked for) or [{"toolchain": str, "platform": str, "jaxlib_version": str,
           "objects": int, "bytes": int}], "unknown": null or int (entries that are damaged, or signed by no trusted
           key)}], "problems": [{"remote": str, "kind": str, "problem": str}]}

    Exit status 1 if a store fails.
    """
    problems, found, made_by = Problems(), dict[str, dict[str, _Count]](), dict[str, remote_details.Makers]()
    with asking(config.load()) as remotes:
        for name in remotes.named(tier):
            with problems.of(name):
                objects = list(remotes.objects(name))
                found[name] = _counted(objects)
                if details:
                    made_by[name] = remote_details.makers_of(remotes, name, objects)
    rows = [(name, kind, count) for name, counts in found.items() for kind, count in counts.items()]
    if as_json:
        told = [
            {
                "name": name,
                "kinds": [{"kind": kind} | dataclasses.asdict(count) for kind, count in counts.items()],
                "toolchains": made_by[name].toolchains if name in made_by else None,
                "unknown": made_by[name].unknown if name in made_by else None,
            }
            for name, counts in found.items()
        ]
        emit({"remotes": told, "problems": problems.found})
    elif rows:
        columns = [
            Column("store", lambda row: row[0], cut=True),
            Column("kind", lambda row: row[1]),
            Column("objects", lambda row: str(row[2].objects), "right"),
            Column("size", lambda row: size(row[2].bytes), "right"),
            Column("oldest", lambda row: _age(row[2].oldest), "right"),
            Column("newest", lambda row: _age(row[2].newest), "right"),
        ]
        print_table(columns, rows)
        for name, makers in made_by.items():
            print_line(f"{name}:")
            remote_details.print_toolchains(makers.toolchains)
            if makers.unknown:
                unknown = f"{counted(makers.unknown, 'entry')}: damaged, or signed by no trusted key"
                print_line(f"  {unknown} (xcache remote ls --details)")
    problems.tell()


for command in (rm, gc, push):
    remote.add_command(command)


@dataclasses.dataclass
class _Count:
    """The objects of one kind."""

    objects: int = 0
    bytes: int = 0
    oldest: float | None = None
    newest: float | None = None


def _counted(objects: Iterable[Object]) -> dict[str, _Count]:
    counts = {kind: _Count() for kind in _KINDS}
    for each in objects:
        count = counts.setdefault(each.kind if each.kind in _KINDS else _OTHER, _Count())
        count.objects, count.bytes = count.objects + 1, count.bytes + each.size
        if (when := each.modified_at) is not None:
            count.oldest = when if count.oldest is None else min(count.oldest, when)
            count.newest = when if count.newest is None else max(count.newest, when)
    return counts


class _Seen:
    """Counts what passes."""

    def __init__(self) -> None:
        self.count = 0

    def passing(self, objects: Iterable[Object]) -> Iterator[Object]:
        for each in objects:
            self.count += 1
            yield each


def _order(each: Object) -> tuple[float, str]:
    return -(each.modified_at or 0.0), each.name


def _told(each: Object) -> dict[str, Any]:
    told = {"remote": each.remote, "kind": each.kind, "id": each.id}
    return told | {"bytes": each.size, "modified_at": each.modified_at}


def _age(when: float | None) -> str:
    return "" if when is None else ago(when)
