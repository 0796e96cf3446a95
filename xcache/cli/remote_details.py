"""Ask for the headers of entries in remote stores, for ``xcache remote ls --details`` and ``xcache remote gc``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from xcache.cli import daemon, store_file
from xcache.cli.output import Column, counted, duration, note, print_line, progress, size
from xcache.cli.remote_asking import Object, Problems, Remotes
from xcache.cli.remote_keys import object_name
from xcache.cli.store_file import Row
from xcache.config.config import Config
from xcache.wire import commands
from xcache.wire.hashing import is_digest
from xcache.wire.ownership import trusted_uids, uid_of_account

_SHORT = 12
_MOST_REASONS = 5


class Wanted(NamedTuple):
    """Which entries are meant, by what made them; None does not restrict."""

    jaxlib: str | None
    toolchains: frozenset[str] | None

    def fits(self, details: Row) -> bool:
        """Return whether an entry is meant; what no trusted key has signed is not believed."""
        version = details.get("jaxlib_version")
        return (
            details["state"] == commands.OK
            # 0.10 is meant by 0.10.2, and not by 0.1.
            and (self.jaxlib is None or f"{version}.".startswith(f"{self.jaxlib}."))
            and (self.toolchains is None or details["toolchain"] in self.toolchains)
        )


class Makers(NamedTuple):
    """The toolchains that made the entries of a store, as ``by_toolchain`` says; and how many are of no use here."""

    toolchains: list[Row]
    unknown: int


def of_one(remotes: Remotes, name: str, objects: Iterable[Object]) -> dict[Object, Row]:
    """Return what the entries among these objects of one store say, with a bar on a terminal."""
    entries = {each.id: each for each in objects if is_digest(each.id) and each.name == object_name(each.id)}
    found = {}
    with progress(len(entries), name) as advance:
        for row in remotes.described(name, list(entries)):
            each = entries[row.pop("key")]
            found[each] = row if row.get("size", each.size) == each.size else _of_another_size(row, each)
            advance(1)
    return found


def of_all(remotes: Remotes, problems: Problems, objects: Sequence[Object]) -> dict[Object, Row]:
    """Return what the entries among these objects say; trouble with a store is noted."""
    found: dict[Object, Row] = {}
    for name in dict.fromkeys(each.remote for each in objects):
        with problems.of(name):
            found |= of_one(remotes, name, (each for each in objects if each.remote == name))
    return found


def stale_toolchains(settings: Config) -> frozenset[str]:
    """Return the toolchains that are no longer installed, as far as the store here knows.

    Whoever uses the daemon of a machine can say that a toolchain was here, and is gone, which other machines have. So
    there only those count that an administrator or a trusted writer had.
    """
    daemon.flush(settings)
    with store_file.open_store(settings) as store:
        rows = store.toolchains() if store else []
    believed = _believed(settings)
    return frozenset(
        row["digest"]
        for row in rows
        if row["state"] == "stale"
        and (believed is None or not believed.isdisjoint(one["uid"] for one in row["installations"]))
    )


def _believed(settings: Config) -> set[int] | None:
    """Return the users who are believed; None for all: the daemon is of one user."""
    daemon_uid = settings.daemon_uid()
    if daemon_uid is None:
        return None
    writers = [name for name in settings.trusted_writers if not name.startswith("@")]
    with settings.blamed("trusted_writers"):
        return trusted_uids(daemon_uid) | {*map(uid_of_account, writers)}


def columns(details: dict[Object, Row]) -> list[Column]:
    """Return the columns of a table of objects that say what these are."""

    def text(each: Object, name: str) -> str:
        return str(details.get(each, {}).get(name) or "")

    def compile_time(each: Object) -> str:
        seconds = details.get(each, {}).get("compile_seconds")
        return "" if seconds is None else duration(seconds)

    return [
        Column("platform", lambda each: text(each, "platform")),
        Column("jaxlib", lambda each: text(each, "jaxlib_version")),
        Column("toolchain", lambda each: text(each, "toolchain")[:_SHORT]),
        Column("compile", compile_time, "right"),
        Column("signed by", lambda each: _signer(details[each]) if each in details else "", cut=True),
    ]


def tell_problems(details: dict[Object, Row]) -> None:
    """Say on stderr why entries would not be loaded here."""
    reasons = Counter(row["problem"] for row in details.values() if row["state"] != commands.OK)
    for problem, count in reasons.most_common(_MOST_REASONS):
        note(f"{counted(count, 'entry')}: {problem}")
    if len(reasons) > _MOST_REASONS:
        note("there are more reasons; --json has them")


def makers_of(remotes: Remotes, name: str, objects: Iterable[Object]) -> Makers:
    """Return what made the entries among these objects of a store."""
    anything, details = Wanted(None, None), of_one(remotes, name, objects)
    fitting = [(each, row) for each, row in details.items() if anything.fits(row)]
    return Makers(by_toolchain(fitting), len(details) - len(fitting))


def by_toolchain(details: Iterable[tuple[Object, Row]]) -> list[Row]:
    """Return how many entries each toolchain made, and their bytes, the most bytes first."""
    found: dict[str, Row] = {}
    for each, row in details:
        made_by = {name: row[name] for name in ("toolchain", "platform", "jaxlib_version")}
        count = found.setdefault(row["toolchain"], made_by | {"objects": 0, "bytes": 0})
        count["objects"] += 1
        count["bytes"] += each.size
    return sorted(found.values(), key=lambda count: -int(count["bytes"]))


def print_toolchains(rows: Iterable[Row]) -> None:
    """Print what ``by_toolchain`` returned."""
    for row in rows:
        made = f"{row['toolchain'][:_SHORT]}  {row['platform']}, jaxlib {row['jaxlib_version']}"
        print_line(f"  {made}: {counted(row['objects'], 'entry')}, {size(row['bytes'])}")


def _of_another_size(row: Row, each: Object) -> Row:
    problem = f"it has {each.size} bytes, and its header says {row['size']}"
    return row | {"state": commands.DAMAGED, "problem": problem}


def _signer(row: Row) -> str:
    if row["state"] not in (commands.OK, commands.NOT_TRUSTED):
        return str(row["state"])
    if not row["signer"]:
        return "nobody"
    return str(row["signer"]) + ("" if row["state"] == commands.OK else " (not trusted)")
