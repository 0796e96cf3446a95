"""``xcache export``: write entries, and what programs wanted, into one file."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import click

from xcache.cli import Failure, WrongUsage, daemon, daemon_listing
from xcache.cli.bundle_file import executable_in
from xcache.cli.completion import complete_run
from xcache.cli.ledger_file import open_ledger
from xcache.cli.output import counted, emit, json_option, note, print_line, printable, progress, size
from xcache.cli.selection import filter_options, filtered
from xcache.client.connection import Connection
from xcache.config import config
from xcache.config.config import Config
from xcache.errors import DamagedError, RefusedError
from xcache.wire import commands
from xcache.wire.bounded import read_some
from xcache.wire.bundles import BundleWriter, Part
from xcache.wire.names import Names

# Seconds that packing and signing one entry may take.
_PACK_SECONDS = 60.0
_NOT_SIGNED = "not signed"
_GONE = "no entry"


class _History(NamedTuple):
    """The keys that a program wanted with these arguments."""

    program: str
    arguments: str
    keys: list[str]


@click.command()
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path), required=True, help="The file to write."
)
@click.option("--run", "run", metavar="RUN", shell_complete=complete_run, help="What one run used; see xcache runs.")
@click.option("--program", metavar="TEXT", help="What programs wanted whose name is or contains this (train.py).")
@filter_options
@click.option("--programs", is_flag=True, help="With the StableHLO of each entry, for xcache hlo and xcache graph.")
@click.option("--unsigned", is_flag=True, help="Sign nothing; whoever imports the file has to vouch for it.")
@json_option
def export(
    output: Path,
    run: str | None,
    program: str | None,
    programs: bool,
    unsigned: bool,
    as_json: bool,
    **filters: Any,
) -> None:
    """Write entries into one file, a bundle, for other machines: all that are in use here, or those that match.

    A bundle is imported (xcache import), or served in place (XCACHE_BUNDLES). With the entries goes what programs
    wanted, so that they start warm. Each object is signed with the daemon's key (xcache key new). An export of
    a store that has not changed makes the same file again. Stale entries are left out.

    \b
    JSON: {"file": str, "entries": int, "programs": int (whose wants go along), "bytes": int, "signed": bool}
    """
    settings = config.load()
    keys, of_run = _chosen(settings, run, filters)
    with contextlib.closing(daemon.connect_for_change(settings)) as connection:
        histories = [each for each in _histories(settings, connection) if program is None or program in each.program]
        if program is not None:
            wanted = {key for each in histories for key in each.keys}
            if not histories:
                raise Failure(f"no program is remembered whose name contains {printable(program)}")
            keys = [key for key in keys if key in wanted]
        if not keys:
            raise Failure("no entry matches, so there is nothing to export")
        # Another program may share an entry with the run.
        of_these = of_run.issuperset if run is not None else lambda wanted: not set(keys).isdisjoint(wanted)
        histories = [each for each in histories if of_these(each.keys)]
        with _written(output) as file:
            count, told = _write(settings, connection, file, keys, histories, programs=programs, unsigned=unsigned)
    if as_json:
        emit({"file": str(output), "entries": count, "programs": told, "bytes": _bytes(output), "signed": not unsigned})
    else:
        what = f"{counted(count, 'entry')} and what {counted(told, 'program')} wanted"
        print_line(f"wrote {what} to {output}, {size(_bytes(output))}")


def _chosen(settings: Config, run: str | None, filters: dict[str, Any]) -> tuple[list[str], set[str]]:
    """Return the keys of the entries that are not stale and match, and all that the run wanted."""
    with daemon_listing.open_store_or_listing(settings, latest=True) as store:
        rows = store.entries(filtered(filters))[0] if store else []
    keys = {str(row["key"]) for row in rows if not row["stale"]}
    if run is None:
        return sorted(keys), set()
    with open_ledger(settings) as (ledger, _):
        of_run = {row.key for row in ledger.rows(ledger.run(run))}
    return sorted(keys & of_run), of_run


def _histories(settings: Config, connection: Connection) -> Iterator[_History]:
    position = 0
    while True:
        found = connection.demand(commands.AskHistory(position), commands.WantedBefore, settings.timeout)
        if not found.program:
            return
        yield _History(found.program, found.arguments, found.keys)
        position = found.position


def _write(
    settings: Config,
    connection: Connection,
    file: BinaryIO,
    keys: list[str],
    histories: list[_History],
    *,
    programs: bool,
    unsigned: bool,
) -> tuple[int, int]:
    """Write the objects in the order of their names; return how many entries, and programs, there are."""
    names, writer, counts = Names(settings.namespace), BundleWriter(file), {True: 0, False: 0}
    asked: dict[str, commands.ExportEntry | commands.ExportHistory] = {
        names.entry(key): commands.ExportEntry(key, programs, unsigned) for key in keys
    }
    asked |= {
        names.run(each.program, each.arguments): commands.ExportHistory(each.program, each.arguments, unsigned)
        for each in histories
    }
    with progress(len(asked), "exporting") as advance:
        for name, message in sorted(asked.items()):
            try:
                content = _demand(settings, connection, message)
            except RefusedError as error:
                if error.kind == _NOT_SIGNED:
                    raise Failure(f"{error}; --unsigned does without") from None
                if error.kind != _GONE:
                    note(str(error))
            else:
                if isinstance(message, commands.ExportEntry):
                    writer.add(name, content, _executable_in(content, message.key, settings.namespace))
                else:
                    writer.add(name, content)
                counts[isinstance(message, commands.ExportEntry)] += 1
            advance(1)
    if not counts[True]:
        raise Failure("none of the entries can be exported")
    writer.finish()
    return counts[True], counts[False]


def _executable_in(content: bytes, key: str, namespace: str) -> Part:
    try:
        return executable_in(content, key, namespace)
    except DamagedError as error:
        raise Failure(
            f"what the daemon made cannot be used: {error}. If it was started with other settings: xcache restart"
        ) from None


def _demand(settings: Config, connection: Connection, message: commands.ExportEntry | commands.ExportHistory) -> bytes:
    found = connection.demand(message, commands.Exported, settings.timeout + _PACK_SECONDS)
    if found.content is not None:
        return found.content
    with open(connection.take_descriptor(), "rb") as file:
        # The daemon has written it, and shares the place in it.
        file.seek(0)
        return read_some(file, found.size)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of the one at ``path`` once it is whole."""
    if path.is_dir():
        raise WrongUsage(f"{path} is a folder; name a file, such as {path / 'cache.xcb'}")
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(unfinished, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise Failure(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _bytes(path: Path) -> int:
    return path.stat().st_size
