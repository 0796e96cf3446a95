"""Where the time of a start-up went: sums over the rows of a run's ledger."""

from __future__ import annotations

import contextlib
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from xcache.wire import ledger
from xcache.wire.bounded import parsed_json
from xcache.wire.protocol import MAX_FRAME


class Run(NamedTuple):
    """A process that used the cache: the number it gave itself, and facts by name."""

    run: str
    uid: int
    pid: int
    program: str
    facts: dict[str, str]
    began_at: float
    reported_at: float
    ended_at: float | None

    @property
    def arguments(self) -> list[str]:
        """The arguments of the program."""
        with contextlib.suppress(ValueError, TypeError):
            return [str(each) for each in parsed_json(self.facts.get("arguments", "[]"), MAX_FRAME)]
        return []

    @property
    def command(self) -> str:
        """The program with its arguments, as one would type them."""
        return shlex.join([self.program, *self.arguments])

    @property
    def settings(self) -> dict[str, str]:
        """The settings of jax that change programs, by name."""
        with contextlib.suppress(ValueError, TypeError):
            facts = dict(parsed_json(self.facts.get("settings", "{}"), MAX_FRAME))
            return {str(name): str(value) for name, value in facts.items()}
        return {}

    @property
    def seconds_to_hook(self) -> float:
        """Seconds from the start of the process until jax was imported and xcache in place."""
        with contextlib.suppress(ValueError):
            return float(self.facts.get("hook", 0.0))
        return 0.0


class Span(NamedTuple):
    """A stage of one program: seconds since the process began, seconds it took, and the thread that did it."""

    stage: str
    start: float
    seconds: float
    thread: str

    @property
    def end(self) -> float:
        """When it ended."""
        return self.start + self.seconds

    @property
    def is_beside(self) -> bool:
        """Whether the program's own threads went on meanwhile."""
        return self.thread.startswith(ledger.OWN_THREADS)


def spans_of(row: ledger.Row) -> list[Span]:
    """Return the spans of a row; none if somebody has altered the text."""
    try:
        return [
            Span(str(stage), float(start), float(took), str(thread))
            for stage, start, took, thread in parsed_json(row.spans, MAX_FRAME)
        ]
    except (ValueError, TypeError):
        return []


def seconds_of(rows: Iterable[ledger.Row]) -> dict[str, float]:
    """Return the seconds that the program's threads spent in each stage.

    A program may be compiled while another one is traced; its time is not counted twice.
    """
    by_thread: defaultdict[str, list[Span]] = defaultdict(list)
    for row in rows:
        for span in spans_of(row):
            if not span.is_beside:
                by_thread[span.thread].append(span)
    sums = dict.fromkeys(ledger.STAGES, 0.0)
    for spans in by_thread.values():
        for stage, seconds in _own_seconds(sorted(spans, key=lambda span: (span.start, -span.seconds))):
            sums[stage] = sums.get(stage, 0.0) + seconds
    return {stage: seconds for stage, seconds in sums.items() if seconds > 0}


def _own_seconds(spans: Sequence[Span]) -> Iterable[tuple[str, float]]:
    """Yield the stage of each span of a thread, and its seconds without those of the spans within it."""
    open_spans: list[list[Any]] = []
    for span in spans:
        while open_spans and open_spans[-1][0].end <= span.start:
            outer, inside = open_spans.pop()
            yield outer.stage, max(0.0, outer.seconds - inside)
        if open_spans:
            open_spans[-1][1] += min(span.seconds, open_spans[-1][0].end - span.start)
        open_spans.append([span, 0.0])
    for outer, inside in open_spans:
        yield outer.stage, max(0.0, outer.seconds - inside)


def ready_after(rows: Iterable[ledger.Row]) -> float:
    """Return the seconds from the start of the process until its last program could run; 0 without a program."""
    return max((span.end for row in rows for span in spans_of(row) if not span.is_beside), default=0.0)


def outcomes_of(rows: Iterable[ledger.Row]) -> dict[str, int]:
    """Return how many programs had each outcome."""
    return dict(Counter(row.outcome for row in rows))


def asked_for(outcomes: Mapping[str, int]) -> int:
    """Return how many programs the process asked for; others were loaded ahead in vain."""
    return sum(count for outcome, count in outcomes.items() if outcome != ledger.UNUSED)


def unknown_in(rows: Sequence[ledger.Row]) -> int:
    """Return of how many programs of a run nothing is known, though later ones are."""
    return max((row.position + 1 for row in rows), default=0) - len(rows)


def of_row(row: ledger.Row) -> dict[str, Any]:
    """Return a row as data that JSON can hold, with the seconds that the program's threads spent on it."""
    spans = spans_of(row)
    seconds = round(sum(seconds_of([row]).values()), 6)
    return row._asdict() | {"spans": [span._asdict() for span in spans], "seconds": seconds}


def of_run(run: Run, state: str, rows: Sequence[ledger.Row]) -> dict[str, Any]:
    """Return a run, with sums over its ledger, as data that JSON can hold."""
    return run._asdict() | {
        "arguments": run.arguments,
        "command": run.command,
        "directory": run.facts.get("directory", ""),
        "host": run.facts.get("host", ""),
        "state": state,
        "seconds_to_hook": run.seconds_to_hook,
        "ready_seconds": round(ready_after(rows), 6),
        "stages": {stage: round(seconds, 6) for stage, seconds in seconds_of(rows).items()},
        "outcomes": outcomes_of(rows),
    }
