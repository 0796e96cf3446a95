"""Find entries in remote stores by the beginnings of their keys, and the names of their modules here."""

from __future__ import annotations

from collections.abc import Sequence

from xcache.cli import Failure, store_file
from xcache.cli.remote_asking import CANNOT_LIST, Remotes, RemoteTroubleError
from xcache.cli.selection import KEY_LENGTH, ambiguous, checked_prefix
from xcache.config.config import Config
from xcache.errors import XcacheError

# How the names of entries' objects begin in the namespace.
ENTRIES = "entries/"


def object_name(key: str) -> str:
    """Return the name of an entry's object in the namespace."""
    return f"{ENTRIES}{key[:2]}/{key}"


def module_names(settings: Config, keys: Sequence[str]) -> dict[str, str]:
    """Return the names of the modules of those entries that are here, as far as this user may know."""
    try:
        with store_file.open_store(settings) as store:
            return store.module_names(keys) if store else {}
    except XcacheError:
        return {}


def chosen(
    settings: Config, remotes: Remotes, names: Sequence[str], prefixes: Sequence[str]
) -> dict[str, dict[str, int | None]]:
    """Return for each store the whole keys that are meant and that it has or may have, with their sizes if known.

    Raise Failure or WrongUsage unless each beginning fits exactly one key, in whatever stores.
    """
    found: dict[str, dict[str, int | None]] = {name: {} for name in names}
    for prefix in map(checked_prefix, prefixes):
        fitting, silent = _beginning_with(remotes, names, prefix)
        keys = list(dict.fromkeys(key for entries in fitting.values() for key in entries))
        if len(keys) > 1:
            named = module_names(settings, keys)
            raise ambiguous(f"more than one entry begins with {prefix}:", [(key, named.get(key, "")) for key in keys])
        if not keys and len(prefix) == KEY_LENGTH and silent:
            keys = [prefix]
        if not keys:
            whole = f"; those that cannot list what they have need all {KEY_LENGTH} digits" if silent else ""
            raise Failure(f"no entry of the remote stores begins with {prefix}{whole}")
        for name in names:
            found[name] |= dict.fromkeys(keys) if name in silent else fitting.get(name, {})
    return found


def _beginning_with(
    remotes: Remotes, names: Sequence[str], prefix: str
) -> tuple[dict[str, dict[str, int | None]], list[str]]:
    """Return the sizes of the entries that begin so by store and key, and the stores that cannot list."""
    fitting: dict[str, dict[str, int | None]] = {}
    silent = []
    for name in names:
        try:
            fitting[name] = {each.id: each.size for each in remotes.objects(name, object_name(prefix))}
        except RemoteTroubleError as error:
            if error.kind != CANNOT_LIST:
                raise
            silent.append(name)
    return fitting, silent
