"""``xcache trace``: a run's ledger as a file for Perfetto or chrome://tracing."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from xcache import start_up
from xcache.cli.completion import complete_run
from xcache.cli.ledger_file import open_ledger
from xcache.cli.output import emit, json_option, note, print_bytes, write_file
from xcache.config import config
from xcache.start_up import Run
from xcache.wire import ledger
from xcache.wire.ledger import Row

_MICROSECONDS = 1e6
# Where the daemon's part is shown. No process of Linux has this number.
_DAEMON = 2**22 + 1


@click.command()
@click.argument("wanted", metavar="[RUN]", default="last", shell_complete=complete_run)
@click.option("-o", "--output", metavar="FILE", default="trace.json.gz", show_default=True, help="- for stdout.")
@json_option
def trace(wanted: str, output: str, as_json: bool) -> None:
    """Write where the time of a run went, as a trace that opens in Perfetto.

    RUN is as in `xcache run`. A name that ends in .gz is compressed. Each thread has a line, xcache's own too: those
    that load ahead (what was not asked for as well) and that store, and the daemon's part of each look-up.

    \b
    JSON: {"file": str, "events": int}
    """
    settings = config.load()
    with open_ledger(settings) as (reader, _):
        found = reader.run(wanted)
        run, events = found.run, _events(found.run, reader.rows(found))
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")).encode()
    if output == "-":
        print_bytes(text)
        return
    write_file(Path(output), gzip.compress(text) if output.endswith(".gz") else text)
    if as_json:
        emit({"file": output, "events": len(events)})
    else:
        note(f"{len(events)} events of run {run.run[:8]} written to {output}; open it at ui.perfetto.dev")


class _Slice(NamedTuple):
    """A stage of a program, as one bar of the trace."""

    stage: str
    start: float
    seconds: float
    of: str = ""
    arguments: Mapping[str, str] = {}

    @property
    def end(self) -> float:
        return self.start + self.seconds


def _events(run: Run, rows: list[Row]) -> list[dict[str, Any]]:
    """Return the events of a run: the imports, each stage of each program, and the names of the threads."""
    threads: defaultdict[str, list[_Slice]] = defaultdict(list)
    threads["MainThread"].append(_Slice("start and imports", 0.0, run.seconds_to_hook))
    for row in rows:
        facts = {"function": row.module_name, "arguments": row.shapes, "called at": row.site, "key": row.key}
        facts |= {"came from": row.outcome, "cause": row.cause}
        told = {name: fact for name, fact in facts.items() if fact}
        for span in start_up.spans_of(row):
            of = row.module_name or row.outcome
            threads[span.thread].append(_Slice(span.stage, span.start, span.seconds, of, told))
    named = [_naming("process_name", run.pid, 0, run.command)]
    named += [_naming("process_name", _DAEMON, 0, "xcached")] if ledger.DAEMON in threads else []
    events = []
    for thread, slices in threads.items():
        process = _DAEMON if thread == ledger.DAEMON else run.pid
        for count, lane in enumerate(_lanes(slices), 1):
            number = len(named)
            named.append(_naming("thread_name", process, number, thread if count == 1 else f"{thread} ({count})"))
            events += [_event(each, process, number) for each in lane.slices]
    return named + events


class _Lane:
    """Slices of one thread, each within another of them or beside it, as a viewer needs it."""

    def __init__(self) -> None:
        self.slices: list[_Slice] = []
        # Those that have not ended where the next one begins, the outermost first.
        self._around: list[_Slice] = []

    def takes(self, each: _Slice) -> bool:
        """Add the next slice, unless it must be another thread's."""
        while self._around and self._around[-1].end <= each.start:
            self._around.pop()
        if self._around and (each.end > self._around[-1].end or each.stage == self._around[-1].stage):
            return False
        self._around.append(each)
        self.slices.append(each)
        return True


def _lanes(slices: list[_Slice]) -> list[_Lane]:
    """Divide slices among lanes: threads of one name, such as those that load ahead, overlap."""
    lanes: list[_Lane] = []
    for each in sorted(slices, key=lambda each: (each.start, -each.seconds)):
        if not any(lane.takes(each) for lane in lanes):
            lanes.append(_Lane())
            lanes[-1].takes(each)
    return lanes


def _event(each: _Slice, process: int, thread: int) -> dict[str, Any]:
    # Both ends are rounded, so that what lies within another slice still does.
    start = round(each.start * _MICROSECONDS)
    took = round(each.end * _MICROSECONDS) - start
    name = f"{each.stage} {each.of}".rstrip()
    shown = {"name": name, "cat": "xcache", "ph": "X", "ts": start, "dur": took}
    return shown | {"pid": process, "tid": thread, "args": each.arguments}


def _naming(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
