"""The plots of the report, as SVG; the same samples give the same files."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import figures
import matplotlib
from figures import BUILT_IN, JIT, LIMITED, NONE, XCACHE, Found

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # after the choice of what draws

BEYOND = "xcache beyond serialize()"
COLORS = {
    BEYOND: "#7fb5c8",
    BUILT_IN: "#9aa5b1",
    LIMITED: "#c9b8a0",
    XCACHE: "#1f6f8b",
    JIT: "#123f50",
    NONE: "#d7dbe0",
    "redis": "#b5473c",
}
PHASES = {
    "interpreter and imports": "#d7dbe0",
    "backend": "#b8c0cc",
    "compile path": "#d9822b",
    "trace, lower, run": "#7fa7b8",
    "exit": "#4b5a67",
}
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e9ed",
    "legend.frameon": False,
    "svg.hashsalt": "xcache",
    "svg.fonttype": "path",
}


def draw(found: Found, folder: Path) -> list[str]:
    """Draw each plot that has samples, and return the names of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    plots = {"warm": _warm, "phases": _phases, "cold": _cold, "crowd": _crowd}
    plots |= {"sizes": _sizes, "clients": _clients, "entries": _entries}
    drawn = []
    with plt.rc_context(STYLE):
        for name, plot in plots.items():
            figure = plot(found)
            if figure is not None:
                figure.savefig(folder / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
                plt.close(figure)
                drawn.append(name)
    return drawn


def _bars(axes: Any, groups: list[str], values: dict[str, list[figures.Ratio | None]]) -> None:
    """Draw horizontal bars in groups, with whiskers from the first to the third quartile."""
    height = 0.8 / len(values)
    for place, (label, ratios) in enumerate(values.items()):
        known = [(row, r) for row, r in enumerate(ratios) if r is not None]
        rows = [row + (place - (len(values) - 1) / 2) * height for row, _ in known]
        lengths = [r.value for _, r in known]
        low = [max(0.0, r.value - r.low) for _, r in known]
        high = [max(0.0, r.high - r.value) for _, r in known]
        color = COLORS[label]
        whiskers = {"ecolor": "#333333", "elinewidth": 1, "capsize": 2}
        axes.barh(rows, lengths, height * 0.92, label=label, color=color, xerr=[low, high], error_kw=whiskers)
        for row, length, more in zip(rows, lengths, high, strict=True):
            axes.annotate(
                f"{length:.2f}", (length + more, row), (3, 0), textcoords="offset points", va="center", size=8
            )
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=3, borderaxespad=0)


def _axes(rows: int, title: str, *, each: float = 0.55) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(7.2, 1.0 + each * rows))
    axes.set_title(title)
    return figure, axes


def _warm(found: Found) -> Any:
    names = [n for n in figures.measured(found) if figures.series(found, n, "warm", XCACHE, "wall")]
    if not names:
        return None
    figure, axes = _axes(len(names), "Warm start, whole process; JAX's built-in cache = 1")
    peers = [p for p in (LIMITED, XCACHE, JIT) if any(figures.series(found, n, "warm", p, "wall") for n in names)]
    _bars(axes, names, {p: [figures.against(found, n, "warm", p, BUILT_IN, "wall") for n in names] for p in peers})
    axes.axvline(1, color="#333333", linewidth=1)
    for row, name in enumerate(names):
        if name in figures.WARM_BARS:
            axes.plot(
                [figures.WARM_BARS[name]] * 2,
                [row - 0.45, row + 0.45],
                color="#b5473c",
                linewidth=1.2,
                linestyle=(0, (3, 2)),
            )
    note = {"transform": axes.transAxes, "ha": "right", "va": "top", "size": 8, "color": "#b5473c"}
    axes.text(1.0, -0.12, "dashed: what it is to stay below", **note)
    return figure


def _phases(found: Found) -> Any:
    names = [n for n in figures.measured(found) if figures.series(found, n, "warm", XCACHE, "wall")]
    if not names:
        return None
    figure, axes = _axes(len(names), "Where a warm start's time goes; built-in's whole process = 1", each=0.75)
    labels = []
    for row, name in enumerate(names):
        whole = statistics.median(figures.series(found, name, "warm", BUILT_IN, "wall"))
        for place, peer in ((row - 0.2, BUILT_IN), (row + 0.2, XCACHE)):
            labels.append((place, f"{name}   {peer}" if peer == BUILT_IN else peer))
            left = 0.0
            for phase, seconds in parts_of(found["parts"][name]["warm"][peer]).items():
                axes.barh(place, seconds / whole, 0.34, left=left, color=PHASES[phase], label=phase)
                left += seconds / whole
    axes.set_yticks(*zip(*labels, strict=True))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    handles, texts = axes.get_legend_handles_labels()
    unique = dict(zip(texts, handles, strict=True))
    axes.legend(unique.values(), unique, loc="upper left", bbox_to_anchor=(-0.1, -0.08), ncols=5, columnspacing=1)
    return figure


def parts_of(samples: list[dict[str, Any]]) -> dict[str, float]:
    """Return the medians of the parts of a run, which together are about its median."""
    parts = {
        "interpreter and imports": lambda s: s["interpreter"] + s["import"],
        "backend": lambda s: s["backend"],
        "compile path": lambda s: s["compile path"],
        "trace, lower, run": lambda s: s["program"] - s["compile path"],
        "exit": lambda s: s["exit"],
    }
    return {name: statistics.median(map(part, samples)) for name, part in parts.items()}


def _cold(found: Found) -> Any:
    names = [n for n in figures.measured(found) if figures.series(found, n, "cold", XCACHE, "wall")]
    if not names:
        return None
    figure, axes = _axes(len(names), "Cold start, whole process; no cache = 1", each=0.7)
    beyond = [figures.against(found, n, "cold", XCACHE, NONE, figures.without_serialize, "wall") for n in names]
    values = {p: [figures.against(found, n, "cold", p, NONE, "wall") for n in names] for p in (BUILT_IN, XCACHE)}
    _bars(axes, names, values | {BEYOND: beyond})
    axes.axvline(1, color="#333333", linewidth=1)
    return figure


def _crowd(found: Found) -> Any:
    crowds = found["parts"].get("crowd")
    if not crowds:
        return None
    groups, values = [], {BUILT_IN: [], XCACHE: []}
    for name, kinds in crowds.items():
        for kind in ("cold", "warm"):
            groups.append(f"{name}, {kind}")
            for peer, ratios in values.items():
                ratios.append(figures.ratio(*([s["cpu"] for s in kinds[k][peer]] for k in (kind, "alone"))))
    figure, axes = _axes(len(groups), "Processes that start at once: processor time of all; one alone, cold = 1")
    _bars(axes, groups, values)
    axes.axvline(1, color="#333333", linewidth=1)
    return figure


def _lines(title: str, across: str, up: str, lines: dict[str, tuple[dict[int, figures.Ratio], str, str]]) -> Any:
    """Draw ratios over something that grows, on logarithmic axes, each with a band from quartile to quartile."""
    if not any(points for points, _, _ in lines.values()):
        return None
    figure, axes = plt.subplots(figsize=(7.2, 3.2))
    ticks = set()
    for label, (points, color, style) in lines.items():
        if points:
            x = sorted(points)
            ticks |= set(x)
            axes.plot(x, [points[n].value for n in x], style, color=color, label=label, markersize=4)
            axes.fill_between(x, [points[n].low for n in x], [points[n].high for n in x], color=color, alpha=0.15, lw=0)
    axes.set(xscale="log", yscale="log", xlabel=across, ylabel=up, title=title)
    axes.axhline(1, color="#333333", linewidth=1)
    axes.set_xticks(sorted(ticks), [short(tick) for tick in sorted(ticks)])
    axes.minorticks_off()
    for axis in (axes.yaxis,):
        axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def short(number: int) -> str:
    """Return a size or a number as people write it."""
    for unit, name in ((1024**2, " MiB"), (1024, " KiB")):
        if number % unit == 0:
            return f"{number // unit}{name}"
    return f"{number:,}"


def _sizes(found: Found) -> Any:
    lines = {
        "xcache": (figures.hits_by_size(found, "xcache"), COLORS[XCACHE], "o-"),
        "redis": (figures.hits_by_size(found, "redis"), COLORS["redis"], "s-"),
    }
    return _lines("A hit without deserialization; open, read and decompress a file = 1", "size", "times a file", lines)


def _clients(found: Found) -> Any:
    lines = {
        kind: (figures.rates(found, kind), color, "o-")
        for kind, color in (("hit", COLORS[XCACHE]), ("miss", "#d9822b"), ("put", "#4b5a67"))
    }
    return _lines("Answers a second, 4 KiB; redis-server on the same socket type = 1", "clients", "times redis", lines)


def _entries(found: Found) -> Any:
    lines = {
        "xcache: miss": (figures.by_entries(found, "miss"), COLORS[XCACHE], "o-"),
        "xcache: put that evicts": (figures.by_entries(found, "put that evicts"), "#d9822b", "s-"),
        "JAX's bounded cache:\nput that evicts": (
            *(figures.by_entries(found, "put that evicts", "limited"), "#9aa5b1"),
            "s--",
        ),
    }
    return _lines("A fuller store; the same with 1,000 entries = 1", "entries", "times 1,000 entries", lines)
