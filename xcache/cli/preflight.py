"""``xcache preflight``: whether what a run wanted is here or in the remote stores, before it runs on this machine."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from xcache.cli import WrongUsage, compiler_here, daemon
from xcache.cli.output import (
    Column,
    counted,
    duration,
    emit,
    json_option,
    note,
    print_line,
    print_table,
    print_wrapped,
    printable,
    progress,
)
from xcache.cli.selection import SHORT_KEY, seconds_of
from xcache.client.connection import Connection
from xcache.config import config
from xcache.config.config import Config
from xcache.errors import LockFileError
from xcache.lock_file import MOST_BYTES, Made, Program, parse
from xcache.wire import commands
from xcache.wire.bounded import UnreadableError, text_of
from xcache.wire.commands import HERE, MISSING, PRESENCES, REMOTE, UNKNOWN
from xcache.wire.ledger import CAUSES

_TABLE_LIMIT = 10
# The remote stores may take so many times what a program waits for an entry.
_TIMES = 3
# Entries that are asked for together; the first may be large.
_FETCHED_AT_ONCE, _FETCH_SECONDS = 8, 600.0
_WORDS = CAUSES | {"not cacheable": "it cannot be cached"}
_COLUMNS = (
    Column("program", lambda row: row.program.module_name, cut=True),
    Column("key", lambda row: row.key[:SHORT_KEY]),
    Column("platform", lambda row: row.program.made.platform),
    Column("compile", lambda row: duration(row.program.seconds), "right"),
)
_WHY = Column("why", lambda row: _WORDS.get(row.reason, row.reason), cut=True)


class _Row(NamedTuple):
    """A program of the lock, and where its entry is."""

    key: str
    program: Program
    state: str = MISSING
    remote: str = ""
    reason: str = ""


class _Fit(NamedTuple):
    """Programs made with one compiler: how many, and whether a program here has another one (None: not known)."""

    made: Made
    programs: int
    differs: bool | None


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--fetch", is_flag=True, help="Bring here what the remote stores have.")
@click.option(
    "--python",
    metavar="PATH",
    help="The Python of the programs, whose jaxlib is compared. [default: the one that runs xcache, if it has jaxlib]",
)
@click.option(
    "--at-least",
    metavar="DURATION",
    callback=seconds_of,
    help="Leave out what compiles faster than this (500ms, 2s), as remote stores may with no-upload-below.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=_TABLE_LIMIT,
    show_default=True,
    help="Show at most this many of the missing; 0 for all.",
)
@json_option
def preflight(file: Path, fetch: bool, python: str | None, at_least: float | None, limit: int, as_json: bool) -> None:
    """Check that what a run wanted is here or in the remote stores, and say how long compiling the rest takes.

    XCACHE_LOCK=FILE has a run write the FILE, on this machine or another one. An entry that would not be handed to you,
    such as one of a writer or key that is not trusted, is missing. Only the beginning of an entry in a remote store
    is read; --fetch checks all of it. It starts a daemon if none runs.

    \b
    JSON: {"programs": int, "here": int, "remote": int, "missing": int, "unknown": int (a remote store failed),
           "fetched": int, "compile_seconds": float (of missing and unknown ones, one after the other),
           "toolchains": [{"platform": str, "device": str, "jaxlib": str, "toolchain": str, "programs": int,
           "differs": bool or null (not known)}], "python": str or null, "python_jaxlib": str or null,
           "problems": [{"remote": str, "problem": str}],
           "entries": [{"key": str, "module_name": str, "platform": str, "compile_seconds": float,
           "state": "here", "remote", "missing" or "unknown", "remote": str (that has it), "reason": str}]}

    Exit status 1 if anything is missing or unknown, or a program here would want none of it, because its compiler is
    another one.
    """
    settings = config.load()
    wanted = _read(file)
    rows = [_Row(key, program) for key, program in wanted.items() if program.seconds >= (at_least or 0.0)]
    here = compiler_here.of_python(python)
    fits = _fits(rows, here, settings)
    with contextlib.closing(daemon.connect_for_change(settings)) as connection:
        rows, problems = _asked(settings, connection, rows)
        fetched = 0
        if fetch:
            rows, fetched = _fetched(settings, connection, rows)
    rows.sort(key=lambda row: (PRESENCES.index(row.state), -row.program.seconds, row.program.module_name, row.key))
    if as_json:
        emit(_document(rows, fits, here, problems, fetched))
    else:
        some = f"{len(rows)} of {counted(len(wanted), 'program')}" if at_least else counted(len(rows), "program")
        print_wrapped(f"{file} wants {some}", following="  ")
        _print(rows, fits, here, fetched, limit)
    for name, problem in problems.items():
        note(f"what {name} has is not known: {problem}")
    if any(row.state in (MISSING, UNKNOWN) for row in rows) or _none_fits(fits):
        click.get_current_context().exit(1)


def _read(file: Path) -> dict[str, Program]:
    try:
        return parse(text_of(file, MOST_BYTES, "replace"))
    except (LockFileError, UnreadableError, OSError) as error:
        raise WrongUsage(printable(f"{file}: {getattr(error, 'strerror', None) or error}")) from None


def _fits(rows: Sequence[_Row], here: compiler_here.Compiler | None, settings: Config) -> list[_Fit]:
    made = [row.program.made for row in rows]
    return [
        _Fit(each, made.count(each), compiler_here.differs(each, here, settings.own_dir) if here else None)
        for each in sorted(set(made))
    ]


def _none_fits(fits: Sequence[_Fit]) -> bool:
    return bool(fits) and all(fit.differs for fit in fits)


def _asked(settings: Config, connection: Connection, rows: Sequence[_Row]) -> tuple[list[_Row], dict[str, str]]:
    """Return where the entries are, and the trouble with remote stores."""
    seconds, found, problems = settings.remote_timeout * _TIMES, list[_Row](), dict[str, str]()
    for batch in _batches(rows, commands.MAX_KEYS, "asking"):
        asked = commands.AskPresence([row.key for row in batch], seconds)
        answer = connection.demand(asked, commands.Presence, seconds + settings.timeout)
        found += _told(batch, answer)
        problems |= answer.problems
    return found, problems


def _fetched(settings: Config, connection: Connection, rows: Sequence[_Row]) -> tuple[list[_Row], int]:
    """Have what is in remote stores brought here, the dearest first; return where all is then, and how many came."""
    wanted = sorted((row for row in rows if row.state == REMOTE), key=lambda row: -row.program.seconds)
    found = {row.key: row for row in rows}
    for batch in _batches(wanted, _FETCHED_AT_ONCE, "fetching"):
        asked = commands.Fetch([row.key for row in batch], _FETCH_SECONDS)
        answer = connection.demand(asked, commands.Presence, _FETCH_SECONDS + settings.timeout)
        found |= {row.key: row for row in _told(batch, answer)}
    return [*found.values()], sum(found[row.key].state == HERE for row in wanted)


def _told(batch: Sequence[_Row], answer: commands.Presence) -> list[_Row]:
    return [
        row._replace(state=state, remote=remote, reason=reason)
        for row, (state, remote, reason) in zip(batch, answer.entries, strict=True)
    ]


def _batches(rows: Sequence[_Row], size: int, label: str) -> Iterator[Sequence[_Row]]:
    """Yield rows in batches, with a bar on a terminal if there are several."""
    with progress(len(rows) if len(rows) > size else 0, label) as advance:
        for at in range(0, len(rows), size):
            batch = rows[at : at + size]
            yield batch
            advance(len(batch))


def _compile_seconds(rows: Sequence[_Row]) -> float:
    return math.fsum(row.program.seconds for row in rows if row.state in (MISSING, UNKNOWN))


def _document(
    rows: Sequence[_Row],
    fits: Sequence[_Fit],
    here: compiler_here.Compiler | None,
    problems: dict[str, str],
    fetched: int,
) -> dict[str, object]:
    return {
        "programs": len(rows),
        **{state: sum(row.state == state for row in rows) for state in PRESENCES},
        "fetched": fetched,
        "compile_seconds": round(_compile_seconds(rows), 3),
        "toolchains": [fit.made._asdict() | {"programs": fit.programs, "differs": fit.differs} for fit in fits],
        "python": here.python if here else None,
        "python_jaxlib": here.jaxlib if here else None,
        "problems": [{"remote": name, "problem": problem} for name, problem in problems.items()],
        "entries": [
            {
                "key": row.key,
                "module_name": row.program.module_name,
                "platform": row.program.made.platform,
                "compile_seconds": row.program.seconds,
                "state": row.state,
                "remote": row.remote,
                "reason": row.reason,
            }
            for row in rows
        ],
    }


def _print(
    rows: Sequence[_Row],
    fits: Sequence[_Fit],
    here: compiler_here.Compiler | None,
    fetched: int,
    limit: int,
) -> None:
    for fit in fits:
        made = f"{fit.programs} for {fit.made.platform} ({fit.made.device}), jaxlib {fit.made.jaxlib}"
        print_wrapped(f"{made}: {_of_fit(fit, here)}", "  ", "    ")
    counts = {state: sum(row.state == state for row in rows) for state in PRESENCES}
    print_line(f"{counts[HERE]:7}  here{f', of which {fetched} were fetched now' if fetched else ''}")
    for name in sorted({row.remote for row in rows if row.state == REMOTE}):
        print_line(f"{sum((row.state, row.remote) == (REMOTE, name) for row in rows):7}  in {name}")
    print_line(f"{counts[MISSING]:7}  missing")
    if counts[UNKNOWN]:
        print_line(f"{counts[UNKNOWN]:7}  unknown")
    # The dearest first, wherever it may be.
    absent = sorted((row for row in rows if row.state in (MISSING, UNKNOWN)), key=lambda row: -row.program.seconds)
    if not absent:
        return
    took = duration(_compile_seconds(rows))
    what = "what is missing, or unknown," if counts[UNKNOWN] else "what is missing"
    # A reason that all share is said once.
    reason, *others = {row.reason for row in absent}
    if reason and not others:
        print_wrapped(f"Reason: {_WORDS.get(reason, reason)}.")
    print_wrapped(f"Compiling {what} takes about {took}, one program after the other. The dearest:")
    shown = absent[:limit] if limit else absent
    print_table((*_COLUMNS, _WHY) if others else _COLUMNS, shown)
    if len(absent) > len(shown):
        print_line(f"... and {len(absent) - len(shown)} more (--limit 0 shows all)")


def _of_fit(fit: _Fit, here: compiler_here.Compiler | None) -> str:
    """Return words for whether a program here has the compiler that programs are made with."""
    if here is None:
        return "not compared with the compiler of programs here: name their Python with --python"
    if fit.differs is None:
        return f"{here.python} has it, too; whether plugin and tools are the same shows only on the device"
    if not fit.differs:
        return f"{here.python} has the same toolchain"
    if fit.made.jaxlib != here.jaxlib:
        return f"{here.python} has jaxlib {here.jaxlib}, so that its programs want none of this"
    return f"{here.python} has other files of that version, so that its programs want none of this"
