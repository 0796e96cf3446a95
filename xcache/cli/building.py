"""Show how building goes on and what became of it, for ``xcache rewarm`` and ``xcache prebuild``."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import click

from xcache.cli.output import counted, duration, emit, print_line, print_wrapped, shortened
from xcache.cli.selection import SHORT_KEY
from xcache.warming.building import Outcome

_MOST_SHOWN = 5
_LONGEST_REASON = 300

workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Compile as many at once; each takes as much memory as the program would. [default: the processors]",
)
dask_option = click.option("--dask", metavar="ADDRESS", help="Compile on this Dask cluster (tcp://host:8786).")


class Named(NamedTuple):
    """An entry by its key and its module's name."""

    key: str
    module_name: str


class Tally:
    """Counts of what became of the entries."""

    def __init__(self, counts: tuple[str, ...], **facts: Any) -> None:
        """``counts`` are the attributes that the JSON document has, after these ``facts``."""
        self._counts = counts
        self._facts = facts
        self._began = time.monotonic()
        self._compile_seconds = 0.0
        self.current = self.there = self.built = self.here = 0
        self.failed: dict[str, list[Named]] = {}
        self._left_out: dict[str, list[Named]] = {}

    def add(self, outcome: Outcome) -> None:
        """Count an outcome."""
        task = outcome.task
        self.add_named(outcome.kind, task.key, task.module_name, outcome.reason, outcome.compile_seconds)

    def add_named(self, kind: str, key: str, module_name: str, reason: str, compile_seconds: float) -> None:
        """Count an entry by what became of it: built, there, compiled here, refused or failed."""
        if kind in ("built", "there", "here"):
            setattr(self, kind, getattr(self, kind) + 1)
            self._compile_seconds += compile_seconds
        else:
            group = self.failed if kind == "failed" else self._left_out
            group.setdefault(shortened(reason, _LONGEST_REASON), []).append(Named(key, module_name))

    def leave_out(self, entries: Iterable[Any]) -> None:
        """Count entries of which nothing is built; each has a key, a module_name and a reason."""
        for each in entries:
            reason = shortened(each.reason, _LONGEST_REASON)
            self._left_out.setdefault(reason, []).append(Named(each.key, each.module_name))

    def document(self) -> dict[str, Any]:
        """Return all of it as a JSON document."""
        numbers = {name: getattr(self, name) for name in self._counts} | {"compile_seconds": self._compile_seconds}
        return self._facts | numbers | {"failed": _listed(self.failed), "left_out": _listed(self._left_out)}

    @contextlib.contextmanager
    def shown(self, as_json: bool) -> Iterator[None]:
        """Show it at the end, also of a command that was interrupted; one that cannot work says only why."""
        try:
            yield
        except KeyboardInterrupt:
            self.show(as_json)
            raise
        self.show(as_json)

    def show(self, as_json: bool) -> None:
        """Print it."""
        if as_json:
            emit(self.document())
            return
        took = duration(time.monotonic() - self._began)
        compiled = f" in {took} (compiling took {duration(self._compile_seconds)})" if self.built else ""
        print_wrapped(f"built {counted(self.built, 'entry')}{compiled}; {self.there} were there already")
        if self.current:
            print_wrapped(f"{counted(self.current, 'entry')} of the chosen were made by this toolchain")
        if self.here:
            print_wrapped(f"{counted(self.here, 'program')} could only be compiled in the process of the function")
        self._show_group(self.failed, "failed:")
        self._show_group(self._left_out, "will not hit:")

    @staticmethod
    def _show_group(group: dict[str, list[Named]], title: str) -> None:
        if not group:
            return
        print_line(f"{sum(map(len, group.values()))} {title}", bold=True)
        for reason, entries in sorted(group.items(), key=lambda each: -len(each[1])):
            print_wrapped(f"{counted(len(entries), 'entry')}: {reason}", "  ", "    ")
            for each in entries[:_MOST_SHOWN]:
                print_line(f"    {each.key[:SHORT_KEY]}  {each.module_name}")
            if len(entries) > _MOST_SHOWN:
                print_line(f"    ... and {len(entries) - _MOST_SHOWN} more")


def _listed(group: dict[str, list[Named]]) -> list[dict[str, Any]]:
    return [{"reason": reason, "entries": [each._asdict() for each in found]} for reason, found in group.items()]


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], object]]:
    """Show a bar on stderr if that is a terminal; yield what to call after each of ``total`` steps."""
    if not total or sys.stderr is None or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
