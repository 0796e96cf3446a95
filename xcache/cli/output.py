"""How things look: JSON, tables, and numbers for people."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON of the shape shown above.")

# What reads a pipe wants whole lines; no line of a table is longer than this.
_UNBOUNDED = 10_000
# Between two columns.
_GAP = 2
# A column that is cut keeps this much.
_LEAST = 10
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Column(NamedTuple):
    """A column of a table: its title, its cell in a row, and whether it may be cut where there is little room."""

    title: str
    cell: Callable[[Any], str]
    justify: Literal["left", "right"] = "left"
    cut: bool = False


def emit(document: dict[str, Any]) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(document, indent=2))


def note(message: str) -> None:
    """Say something beside the output, on stderr."""
    click.echo(f"xcache: {message}", err=True)


def print_table(columns: Sequence[Column], rows: Sequence[Any]) -> None:
    """Print rows under titles; on a terminal no wider than that is, if there is a way."""
    # rich takes as long to import as everything else together, and JSON needs none of it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # As Text, so that brackets in a name are no markup.
    cells = [
        [Text(printable(column.cell(row)), no_wrap=True, overflow="ellipsis") for row in rows] for column in columns
    ]
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    needed = -_GAP
    for column, texts in zip(columns, cells, strict=True):
        widest = max([len(column.title), *(text.cell_len for text in texts)])
        least = min(widest, _LEAST) if column.cut else widest
        needed += least + _GAP
        table.add_column(column.title, justify=column.justify, min_width=least, no_wrap=not column.cut)
    for row in zip(*cells, strict=True):
        table.add_row(*row)
    terminal = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNBOUNDED
    # What is wider than a terminal goes on in its next line, which is better than a key cut short.
    console = Console(width=max(terminal, needed), highlight=False)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        print_line(line.rstrip())


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print names and values below each other; values are never cut."""
    facts = list(facts)
    width = max(len(name) for name, _ in facts) + _GAP
    for name, value in facts:
        print_line(click.style(name.ljust(width), bold=True) + printable(value))


def print_line(line: str) -> None:
    """Print a line with what the output's encoding has for it."""
    encoding = sys.stdout.encoding or "utf-8"
    click.echo(line.encode(encoding, "replace").decode(encoding))


def printable(text: str) -> str:
    """The text without characters that would steer the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def size(count: float) -> str:
    """Bytes: ``999 B``, ``1.2 KiB``, ``325 KiB``."""
    if count < 1024:
        return f"{count:.0f} B"
    power = 1
    # 1023.6 KiB are to become 1 MiB, and not 1024 KiB.
    while count / 1024**power >= 1023.5 and power < len(_UNITS) - 1:
        power += 1
    count /= 1024**power
    digits = 1 if count < 99.95 and round(count, 1) % 1 else 0
    return f"{count:.{digits}f} {_UNITS[power]}"


def duration(seconds: float) -> str:
    """How long something took: ``3 ms``, ``1.2 s``, ``2m 05s``, ``3h 20m``."""
    sign, seconds = ("-" if seconds < 0 else ""), abs(seconds)
    if seconds < 0.9995:
        return f"{sign}{seconds * 1000:.0f} ms" if seconds else "0 s"
    if seconds < 59.95:
        return f"{sign}{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{sign}{minutes}m {rest:02}s"
    return f"{sign}{minutes // 60}h {minutes % 60:02}m"


def ago(moment: float) -> str:
    """How long ago something was, in one unit: ``12s``, ``5m``, ``7h``, ``12d``."""
    seconds = max(0.0, time.time() - moment)
    for limit, length, unit in ((60, 1, "s"), (3600, 60, "m"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds // length:.0f}{unit}"
    return f"{seconds // 86400:.0f}d"


def moment(when: float) -> str:
    """A moment in local time, and how long ago that is."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(when))} ({ago(when)} ago)"


def counted(count: int, what: str) -> str:
    """``1 entry``, ``2 entries``."""
    if count == 1:
        return f"1 {what}"
    return f"{count} {what.removesuffix('y')}ies" if what.endswith("y") else f"{count} {what}s"
