"""The text of a lock file, which says what a run wanted: a line for each program, below what they are made with.

    xcache lock 1
    # What a run wanted. On another machine, `xcache preflight FILE` says what of it is missing there.

    platform   cpu
    device     cpu
    jaxlib     0.10.2
    toolchain  5b1c...
    3f9c...       1.2 s  jit_step

The same run gives the same bytes: all is sorted, and there are no times of day.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from xcache.errors import LockFileError
from xcache.wire.hashing import is_digest

FORMAT = 1
# A larger file is not read: it has lines for a hundred thousand programs.
MOST_BYTES = 16 * 1024**2
_KIND = "xcache lock"
_REMARK = "# What a run wanted. On another machine, `xcache preflight FILE` says what of it is missing there."
_PROGRAM = re.compile(r"([0-9a-f]{64}) +([0-9.]{1,20}) s(?:  (.*))?")
_LONGEST_TEXT = 200
# The compile time of a key stays as it was in the file unless it is more than so many times longer or shorter.
_FACTOR = 2.0
_LEAST_SECONDS, _MOST_SECONDS = 0.01, 1e9


class Made(NamedTuple):
    """The compiler, platform and devices of a program; ``toolchain`` is the digest of this component of its key."""

    platform: str
    device: str
    jaxlib: str
    toolchain: str


class Program(NamedTuple):
    """A program that was wanted, and how long it takes to compile."""

    module_name: str
    seconds: float
    made: Made


# Programs by key.
Programs = Mapping[str, Program]


def tidied(program: Program) -> Program:
    """Return a program as a file can hold it: texts of one line, and seconds of two digits."""
    # In this order it is a number, also for a NaN.
    seconds = min(_MOST_SECONDS, max(_LEAST_SECONDS, program.seconds))
    return Program(_line(program.module_name), float(f"{seconds:.1e}"), Made(*map(_line, program.made)))


def merged(old: Programs, new: Programs, *, is_same_run: bool) -> dict[str, Program]:
    """Return what a file is to hold: what is new, and beside it what is old if that is of the same run.

    Compile times vary a little from run to run; so those that are known stay, and nobody has to look at the change.
    """
    found = dict(old) if is_same_run else {}
    for key, each in new.items():
        before = old[key].seconds if key in old else each.seconds
        is_alike = before <= each.seconds * _FACTOR and each.seconds <= before * _FACTOR
        found[key] = each._replace(seconds=before if is_alike else each.seconds)
    return found


def render(programs: Programs) -> str:
    """Return the text of a file."""
    lines = [f"{_KIND} {FORMAT}", _REMARK]
    for made in sorted({each.made for each in programs.values()}):
        lines += ["", *(f"{name:9}  {text}".rstrip() for name, text in made._asdict().items())]
        mine = [(each.module_name, key, each.seconds) for key, each in programs.items() if each.made == made]
        lines += [f"{key}  {f'{seconds:.10g} s':>8}  {name}".rstrip() for name, key, seconds in sorted(mine)]
    return "\n".join((*lines, ""))


def is_lock(text: str) -> bool:
    """Return whether a text begins as a lock file of this format does."""
    return text.partition("\n")[0].split() == [*_KIND.split(), str(FORMAT)]


def parse(text: str) -> dict[str, Program]:
    """Return the programs in a text; raise LockFileError if it is not the text of a lock file."""
    first, *lines = text.splitlines() or [""]
    if not is_lock(first):
        if first.startswith(f"{_KIND} "):
            raise LockFileError(f"its format is another one ({_line(first)}) than the {FORMAT} of this xcache")
        raise LockFileError("it is no lock file of xcache; XCACHE_LOCK=FILE has a run write one")
    programs: dict[str, Program] = {}
    facts: dict[str, str] = {}
    in_head = False
    for number, line in enumerate(lines, start=2):
        name, _, value = line.strip().partition(" ")
        if not name or name.startswith("#"):
            continue
        if name in Made._fields:
            # A program ends the head, and the next head says everything anew.
            facts = facts if in_head else {}
            facts[name] = value.strip()
            in_head = True
        elif (found := _PROGRAM.fullmatch(line.strip())) and len(facts) == len(Made._fields):
            in_head = False
            programs[found[1]] = _read(found, Made(**facts), number)
        else:
            raise LockFileError(f"line {number} is not understood: {_line(line)[:80]}")
    return programs


def _read(found: re.Match[str], made: Made, number: int) -> Program:
    if not is_digest(made.toolchain):
        raise LockFileError(f"the toolchain above line {number} is no digest")
    try:
        return Program(found[3] or "", float(found[2]), made)
    except ValueError:
        raise LockFileError(f"line {number} has no time that can be understood") from None


def _line(text: str) -> str:
    """Return a text that stays on its line, and in it."""
    return "".join(c if c.isprintable() else "?" for c in text.strip())[:_LONGEST_TEXT].strip()
