"""The one way to the terminal: JSON, tables, and numbers for people.

Much of what the commands print is what other users chose: names of functions, reasons, messages. Nothing of it can
steer the terminal, because every text passes ``printable``; ruff lets no other module print.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from xcache.wire.texts import printable as printable

if TYPE_CHECKING:
    from rich.text import Text

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON of the shape shown above.")

# The width of a table in a pipe, whose reader wants whole lines.
_PIPE_WIDTH = 10_000
# Text is not wrapped to less than this.
_LEAST_WIDTH = 30
# The space between two columns.
_GAP_WIDTH = 2
# A column may be cut down to this width.
_MIN_CUT_WIDTH = 10
# Facts with long names go on not so far to the right.
_MOST_HANGING = 13
# Characters of a progress bar, and of all beside it but the label.
_LEAST_BAR, _MOST_BAR, _BESIDE_BAR = 5, 36, 22
_COLORS = {"ok": "green", "note": "yellow", "wrong": "red"}
_ADVICE_INDENT = " " * 6
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Column(NamedTuple):
    """A column of a table: its title, its cell in a row, and whether it may be cut on a narrow terminal."""

    title: str
    cell: Callable[[Any], str]
    justify: Literal["left", "right"] = "left"
    cut: bool = False


def write_file(path: Path, content: bytes) -> None:
    """Write a file that the user asked for; a failure names it, and leaves what was there."""
    # A link stays one, and a device, such as /dev/stdout, is written to.
    target = path.resolve()
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
            return
        try:
            part.write_bytes(content)
            if target.exists():
                shutil.copymode(target, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def emit(document: dict[str, Any]) -> None:
    """Print one JSON document."""
    print_text(json.dumps(document, indent=2))


def note(message: str) -> None:
    """Print a remark on stderr."""
    print_line(f"xcache: {message}", err=True)


@contextlib.contextmanager
def progress(length: int, label: str) -> Iterator[Callable[[int], object]]:
    """Yield a function that is told of each step; on a terminal a bar on stderr shows them."""
    if not length or sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    # The times behind the bar take as much again.
    room = max(_LEAST_BAR, min(_MOST_BAR, _width() - len(label) - _BESIDE_BAR))
    with click.progressbar(length=length, label=printable(label), file=sys.stderr, width=room) as bar:
        yield bar.update


def print_table(columns: Sequence[Column], rows: Sequence[Any]) -> None:
    """Print rows under titles, cut to the width of a terminal as far as the columns allow.

    On a terminal that is still too narrow, each row takes a line per column.
    """
    # rich takes as long to import as everything else together, and JSON does not need it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Text keeps rich from reading brackets in a name as markup.
    cells = [
        [Text(printable(column.cell(row)), no_wrap=True, overflow="ellipsis") for row in rows] for column in columns
    ]
    table = Table(box=None, pad_edge=False, padding=(0, _GAP_WIDTH, 0, 0), header_style="bold")
    needed = -_GAP_WIDTH
    for column, texts in zip(columns, cells, strict=True):
        widest = max([len(column.title), *(text.cell_len for text in texts)])
        least = min(widest, _MIN_CUT_WIDTH) if column.cut else widest
        needed += least + _GAP_WIDTH
        table.add_column(column.title, justify=column.justify, min_width=least, no_wrap=not column.cut)
    for row in zip(*cells, strict=True):
        table.add_row(*row)
    if needed > _width():
        for number, row in enumerate(rows):
            if number:
                print_line()
            print_facts((column.title, cell) for column in columns if (cell := column.cell(row)))
        return
    console = Console(width=_width(), highlight=False)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        _echo(line.rstrip())


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print a name and a value per line; on a terminal, long values go on below."""
    facts = list(facts)
    width = max(len(name) for name, _ in facts) + _GAP_WIDTH
    for name, value in facts:
        _print_hanging(name.ljust(width), value, " " * min(width, _MOST_HANGING), bold=True)


def print_finding(state: str, about: str, found: str, advice: str) -> None:
    """Print a line about what was checked, and what to do about it."""
    _print_hanging(f"{state:6}", f"{about}: {found}", _ADVICE_INDENT, fg=_COLORS[state])
    print_wrapped(advice, _ADVICE_INDENT)


def _print_hanging(label: str, text: str, indent: str, **style: Any) -> None:
    """Print a label in a style, and a text beside it that is wrapped on a terminal; words are never broken."""
    label, text = printable(label), printable(text)
    # One word that is too long, such as a path, stays beside its label.
    lines = textwrap.wrap(
        label + text, max(_width(), _LEAST_WIDTH), subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    ) if " " in text else [label + text]  # fmt: skip
    print_line(lines[0][len(label) :], label=label, **style)
    for line in lines[1:]:
        print_line(line)


def print_wrapped(text: str, indent: str = "", following: str | None = None, *, bold: bool = False) -> None:
    """Print a text, if there is one, in lines of a terminal's width; ``following`` is the indent of the later ones."""
    lines = textwrap.wrap(
        printable(text), max(_width(), _LEAST_WIDTH), initial_indent=indent,
        subsequent_indent=indent if following is None else following, break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    for line in lines:
        print_line(line, bold=bold)


def _width() -> int:
    return shutil.get_terminal_size().columns if is_terminal() else _PIPE_WIDTH


def is_terminal() -> bool:
    """Return whether stdout is a terminal; there is none if it was closed."""
    return sys.stdout is not None and sys.stdout.isatty()


def print_line(line: str = "", *, label: str = "", err: bool = False, **style: Any) -> None:
    """Print a line, after a label if there is one. The style is the label's, or else the line's."""
    line, label = printable(line), printable(label)
    _echo(_styled(label, style) + line if label else _styled(line, style), err=err)


def print_text(text: str, *, err: bool = False, **style: Any) -> None:
    """Print a text of several lines."""
    text = printable(text, kept="\n\t")
    _echo(_styled(text, style), err=err)


def print_bytes(content: bytes) -> None:
    """Write to stdout what is no text for a terminal; raise UsageError if that is one."""
    refuse_terminal()
    sys.stdout.buffer.write(content)


def drawable(line: Text) -> Text:
    """Return a line of rich's with the same colours, which cannot steer the terminal."""
    line.plain = printable(line.plain)
    return line


def confirm(question: str) -> None:
    """Ask on stderr; raise Abort unless the answer is yes."""
    click.confirm(printable(question), abort=True, err=True)


def refuse_terminal() -> None:
    """Raise UsageError if stdout is a terminal."""
    if is_terminal():
        raise click.UsageError("this is not for a terminal; send it to a file or a pipe")


def _styled(text: str, style: dict[str, Any]) -> str:
    # click ends even a text without a style with an escape.
    return click.style(text, **style) if any(style.values()) else text


def _echo(line: str, *, err: bool = False) -> None:
    """Print what cannot steer the terminal, replacing characters that the encoding lacks."""
    encoding = getattr(sys.stderr if err else sys.stdout, "encoding", None) or "utf-8"
    click.echo(line.encode(encoding, "replace").decode(encoding), err=err)


def shortened(text: str, most: int) -> str:
    """Return a text, cut if it is longer than ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def middle_cut(text: str, most: int = 70) -> str:
    """Return a text whose end says as much as its beginning, cut in the middle if it is longer than ``most``."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}\N{HORIZONTAL ELLIPSIS}{text[half - most + 1 :]}"


def short_site(site: str) -> str:
    """Return a place in a program without the folders that lead to it from here."""
    return site.removeprefix(f"{Path.cwd()}/")


def size(count: float) -> str:
    """Return a number of bytes as ``999 B``, ``1.2 KiB`` or ``325 KiB``."""
    if count < 1024:
        return f"{count:.0f} B"
    power = 1
    # 1023.6 KiB becomes 1 MiB, not 1024 KiB.
    while count / 1024**power >= 1023.5 and power < len(_UNITS) - 1:
        power += 1
    count /= 1024**power
    digits = 1 if count < 99.95 and round(count, 1) % 1 else 0
    return f"{count:.{digits}f} {_UNITS[power]}"


def duration(seconds: float) -> str:
    """Return a duration as ``3 ms``, ``1.2 s``, ``2m 05s`` or ``3h 20m``."""
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
    """Return the time since a moment in one unit: ``12s``, ``5m``, ``7h``, ``12d``."""
    seconds = max(0.0, time.time() - moment)
    for limit, length, unit in ((60, 1, "s"), (3600, 60, "m"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds // length:.0f}{unit}"
    return f"{seconds // 86400:.0f}d"


def moment(when: float) -> str:
    """Return a moment in local time, and the time since."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(when))} ({ago(when)} ago)"


def counted(count: int, what: str) -> str:
    """Return a number with its noun: ``1 entry``, ``2 entries``."""
    if count == 1:
        return f"1 {what}"
    is_irregular = what.endswith("y") and not what.endswith(("ay", "ey", "oy"))
    return f"{count} {what.removesuffix('y')}ies" if is_irregular else f"{count} {what}s"
