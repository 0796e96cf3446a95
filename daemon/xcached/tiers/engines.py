"""Chooses the engine for a tier's address, and imports it only then."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from xcache.config.parsing import parse_duration
from xcache.config.remotes import BUNDLE, OPTIONS
from xcache.errors import ConfigError
from xcached.tiers.bounded import Bounded
from xcached.tiers.tier import Tier

# These may be shown; a header may be a credential.
_PUBLIC_OPTIONS = ("db", "prefix", "ttl")
_REDIS_PORT = 6379
_REDIS_PREFIX = "xcache:"


class _Address(NamedTuple):
    """The parts of an address, without percent signs but in ``raw_path``."""

    scheme: str
    user: str | None
    password: str | None
    host: str
    port: int | None
    raw_path: str
    options: tuple[tuple[str, str], ...]

    @property
    def path(self) -> str:
        return unquote(self.raw_path)

    @property
    def place(self) -> str:
        """The host and the port as in an address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"

    @property
    def public(self) -> str:
        """The address without credentials."""
        options = [each for each in self.options if each[0] in _PUBLIC_OPTIONS]
        return f"{self.scheme}://{self.place}{self.raw_path}" + (f"?{urlencode(options, safe=':')}" if options else "")


def open_tier(url: str, timeout: float) -> Tier:
    """Return the tier at an address, without asking it anything; its operations take at most ``timeout`` seconds.

    Raises ConfigError if the address cannot be understood, or the engine's library is not installed.
    """
    address = _parsed(url)
    if address is None:
        raise ConfigError("the address of a tier cannot be understood")
    opener, options = _ENGINES.get(address.scheme, (None, ()))
    if opener is None:
        known = ", ".join(f"{scheme}://" for scheme in _ENGINES)
        raise ConfigError(f"{address.public} is not the address of a tier, which begins with one of: {known}")
    if unknown := {name for name, _ in address.options} - set(options):
        # One that is misspelt may be meant for a credential, so only its name is shown.
        known = ", ".join(sorted({*OPTIONS, *options}))
        raise ConfigError(
            f"{address.public} has an option that is not known: {', '.join(sorted(unknown))}; there are: {known}"
        )
    try:
        return Bounded(opener(address, timeout), timeout)
    except ImportError as error:
        raise ConfigError(
            f"{address.public} needs {error.name}, which is not installed: pip install 'jax-xcache[remote]'"
        ) from None


def public_url(url: str) -> str:
    """Return an address without credentials, for people and logs."""
    address = _parsed(url)
    return address.public if address else "(an address that cannot be understood)"


def _parsed(url: str) -> _Address | None:
    try:
        parts = urlsplit(url)
        port = parts.port
        options = tuple(parse_qsl(parts.query, keep_blank_values=True))
    except ValueError:
        return None
    if not parts.scheme or parts.fragment or not url.partition(":")[2].startswith("//"):
        return None
    user, password = (None if each is None else unquote(each) for each in (parts.username, parts.password))
    # urlsplit makes the host lower case, which a bucket's name already is.
    return _Address(parts.scheme, user or None, password, parts.hostname or "", port, parts.path, options)


def _open_folder(address: _Address, _timeout: float) -> Tier:
    from xcached.tiers.folder import Folder

    _refuse_credentials(address)
    if address.place not in ("", "localhost") or not address.path.startswith("/") or address.path == "/":
        raise ConfigError(f"{address.public} does not name a folder, as file:///mnt/cache does")
    return Folder(Path(address.path))


def _open_bundle(address: _Address, _timeout: float) -> Tier:
    from xcached.tiers.bundle import bundle_at

    return bundle_at(Path(address.path))


def _open_object_store(address: _Address, timeout: float) -> Tier:
    from xcached.tiers.aws_files import settings_of_files
    from xcached.tiers.object_store import ObjectStore

    _refuse_credentials(address)
    if not address.host or address.port is not None:
        raise ConfigError(f"{address.public} does not name a bucket, as {address.scheme}://bucket/prefix does")
    settings = settings_of_files(os.environ, Path.home()) if address.scheme == "s3" else {}
    return ObjectStore(address.scheme, address.host, address.path.strip("/"), settings, timeout)


def _open_redis(address: _Address, timeout: float) -> Tier:
    from xcached.tiers.redis_store import Place, RedisStore

    options = dict(address.options)
    socket = address.path if address.scheme == "redis+unix" else ""
    # As others write it: redis://host/2.
    database = options.get("db") or ("" if socket else address.path.strip("/")) or "0"
    try:
        ttl = parse_duration(options["ttl"]) if "ttl" in options else None
    except ValueError:
        raise ConfigError(f"{address.public} has a ttl that is not a time such as 30d") from None
    if not database.isdigit() or (not address.host and not socket) or (ttl is not None and ttl <= 0):
        raise ConfigError(f"{address.public} does not name a database of a Redis, as redis://host:6379/0 does")
    place = Place(
        host=address.host,
        port=address.port or _REDIS_PORT,
        socket=socket,
        tls=address.scheme == "rediss",
        user=address.user,
        password=address.password,
        database=int(database),
        prefix=options.get("prefix", _REDIS_PREFIX),
        ttl=ttl,
    )
    return RedisStore(place, timeout)


def _open_http_cache(address: _Address, timeout: float) -> Tier:
    from xcached.tiers.http_cache import HttpCache

    headers = {}
    for _, text in address.options:
        name, colon, value = text.partition(":")
        if not colon or not name.strip() or not text.isascii() or not text.isprintable():
            raise ConfigError(f"{address.public} has a header that is not of the form header=NAME:VALUE")
        headers[name.strip()] = value.strip()
    if not address.host:
        raise ConfigError(f"{address.public} does not name a host")
    credentials = (address.user or "", address.password or "") if address.user or address.password else None
    return HttpCache(f"{address.scheme}://{address.place}{address.raw_path}", credentials, headers, timeout)


def _refuse_credentials(address: _Address) -> None:
    if address.user is not None or address.password is not None:
        raise ConfigError(f"{address.public} takes its credentials from the environment, not from the address")


_Opener = Callable[[_Address, float], Tier]
_ENGINES: dict[str, tuple[_Opener, tuple[str, ...]]] = {
    "file": (_open_folder, ()),
    BUNDLE: (_open_bundle, ()),
    "s3": (_open_object_store, ()),
    "gs": (_open_object_store, ()),
    "az": (_open_object_store, ()),
    "redis": (_open_redis, ("db", "prefix", "ttl")),
    "rediss": (_open_redis, ("db", "prefix", "ttl")),
    "redis+unix": (_open_redis, ("db", "prefix", "ttl")),
    "http": (_open_http_cache, ("header",)),
    "https": (_open_http_cache, ("header",)),
}
