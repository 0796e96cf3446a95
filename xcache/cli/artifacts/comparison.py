"""Compare two programs of the same stage, line by line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_CONTEXT = 3
_METADATA = re.compile(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
# Newer jaxlibs put the places into tables at the top.
_TABLES = re.compile(r'FileNames|FunctionNames|FileLocations|StackFrames|\d+ ("|\{).*')
_NUMBER = re.compile(r"^\d{4}\.")
_GAP = "\N{HORIZONTAL ELLIPSIS}"


class Pair(NamedTuple):
    """The lines of a file of both programs; None if only the other has it."""

    name: str
    here: list[str] | None
    there: list[str] | None


def pairs(here: Mapping[str, bytes], there: Mapping[str, bytes]) -> Iterator[Pair]:
    """Yield the files that differ. A pass is compared with the same pass, whatever its number.

    Places in the source code do not count.
    """
    one, other = _by_role(here), _by_role(there)
    for role in dict.fromkeys([*one, *other]):
        pair = Pair(role, *(None if role not in each else _lines(each[role]) for each in (one, other)))
        if pair.here != pair.there:
            yield pair


def unified(pair: Pair, names: tuple[str, str]) -> list[str]:
    """Return the differences as ``diff -u`` shows them."""
    here, there = (f"{name} {pair.name}" for name in names)
    return list(difflib.unified_diff(pair.here or [], pair.there or [], here, there, n=_CONTEXT, lineterm=""))


def side_by_side(pair: Pair, width: int) -> list[str]:
    """Return both programs in two columns; a sign between them marks the lines that differ."""
    half = (width - 3) // 2
    here, there = pair.here or [], pair.there or []
    rows: list[str] = []
    for group in difflib.SequenceMatcher(None, here, there).get_grouped_opcodes(_CONTEXT):
        if rows or group[0][1]:
            rows.append(_GAP)
        for kind, begin, end, other_begin, other_end in group:
            left, right = here[begin:end], there[other_begin:other_end]
            for number in range(max(len(left), len(right))):
                texts = [_cut(side[number], half) if number < len(side) else "" for side in (left, right)]
                sign = " " if kind == "equal" else "<" if not texts[1] else ">" if not texts[0] else "|"
                rows.append(f"{texts[0]:{half}} {sign} {texts[1]}".rstrip())
    return rows


def _by_role(files: Mapping[str, bytes]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name, content in files.items():
        base = role = _NUMBER.sub("", name)
        again = 1
        while role in found:
            again += 1
            role = f"{base} ({again})"
        found[role] = content
    return found


def _lines(content: bytes) -> list[str]:
    kept: list[str] = []
    for line in content.decode("utf-8", "replace").splitlines():
        # The tables leave empty lines behind.
        if not _TABLES.fullmatch(line) and (line or kept[-1:] != [""]):
            kept.append(_METADATA.sub("", line))
    return kept


def _cut(line: str, width: int) -> str:
    line = line.expandtabs(2)
    return line if len(line) <= width else f"{line[: width - 1]}{_GAP}"
