"""The flags component: XLA_FLAGS, LIBTPU_INIT_ARGS and ``--xla*`` arguments, as XLA itself would parse them.

XLA and libtpu parse these three lists one by one, so a flag in one list says nothing about the flag of the same name in
another. The order within a list counts, because some flags add to an earlier flag of the same name.

libtpu parses by Abseil's rules, which differ from XLA's: it splits at spaces only, knows no quotes, and takes the next
word for the value of a flag without one. Its words therefore count as they are written.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping

from xcache.errors import UncacheableError
from xcache.keys import lines, named_files
from xcache.keys.options import LEFT_OUT_NAMES

_ONLY_DUMP_OR_LOG = re.compile(
    r"xla_(\w+_)?dump_\w+|xla_tpu_sdc_checker_(streamz_metric|\w+_callbacks|\w+_are_present)"
)
_FLAG = re.compile(
    r"""\s*(?P<name>-[A-Za-z0-9_-]*)  # a flag starts with a dash
        (?:=(?:"(?P<double>(?:\\.|[^"\\])*)"?|'(?P<single>[^']*)'?)|(?P<plain>\S*))""",
    re.VERBOSE | re.DOTALL,
)
_NAME = re.compile(r"[\w-]*")
# Abseil's flags that bring others. Files name more files and variables, and libtpu has read them when a key is made.
_BRINGS_FLAGS = re.compile(r"\b(flagfile|fromenv|tryfromenv)\b")

_Flag = tuple[str, str]


def collect(
    environ: Mapping[str, str] | None = None,
    argv: Iterable[str] | None = None,
    *,
    extra: str = "",
    prefixes: tuple[str, ...] = (),
) -> bytes:
    """Return the flags that count, a line each, in order; a program can have jax add ``extra`` and ``prefixes``."""
    environ = os.environ if environ is None else environ
    arguments = tuple(arg for arg in (sys.argv if argv is None else argv) if arg.startswith(("--xla", *prefixes)))
    text, flags = _parse_all(_text(environ.get("XLA_FLAGS", "")), environ.get("LIBTPU_INIT_ARGS", ""), arguments, extra)
    files = named_files.digests(flags)
    return b"\n".join([text, *(lines({f"content of {name}": digest}) for name, digest in files)]) if files else text


def refuse_unseen(libtpu: str) -> None:
    """Raise UncacheableError if libtpu has read some of its flags in files or variables that this text only names."""
    if _BRINGS_FLAGS.search(libtpu):
        raise UncacheableError("libtpu's flags from files or variables")


@functools.lru_cache(maxsize=64)
def _parse_all(xla_flags: str, libtpu: str, arguments: tuple[str, ...], extra: str) -> tuple[bytes, tuple[_Flag, ...]]:
    """Return the lines of all three lists, and the flags in them."""
    sources = {"XLA_FLAGS": _split(xla_flags), "argument": map(_split_one, arguments)}
    rows, flags = [], []
    for source, parsed in sources.items():
        for name, value in parsed:
            if _counts(name):
                flags.append((name, value))
                # The name of an argument may hold any characters.
                rows.append(lines({f"{source} {name if _NAME.fullmatch(name) else repr(name)}": value}))
    for word in _libtpu_words(libtpu):
        flags.append(_split_one(word) if "=" in word else ("", word))
        rows.append(lines({"LIBTPU_INIT_ARGS": word}))
    if extra:
        rows.append(lines({"custom key": extra}))
    return b"\n".join(rows), tuple(flags)


def _counts(name: str) -> bool:
    return name not in LEFT_OUT_NAMES and not _ONLY_DUMP_OR_LOG.fullmatch(name)


def _libtpu_words(text: str) -> Iterator[str]:
    """Yield the words that count. One that only dumps or logs may be the value of a flag before it, and counts then."""
    may_be_value = False
    for word in text.split(" ") if text else ():
        name, equals, _ = word.removeprefix("-").removeprefix("-").partition("=")
        if may_be_value or not equals or _counts(name):
            yield word
        may_be_value = not equals


def _text(xla_flags: str) -> str:
    """Return the flags as text: XLA takes a value that does not begin with a dash for the name of a file of flags."""
    if not xla_flags.strip() or xla_flags.lstrip().startswith("-"):
        return xla_flags
    return named_files.read(xla_flags, "XLA_FLAGS names").decode("utf-8", "surrogateescape")


def _split(text: str) -> Iterator[_Flag]:
    at = 0
    # The match starts at an offset, because cutting off each flag would copy the rest of a long file every time.
    while match := _FLAG.match(text, at):
        at = match.end()
        if match["plain"] is None:
            value = match["single"] if match["single"] is not None else re.sub(r"\\(.)", r"\1", match["double"])
            yield match["name"].lstrip("-"), value
        else:
            yield _split_one(match["name"] + match["plain"])
    rest = text[at:].strip()
    if rest:
        # XLA ignores everything from the first word that is no flag; counting it is safe.
        yield "", rest


def _split_one(argument: str) -> _Flag:
    name, equals, value = argument.lstrip("-").partition("=")
    return name, value if equals else "true"
