"""Where each stage of a run stands on the time axis, in percent of its width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from xcache import start_up
from xcache.cli.report.ledger_facts import Got
from xcache.start_up import Span

# The part of the axis that a long pause gets.
_PAUSE_WIDTH = 3.0
# A pause is cut if it is longer than this share of all time in which something went on.
_LONG_PAUSE = 0.3
# Blocks that are narrower, in percent, are drawn together with their neighbours.
_NARROW = 0.1
# No bar is thinner, in percent.
_THINNEST = 0.15
_FEWEST_ROWS, _MOST_ROWS = 12, 40
_SEEN = 0.004
_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
_MOST_TICKS = 8


class Block(NamedTuple):
    """A stage on the axis: where it begins and how wide it is, in percent, and what a pointer on it reads."""

    stage: str
    x: float
    width: float
    title: str


class Pause(NamedTuple):
    """A stretch of the axis in which nothing went on, drawn shorter than it was."""

    x: float
    width: float
    seconds: float


class Scale:
    """Turns seconds since the process began into percent of the axis; long pauses are cut."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        """``spans`` are pairs of begin and end."""
        busy: list[list[float]] = []
        for begin, end in sorted(spans):
            if busy and begin <= busy[-1][1]:
                busy[-1][1] = max(busy[-1][1], end)
            else:
                busy.append([begin, end])
        # Short pauses are drawn as they were.
        most = _LONG_PAUSE * sum(end - begin for begin, end in busy)
        parts = busy[:1]
        for begin, end in busy[1:]:
            if begin - parts[-1][1] <= most:
                parts[-1][1] = end
            else:
                parts.append([begin, end])
        self.begin, self.end = (parts[0][0], parts[-1][1]) if parts else (0.0, 0.0)
        drawn = sum(end - begin for begin, end in parts) or 1.0
        # However many pauses there are, the work gets half of the axis.
        pause = min(_PAUSE_WIDTH, 50.0 / len(parts)) if len(parts) > 1 else 0.0
        self._per_second = (100.0 - pause * (len(parts) - 1)) / drawn if parts else 0.0
        self._parts: list[tuple[float, float, float]] = []
        self.pauses: list[Pause] = []
        x = 0.0
        for number, (begin, end) in enumerate(parts):
            if number:
                self.pauses.append(Pause(x, pause, begin - parts[number - 1][1]))
                x += pause
            self._parts.append((begin, end, x))
            x += (end - begin) * self._per_second

    def x(self, seconds: float) -> float:
        """Return the place of a moment."""
        for begin, end, x in reversed(self._parts):
            if seconds >= begin:
                return x + (min(seconds, end) - begin) * self._per_second
        return 0.0

    def ticks(self) -> list[tuple[float, float]]:
        """Return moments to label, and their places."""
        drawn = sum(end - begin for begin, end, _ in self._parts)
        step = next((step for step in _TICKS if drawn / step <= _MOST_TICKS), drawn / _MOST_TICKS or 1.0)
        found = []
        for begin, end, _ in self._parts:
            number = int(begin // step) + 1
            while number * step <= end:
                found.append((number * step, self.x(number * step)))
                number += 1
        return [tick for tick in found if tick[1] < 97]


def pause_seconds(programs: Sequence[Got]) -> float:
    """Return how long the pauses between a run's programs were that the axis leaves out."""
    spans = [(span.start, span.end) for got in programs for span in start_up.spans_of(got.row)]
    return sum(pause.seconds for pause in Scale(spans).pauses)


def drawn(programs: Sequence[Got]) -> dict[str, Any]:
    """Return the axis, a strip of blocks for each thread, and a row of blocks for each of the dearest programs."""
    spans = [(got, span) for got in programs for span in start_up.spans_of(got.row)]
    scale = Scale([(span.start, span.end) for _, span in spans])
    threads: dict[str, list[tuple[Got, Span]]] = {}
    for got, span in sorted(spans, key=lambda pair: (pair[1].is_beside, pair[1].start, -pair[1].seconds)):
        threads.setdefault(span.thread, []).append((got, span))
    dearest = sorted(programs, key=lambda got: -got.seconds)[:_MOST_ROWS]
    # A bar that is a dot says nothing, but some rows are always there.
    seen = _SEEN * (scale.end - scale.begin - sum(pause.seconds for pause in scale.pauses))
    dearest = [got for number, got in enumerate(dearest) if number < _FEWEST_ROWS or got.seconds >= seen]
    rows = [
        {"got": got, "blocks": _blocks(scale, [(got, span) for span in start_up.spans_of(got.row)])}
        for got in sorted(dearest, key=lambda got: got.row.position)
    ]
    return {
        "begin": scale.begin,
        "end": scale.end,
        "ticks": scale.ticks(),
        "pauses": scale.pauses,
        "threads": [{"name": name, "blocks": _blocks(scale, of_thread)} for name, of_thread in threads.items()],
        "rows": [row for row in rows if row["blocks"]],
        "left_out": len(programs) - len(dearest),
    }


def _blocks(scale: Scale, spans: Sequence[tuple[Got, Span]]) -> list[Block]:
    """Return blocks for these spans; an outer one comes before those within it."""
    blocks: list[Block] = []
    # The last narrow block, and how many spans it stands for.
    many, count = 0.0, 0
    for got, span in spans:
        x, end = scale.x(span.start), scale.x(span.end)
        width, last = end - x, blocks[-1] if blocks else None
        if last and width < _NARROW and last.stage == span.stage and count and x - (last.x + last.width) < _NARROW:
            many, count = many + span.seconds, count + 1
            title = f"{span.stage}: {count} programs, {many:.3f} s"
            blocks[-1] = last._replace(width=max(last.width, end - last.x), title=title)
            continue
        many, count = (span.seconds, 1) if width < _NARROW else (0.0, 0)
        title = f"{span.stage} {got.row.module_name}: {span.seconds:.3f} s, from {span.start:.3f} s on"
        # The last one may not stick out.
        blocks.append(Block(span.stage, min(x, 100.0 - _THINNEST), max(width, _THINNEST), title))
    return blocks
