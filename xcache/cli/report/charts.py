"""The geometry of the charts: places along the width in percent, heights in pixels, so that text never scales."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from xcache.cli.output import duration
from xcache.cli.report.churn import Churn

_HEIGHT = 150.0
_STRIP_HEIGHT = 84.0
_DAY = 86400.0
_MOST_LABELS, _LAST_LABEL = 6, 89


class Part(NamedTuple):
    """A part of a bar, as a share of the whole in percent."""

    name: str
    text: str
    x: float
    width: float


def stacked(parts: Sequence[tuple[str, float]], text: Any = duration) -> list[Part]:
    """Return the parts of one bar, side by side."""
    whole = sum(amount for _, amount in parts) or 1.0
    found, x = [], 0.0
    for name, amount in parts:
        width = 100.0 * amount / whole
        found.append(Part(name, text(amount), x, width))
        x += width
    return found


def step_for(most: float, count: int) -> float:
    """Return a round step that divides ``most`` in at most ``count`` parts."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most / count))
    return next((power * factor for factor in (1, 2, 5) if most / (power * factor) <= count), power * 10)


def over_time(bars: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the bars of what was saved (upwards) and lost (downwards), the hit rates, and both axes."""
    up = max((bar["saved"] for bar in bars), default=0.0)
    down = max((bar["new"] + bar["again"] for bar in bars), default=0.0)
    # Loading may have taken longer than compiling had.
    down = max(down, *(-bar["saved"] for bar in bars), 0.0)
    up = max(up, 0.0)
    per_second = _HEIGHT / ((up + down) or 1.0)
    zero = up * per_second
    width = 100.0 / (len(bars) or 1)
    drawn, points = [], []
    for number, bar in enumerate(bars):
        x = number * width
        title = f"{_moment(bar['begin'], bar['end'])}: saved {duration(bar['saved'])}"
        title += f", compiled {duration(bar['new'] + bar['again'])}, {bar['hits']} hits, {bar['misses']} misses"
        asked = bar["hits"] + bar["misses"]
        saved, new, again = (bar[name] * per_second for name in ("saved", "new", "again"))
        rects = [("saved", zero - max(saved, 0.0), abs(saved)), ("new", zero, new), ("again", zero + new, again)]
        drawn.append(
            {
                "x": x + width * 0.1,
                "width": width * 0.8,
                "slot": x,
                "slot_width": width,
                "title": title,
                "rects": [rect for rect in rects if rect[2] > 0],
                "is_empty": not asked and not new + again,
            }
        )
        if asked:
            rate = bar["hits"] / asked
            points.append({"x": x + width / 2, "y": _HEIGHT * 0.5 * (1 - rate), "rate": f"{rate:.0%}", "title": title})
    step = step_for(up + down, 4)
    lines = [number * step for number in range(-math.floor(down / step), math.floor(up / step) + 1)]
    every = math.ceil(len(bars) / _MOST_LABELS) or 1
    return {
        "height": _HEIGHT,
        "zero": zero,
        "bars": drawn,
        "lines": [(zero - amount * per_second, duration(abs(amount))) for amount in lines],
        # A label at the end would stick out.
        "labels": [
            (number * width, _label(bars[number]["begin"], bars))
            for number in range(0, len(bars), every)
            if number * width < _LAST_LABEL
        ],
        "points": points,
        "rate_height": _HEIGHT * 0.5,
        "segments": [(a["x"], a["y"], b["x"], b["y"]) for a, b in itertools.pairwise(points)],
    }


def strip(churn: Churn, names: Mapping[int, str]) -> dict[str, Any] | None:
    """Return a function's sizes as dots, the higher the dearer; None without sizes."""
    if not churn.axes:
        return None
    axis = churn.axes[0]
    sizes = sorted(set(axis.sizes.values()))
    seconds = dict.fromkeys(sizes, 0.0)
    for shapes, cost in churn.cost.items():
        seconds[axis.sizes[shapes]] += cost
    is_wide = sizes[-1] > 16 * max(1, sizes[0])
    place = (lambda size: math.log2(max(1, size))) if is_wide else float
    low, high = place(sizes[0]), place(sizes[-1])

    def x(size: int) -> float:
        return 2 + 95 * (place(size) - low) / ((high - low) or 1.0)

    most = max(seconds.values()) or 1.0
    floor = _STRIP_HEIGHT - 18
    return {
        "height": _STRIP_HEIGHT,
        "floor": floor,
        "axis": axis.where(names),
        "is_wide": is_wide,
        "dots": [
            {"x": x(size), "y": floor - (floor - 8) * cost / most, "title": f"size {size}: {duration(cost)}"}
            for size, cost in seconds.items()
        ],
        "ends": [sizes[0], sizes[-1]],
        "most": duration(most),
    }


def _label(moment: float, bars: Sequence[Mapping[str, Any]]) -> str:
    length, whole = bars[0]["end"] - bars[0]["begin"], bars[-1]["end"] - bars[0]["begin"]
    shown = "%d %b" if length >= _DAY else "%H:%M" if whole <= _DAY else "%d %b %H:%M"
    return time.strftime(shown, time.localtime(moment))


def _moment(begin: float, end: float) -> str:
    shown = "%d %b" if end - begin >= _DAY else "%d %b %H:%M"
    return time.strftime(shown, time.localtime(begin))
