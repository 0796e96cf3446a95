"""The address of a remote tier in the setting ``remote``: where it is, and what may be done with it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from xcache.config import parsing

SCHEMES = ("s3", "gs", "az", "file", "redis", "rediss", "redis+unix", "http", "https")
# The scheme of a bundle; no setting names it.
BUNDLE = "bundle"
_NAMESPACE = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}|")
_CREDENTIALS = re.compile(r"(?<=//)[^/@\s]*(?=@)|(?<=[?&]header=)[^&\s]*")
_ADDRESS_BYTES = 2000
_LEAST_RATE = 64 * 1024


class Remote(NamedTuple):
    """A tier: its address for the engine, and the options that are xcache's own."""

    url: str
    readonly: bool = False
    writeonly: bool = False
    # Entries that compiled faster are not uploaded.
    no_upload_below: float = 0.0
    # "keys": what a trusted key has signed is loaded. "tier": all that is there.
    trust: str = "keys"
    # The StableHLO goes along.
    programs: bool = False
    # Bytes a second that uploads may take; 0 for no limit. A gigabyte costs three seconds of a processor, and programs
    # would notice if they came at once.
    rate: int = 8 * 1024**2

    @property
    def public_url(self) -> str:
        """The address without names, passwords and parameters, for logs and for people."""
        from urllib.parse import urlsplit, urlunsplit

        if self.is_bundle:
            return self.url
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    @property
    def is_bundle(self) -> bool:
        """Whether it is a file on this machine."""
        return self.url.startswith(f"{BUNDLE}:")

    @property
    def path(self) -> Path:
        """The path of a bundle."""
        from urllib.parse import unquote

        return Path(unquote(self.url.removeprefix(f"{BUNDLE}://")))

    @property
    def id(self) -> str:
        """The digest that stands for the key of an unsigned entry from this tier, if the tier itself is trusted."""
        import hashlib

        return hashlib.sha256(f"tier {self.public_url}".encode()).hexdigest()


def _trust(text: str) -> str:
    return parsing.parse_choice(text, ("keys", "tier"))


def _rate(text: str) -> int:
    return parsing.parse_size_or_no_limit(text, _LEAST_RATE)


OPTIONS: dict[str, Callable[[str], Any]] = {
    "readonly": parsing.parse_flag,
    "writeonly": parsing.parse_flag,
    "no-upload-below": parsing.parse_duration,
    "trust": _trust,
    "programs": parsing.parse_flag,
    "rate": _rate,
}


def parse_remotes(text: str) -> tuple[str, ...]:
    """Return the addresses, which blanks separate; raise ValueError for one that cannot be used."""
    return _parsed(text, remote)


def parse_bundles(text: str) -> tuple[str, ...]:
    """Return the paths of bundles, which blanks separate; raise ValueError for one that cannot be used."""
    return _parsed(text, bundle)


def _parsed(text: str, parse: Callable[[str], Remote]) -> tuple[str, ...]:
    """Return what blanks separate; raise UnfitError, which names the first that is wrong."""
    given, seen = tuple(text.split()), set[str]()
    for each in given:
        try:
            url = parse(each).public_url
        except parsing.UnfitError:
            raise
        except ValueError:
            raise parsing.UnfitError(f"{masked(each)} is not understood") from None
        if url in seen:
            raise parsing.UnfitError(f"{url} comes twice")
        seen.add(url)
    return given


def bundle(path: str) -> Remote:
    """Return the bundle of a path such as ``/opt/app/cache.xcb?trust=tier`` as a tier that is only read."""
    from urllib.parse import parse_qsl, urlsplit

    parts = urlsplit(path)
    options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    if parts.scheme or parts.netloc or parts.fragment or not parts.path.startswith("/") or len(path) > _ADDRESS_BYTES:
        raise ValueError(path)
    trust = _trust(options.pop("trust", "keys"))
    if options:
        raise ValueError(path)
    return Remote(f"{BUNDLE}://{parts.path}", readonly=True, trust=trust)


def remote(address: str) -> Remote:
    """Return the tier of an address such as ``s3://bucket/prefix?readonly=1``; raise ValueError for any other text."""
    # Most programs name no tier, and need not import this.
    from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

    parts = urlsplit(address)
    is_path = parts.scheme in ("file", "redis+unix")
    if parts.scheme not in SCHEMES or len(address) > _ADDRESS_BYTES or not (parts.path if is_path else parts.netloc):
        raise ValueError(address)
    if is_path and (parts.netloc or not parts.path.startswith("/")):
        # file://folder would be a host.
        raise parsing.UnfitError(f"{masked(address)} has no path; one begins with a third slash: file:///mnt/cache")
    try:
        _ = parts.port
    except ValueError:
        raise parsing.UnfitError(f"the port of {masked(address)} is no number up to 65535") from None
    given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    options = {name.replace("-", "_"): _option(name, value) for name, value in given if name in OPTIONS}
    others = urlencode([(name, value) for name, value in given if name not in OPTIONS], quote_via=quote)
    found = Remote(urlunsplit(parts._replace(query=others, fragment="")), **options)
    if found.readonly and found.writeonly:
        raise parsing.UnfitError(f"{found.public_url} is both readonly and writeonly")
    if not math.isfinite(found.no_upload_below):
        raise parsing.UnfitError(f"no-upload-below of {found.public_url} is not finite")
    return found


def _option(name: str, value: str) -> Any:
    try:
        return OPTIONS[name](value)
    except ValueError:
        raise parsing.UnfitError(f"the option {name}={value} is not understood") from None


def masked(text: str) -> str:
    """Return a text with addresses in it without their names, passwords and headers."""
    return _CREDENTIALS.sub("***", text)


def parse_namespace(text: str) -> str:
    """Return a namespace: letters a to z, digits, dots and dashes; or nothing."""
    name = text.strip().lower()
    if not _NAMESPACE.fullmatch(name):
        raise ValueError(text)
    return name
