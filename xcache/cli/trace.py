"""``xcache trace``: a run's ledger as a file for Perfetto or chrome://tracing."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import click

from xcache import start_up
from xcache.cli.completion import complete_run
from xcache.cli.ledger_file import open_ledger
from xcache.cli.output import json_option, note
from xcache.config import config
from xcache.start_up import Run
from xcache.wire.ledger import Row

_MICROSECONDS = 1e6


@click.command()
@click.argument("wanted", metavar="[RUN]", default="last", shell_complete=complete_run)
@click.option("-o", "--output", metavar="FILE", default="trace.json.gz", show_default=True, help="- for stdout.")
@json_option
def trace(wanted: str, output: str, as_json: bool) -> None:
    """Write where the time of a run went, as a trace that opens in Perfetto.

    RUN is as in `xcache run`. A name that ends in .gz is compressed.

    \b
    JSON: {"file": str, "events": int}
    """
    settings = config.load()
    with open_ledger(settings) as (reader, _):
        found = reader.run(wanted)
        run, events = found.run, _events(found.run, reader.rows(found))
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")).encode()
    if output == "-":
        sys.stdout.buffer.write(text)
        return
    Path(output).write_bytes(gzip.compress(text) if output.endswith(".gz") else text)
    if as_json:
        click.echo(json.dumps({"file": output, "events": len(events)}, indent=2))
    else:
        note(f"{len(events)} events of run {run.run[:8]} written to {output}; open it at ui.perfetto.dev")


def _events(run: Run, rows: list[Row]) -> list[dict[str, Any]]:
    """Return the events of a run: the imports, each stage of each program, and the names of the threads."""
    threads: dict[str, int] = {}
    events: list[dict[str, Any]] = []

    def add(name: str, start: float, seconds: float, thread: str, **arguments: Any) -> None:
        number = threads.setdefault(thread, len(threads) + 1)
        events.append(
            {
                "name": name,
                "cat": "xcache",
                "ph": "X",
                "ts": round(start * _MICROSECONDS),
                "dur": max(1, round(seconds * _MICROSECONDS)),
                "pid": run.pid,
                "tid": number,
                "args": arguments,
            }
        )

    add("start and imports", 0.0, run.seconds_to_hook, "MainThread")
    for row in rows:
        facts = {"function": row.module_name, "arguments": row.shapes, "called at": row.site, "key": row.key}
        for span in start_up.spans_of(row):
            shown = facts | {"came from": row.outcome, "cause": row.cause}
            add(f"{span.stage} {row.module_name}", span.start, span.seconds, span.thread, **shown)
    named = [{"name": "process_name", "ph": "M", "pid": run.pid, "args": {"name": run.command}}]
    named += [
        {"name": "thread_name", "ph": "M", "pid": run.pid, "tid": number, "args": {"name": thread}}
        for thread, number in threads.items()
    ]
    return named + events
