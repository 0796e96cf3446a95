"""Parse the text of a setting: sizes, times, numbers, names. Every parser raises ValueError for text it rejects."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("IB", 1024), ("B", 1000))
}
_DURATIONS = {"": 1.0, "MS": 0.001, "S": 1.0, "M": 60.0, "H": 3600.0, "D": 86400.0}
_FLAGS = {"1": True, "on": True, "true": True, "0": False, "off": False, "false": False}
_NAME = re.compile(r"@?[A-Za-z0-9_.][A-Za-z0-9_.@$-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Python's locks count nanoseconds as 64-bit integers.
_MAX_TIMEOUT_SECONDS = 1e9
# SQLite's integers have 64 bits.
_MAX_BYTES = 2**63 - 1
_MAX_COUNT = 10**12
_MAX_PERCENT = 90


class UnfitError(ValueError):
    """A text that is rejected; in words, the part of it that is wrong."""


def parse_size(text: str) -> int:
    """Return the bytes in ``10G``, ``512MiB``, ``1.5GB`` or ``0``: K and KiB are 1024, KB is 1000, and so on."""
    return _within(0, int(_parse_quantity(text, _UNITS)), _MAX_BYTES)


def parse_size_or_no_limit(text: str, least: int) -> int:
    """Return a size of at least ``least`` bytes, or 0, which means no limit."""
    size = parse_size(text)
    return _within(least, size, _MAX_BYTES) if size else 0


def parse_size_between(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of sizes within these bounds."""
    return lambda text: _within(least, parse_size(text), most)


def parse_count_between(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of plain numbers within these bounds."""
    return lambda text: _within(least, int(text), most)


def parse_room(text: str) -> str:
    """Return the space to keep free on a disk in normal form: a share such as ``5%``, or bytes; 0 for none."""
    text = text.strip()
    if not text.endswith("%"):
        return str(parse_size(text))
    share = _parse_quantity(text.removesuffix("%"), {"": 1.0})
    if share > _MAX_PERCENT:
        raise ValueError(text)
    return f"{share:g}%" if share else "0"


def parse_count(text: str) -> int:
    """Return a plain number; 0 means no limit."""
    return _within(0, int(text), _MAX_COUNT)


def parse_duration(text: str) -> float:
    """Return the seconds in ``500ms``, ``30``, ``30s``, ``5m``, ``2h`` or ``7d``."""
    return _parse_quantity(text, _DURATIONS)


def parse_duration_from(least: float) -> Callable[[str], float]:
    """Return a parser of times of at least so many seconds, or 0, which means never."""

    def parse(text: str) -> float:
        seconds = parse_duration(text)
        if 0 < seconds < least:
            raise ValueError(text)
        return seconds

    return parse


def parse_duration_or_none(text: str) -> float | None:
    """Return the seconds of a time, or None for an empty text."""
    return parse_duration(text) if text.strip() else None


def parse_timeout(text: str) -> float:
    """Return the seconds of a timeout: more than 0, and few enough for a lock to count."""
    seconds = parse_duration(text)
    if not 0 < seconds <= _MAX_TIMEOUT_SECONDS:
        raise ValueError(text)
    return seconds


def parse_flag(text: str) -> bool:
    """Return True for ``1``, ``on`` or ``true``, False for ``0``, ``off`` or ``false``."""
    try:
        return _FLAGS[text.strip().lower()]
    except KeyError:
        raise ValueError(text) from None


def parse_path(text: str) -> Path:
    """Return an absolute path; a relative one starts from the working directory."""
    if not text.strip():
        raise ValueError(text)
    return Path(text).expanduser().absolute()


def parse_path_or_none(text: str) -> Path | None:
    """Return an absolute path, or None for an empty text."""
    return parse_path(text) if text.strip() else None


def parse_level(text: str) -> str:
    """Return the name of a log level."""
    return parse_choice(text, ("debug", "info", "warning", "error"))


def parse_address(text: str) -> str:
    """Return ``host:port``, the absolute path of a socket, or nothing."""
    text = text.strip()
    if not text or text.startswith("/"):
        return text
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ValueError(text)
    _within(1, int(port), 65535)
    return text


def parse_choice(text: str, choices: Collection[str]) -> str:
    """Return the one of these words."""
    word = text.strip().lower()
    if word not in choices:
        raise ValueError(text)
    return word


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names of accounts and ``@groups``, which commas or blanks separate."""
    names = tuple(text.replace(",", " ").split())
    if not all(map(_NAME.fullmatch, names)):
        raise ValueError(text)
    return names


def parse_account(text: str) -> str:
    """Return the name or number of one account, or an empty string."""
    names = parse_names(text)
    if len(names) > 1 or any(name.startswith("@") for name in names):
        raise ValueError(text)
    return names[0] if names else ""


def parse_key_source(text: str) -> str:
    """Return where a private key comes from: ``env:NAME``, ``command:WORDS``, an absolute path, or nothing."""
    # Most programs have no key.
    import shlex

    text = text.strip()
    kind, _, rest = text.partition(":")
    if kind == "env":
        is_right = _VARIABLE.fullmatch(rest) is not None
    elif kind == "command":
        is_right = bool(shlex.split(rest))
    else:
        text = str(Path(text).expanduser()) if text else ""
        is_right = not text or text.startswith("/")
    if not is_right:
        raise ValueError(text)
    return text


def _within(least: int, number: int, most: int) -> int:
    if not least <= number <= most:
        raise ValueError(number)
    return number


def _parse_quantity(text: str, units: Mapping[str, float]) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in units:
        raise ValueError(text)
    # Whole numbers stay integers, because a float is not exact beyond 9e15.
    return (float(match[1]) if "." in match[1] else int(match[1])) * units[match[2].upper()]
