"""Which entries are meant: from the beginning of a key to the one, or by age."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from xcache import values
from xcache.cli import Failure, Misunderstood, reading
from xcache.cli.output import printable
from xcache.config import Config
from xcache.errors import ClosedStoreError

_KEY_LENGTH = 64
_SHOWN = 10


def _seconds(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    try:
        return None if text is None else values.parse_duration(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a duration such as 30s, 5m, 2h or 7d") from None


older_than_option = click.option(
    "--older-than", metavar="DURATION", callback=_seconds, help="Stored longer ago than this (5m, 2h, 7d)."
)
newer_than_option = click.option("--newer-than", metavar="DURATION", callback=_seconds, help="Stored within this time.")


def all_chosen(settings: Config, prefixes: Sequence[str]) -> list[str]:
    """The keys that begin like this, each once. Where only the daemon may look into the store, they must be whole."""
    try:
        with reading.reading(settings) as store:
            return list(dict.fromkeys(chosen(store, prefix) for prefix in prefixes))
    except ClosedStoreError:
        if not all(map(is_whole, prefixes)):
            raise
        return list(dict.fromkeys(prefixes))


def is_whole(prefix: str) -> bool:
    """Whether this is a key from its beginning to its end."""
    return re.fullmatch(rf"[0-9a-f]{{{_KEY_LENGTH}}}", prefix) is not None


def chosen(store: reading.StoreReader | None, prefix: str) -> str:
    """The key that begins with ``prefix``; Failure where there is not exactly one."""
    prefix = prefix.lower()
    if not re.fullmatch(rf"[0-9a-f]{{1,{_KEY_LENGTH}}}", prefix):
        raise Misunderstood(f"{prefix!r} is not the beginning of a key (1 to {_KEY_LENGTH} hexadecimal digits)")
    if store is None:
        raise Failure(f"no entry begins with {prefix}: {reading.EMPTY}")
    found = store.beginning_with(prefix, limit=_SHOWN + 1)
    if not found:
        raise Failure(f"no entry begins with {prefix}")
    if len(found) > 1:
        lines = [f"  {row['key']}  {printable(row['module_name'])}" for row in found[:_SHOWN]]
        more = ["  ..."] if len(found) > _SHOWN else []
        raise Misunderstood("\n".join([f"more than one entry begins with {prefix}:", *lines, *more]))
    key: str = found[0]["key"]
    return key
