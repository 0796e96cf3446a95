"""What the text of a setting may be: sizes, times, numbers, names. All of them raise ValueError for what it may not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("IB", 1024), ("B", 1000))
}
_DURATIONS = {"": 1.0, "MS": 0.001, "S": 1.0, "M": 60.0, "H": 3600.0, "D": 86400.0}
_FLAGS = {"1": True, "on": True, "true": True, "0": False, "off": False, "false": False}
_NAME = re.compile(r"@?[A-Za-z0-9_.][A-Za-z0-9_.@$-]*")
# Locks and joins of threads count in nanoseconds of 64 bits.
_LONGEST_TIMEOUT = 1e9
# SQLite counts in integers of 64 bits.
_LARGEST_SIZE = 2**63 - 1
_LARGEST_COUNT = 10**12
_LARGEST_SHARE = 90


def parse_size(text: str) -> int:
    """Bytes in ``10G``, ``512MiB``, ``1.5GB`` or ``0`` (K, M, G, T and KiB... are powers of 1024, KB... of 1000)."""
    return _within(0, int(_parse_quantity(text, _UNITS)), _LARGEST_SIZE)


def parse_size_between(least: int, most: int) -> Callable[[str], int]:
    """A parser of sizes within bounds."""
    return lambda text: _within(least, parse_size(text), most)


def parse_count_between(least: int, most: int) -> Callable[[str], int]:
    """A parser of plain numbers within bounds."""
    return lambda text: _within(least, int(text), most)


def parse_room(text: str) -> str:
    """What is to stay free on a disk: a share such as ``5%``, or a size; 0 for nothing."""
    text = text.strip()
    if not text.endswith("%"):
        return str(parse_size(text))
    share = _parse_quantity(text.removesuffix("%"), {"": 1.0})
    if share > _LARGEST_SHARE:
        raise ValueError(text)
    return f"{share:g}%" if share else "0"


def parse_optional_path(text: str) -> Path | None:
    """A path, or nothing."""
    return parse_path(text) if text.strip() else None


def parse_count(text: str) -> int:
    """A plain number, 0 for no limit."""
    return _within(0, int(text), _LARGEST_COUNT)


def parse_duration(text: str) -> float:
    """Seconds in ``500ms``, ``30``, ``30s``, ``5m``, ``2h`` or ``7d``."""
    return _parse_quantity(text, _DURATIONS)


def parse_timeout(text: str) -> float:
    """Seconds that a socket can be told to wait."""
    seconds = parse_duration(text)
    if not 0 < seconds <= _LONGEST_TIMEOUT:
        raise ValueError(text)
    return seconds


def parse_flag(text: str) -> bool:
    """Whether ``1``, ``on``, ``true`` or ``0``, ``off``, ``false``."""
    try:
        return _FLAGS[text.strip().lower()]
    except KeyError:
        raise ValueError(text) from None


def parse_path(text: str) -> Path:
    """An absolute path; a relative one begins where the process is."""
    if not text.strip():
        raise ValueError(text)
    return Path(text).expanduser().absolute()


def parse_level(text: str) -> str:
    """The name of a level of messages."""
    level = text.strip().lower()
    if level not in ("debug", "info", "warning", "error"):
        raise ValueError(text)
    return level


def parse_names(text: str) -> tuple[str, ...]:
    """Names of accounts and ``@groups``, with commas or blanks between them."""
    names = tuple(text.replace(",", " ").split())
    if not all(map(_NAME.fullmatch, names)):
        raise ValueError(text)
    return names


def parse_account(text: str) -> str:
    """The name or number of one account, or nothing."""
    names = parse_names(text)
    if len(names) > 1 or any(name.startswith("@") for name in names):
        raise ValueError(text)
    return names[0] if names else ""


def _within(least: int, number: int, most: int) -> int:
    if not least <= number <= most:
        raise ValueError(number)
    return number


def _parse_quantity(text: str, units: Mapping[str, float]) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in units:
        raise ValueError(text)
    # As whole numbers where they are: a float is not exact beyond 9e15.
    return (float(match[1]) if "." in match[1] else int(match[1])) * units[match[2].upper()]
