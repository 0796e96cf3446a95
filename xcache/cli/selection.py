"""Choose entries: by the beginning of a key, or by age."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from xcache.cli import Failure, WrongUsage, daemon_listing, store_file
from xcache.cli.output import duration, moment, print_line, printable, size
from xcache.config import parsing
from xcache.config.config import Config

# Well below the limit of one message (protocol.MAX_LIST).
KEYS_PER_MESSAGE = 1000
# As ls prints keys.
SHORT_KEY = 12
# As git asks for: fewer digits may be a slip, and name one entry only by chance.
_LEAST_DIGITS, KEY_LENGTH = 4, 64
_MAX_SHOWN = 10
_Command = TypeVar("_Command", bound=Callable[..., Any])
_PREFIX = re.compile(rf"[0-9a-f]{{{_LEAST_DIGITS},{KEY_LENGTH}}}")


def seconds_of(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    """Return the seconds of a duration that an option has; None without the option."""
    try:
        return None if text is None else parsing.parse_duration(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a duration such as 30s, 5m, 2h or 7d") from None


def duration_option(name: str, meaning: str) -> Callable[[_Command], _Command]:
    """Return an option that is a time such as 5m, in seconds."""
    return click.option(name, metavar="DURATION", callback=seconds_of, help=meaning)


older_than_option = duration_option("--older-than", "Stored longer ago than this (5m, 2h, 7d).")
newer_than_option = duration_option("--newer-than", "Stored within this time.")
_FILTERS = (
    click.option(
        "--name", metavar="TEXT", help="Modules whose name contains this text or matches this pattern (jit_*)."
    ),
    click.option("--platform", help="Entries for this platform (cpu, cuda, tpu)."),
    click.option("--jaxlib", metavar="VERSION", help="Entries of this jaxlib: 0.10.2, or 0.10 for 0.10.*."),
    older_than_option,
    newer_than_option,
)


def filter_options(command: _Command) -> _Command:
    """Add the options that choose entries to a command, which takes them as keywords for ``filtered``."""
    for option in reversed(_FILTERS):
        command = option(command)
    return command


def filtered(filters: Mapping[str, Any], **order: Any) -> store_file.Wanted:
    """Return the selection that the filter options make, in this order."""
    now = time.time()
    chosen = dict(filters)
    older_than, newer_than = chosen.pop("older_than"), chosen.pop("newer_than")
    return store_file.Wanted(
        created_before=None if older_than is None else now - older_than,
        created_after=None if newer_than is None else now - newer_than,
        **chosen,
        **order,
    )


def chosen(settings: Config, prefixes: Sequence[str]) -> dict[str, str]:
    """Return the module names by full key for these beginnings; ask the daemon if this user may not read the store."""
    valid = [each.lower() for each in prefixes if _PREFIX.fullmatch(each.lower())]
    with daemon_listing.open_store_or_listing(settings, valid) as store:
        return dict(_entry(store, prefix) for prefix in prefixes)


def print_few(entries: Mapping[str, str]) -> None:
    """Print each of these entries, as ``chosen`` returns them, if they are few."""
    if len(entries) <= _MAX_SHOWN:
        for key, module_name in entries.items():
            print_line(f"  {key[:SHORT_KEY]}  {module_name}")


def full_key(store: store_file.StoreReader | None, wanted: str) -> str:
    """Return the key that begins with ``wanted``, or the one whose module's name is or contains it.

    Raises Failure or WrongUsage unless there is exactly one.
    """
    is_prefix = bool(_PREFIX.fullmatch(wanted.lower()))
    if not wanted or (is_prefix and (store is None or store.beginning_with(wanted.lower(), limit=1))):
        return _entry(store, wanted)[0]
    if store is None:
        raise Failure(f"no entry is named {printable(wanted)}: {store_file.EMPTY}")
    rows, _ = store.entries(store_file.Wanted(name=wanted))
    # Several users may have one entry.
    named = {row["key"]: row for row in rows}
    found = {key: row for key, row in named.items() if row["module_name"] in (wanted, f"jit_{wanted}")} or named
    if not found:
        raise Failure(f"no {store.what} {'begins with or ' if is_prefix else ''}is named {printable(wanted)}")
    if len(found) > 1:
        newest = sorted(found.values(), key=lambda row: -row["created_at"])
        told = [(row["key"][:SHORT_KEY], _in_words(row)) for row in newest]
        raise ambiguous(f"{len(found)} entries are named {printable(wanted)}, so give a key:", told)
    (key,) = found
    return str(key)


def checked_prefix(text: str) -> str:
    """Return the beginning of a key as keys are written; raise WrongUsage if it is none."""
    prefix = text.lower()
    if not _PREFIX.fullmatch(prefix):
        raise WrongUsage(
            f"{prefix!r} is not the beginning of a key: {_LEAST_DIGITS} to {KEY_LENGTH} hexadecimal digits,"
            " such as xcache ls prints"
        )
    return prefix


def _entry(store: store_file.StoreReader | None, prefix: str) -> tuple[str, str]:
    prefix = checked_prefix(prefix)
    if store is None:
        raise Failure(f"no entry begins with {prefix}: {store_file.EMPTY}")
    found = store.beginning_with(prefix, limit=_MAX_SHOWN + 1)
    if not found:
        raise Failure(f"no {store.what} begins with {prefix}")
    if len(found) > 1:
        rows = [(row["key"], row["module_name"]) for row in found]
        raise ambiguous(f"more than one entry begins with {prefix}:", rows)
    return found[0]["key"], found[0]["module_name"]


def _in_words(row: store_file.Row) -> str:
    """Return what tells entries of one name apart."""
    made = f"compiled in {duration(row['compile_seconds'])}, stored {moment(row['created_at'])}"
    return f"{row['module_name']}  {size(row['stored_size'])}, {made}"


def ambiguous(sentence: str, found: Sequence[tuple[str, str]]) -> WrongUsage:
    """Return the error for several entries, each a key and words, of which one was meant."""
    lines = [f"  {key}  {printable(told)}" for key, told in found[:_MAX_SHOWN]]
    more = ["  ..."] if len(found) > _MAX_SHOWN else []
    return WrongUsage("\n".join([sentence, *lines, *more]))
