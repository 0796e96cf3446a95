"""The tables of the report, as data: cells with a text, and a number to sort by."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from xcache.cli import advice
from xcache.cli.output import duration, middle_cut, size
from xcache.cli.report.gathering import RunOf
from xcache.cli.report.ledger_facts import Got, saved_by
from xcache.start_up import Run
from xcache.wire import ledger

_LONGEST = 110
_SHORT_KEY, _SHORT_RUN = 12, 8
_MOST_ROWS = 300


class Cell(NamedTuple):
    """A cell: its text, what to sort by, a place in the report it leads to, and the width of a bar in percent."""

    text: str
    order: float | None = None
    link: str = ""
    bar: float | None = None
    kind: str = ""


class Table(NamedTuple):
    """A table: the titles of its columns, with the numbers on the right, and its rows with the anchor of each."""

    name: str
    caption: str
    columns: Sequence[tuple[str, bool]]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    left_out: int = 0


def short(text: str, most: int = _LONGEST) -> str:
    """Return a text that fits in a cell."""
    return text if len(text) <= most else f"{text[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def seconds(amount: float | None, most: float = 0.0) -> Cell:
    """Return a cell for a duration, with a bar if ``most`` says what a full one is."""
    if amount is None:
        return Cell("", -1.0)
    return Cell(duration(amount), amount, bar=100 * max(0.0, amount) / most if most else None)


def number(amount: int) -> Cell:
    """Return a cell for a number."""
    return Cell(f"{amount:,}".replace(",", "\N{NARROW NO-BREAK SPACE}"), amount)


def moment(when: float | None) -> Cell:
    """Return a cell for a time."""
    return Cell(time.strftime("%Y-%m-%d %H:%M", time.localtime(when)), when, kind="whole") if when else Cell("", 0.0)


def _size(amount: float | None) -> Cell:
    return Cell(size(amount or 0), amount or 0)


def programs(name: str, got: Sequence[Got], explained: Iterable[int], texts: Mapping[str, str]) -> Table:
    """Return the programs of a run, the dearest first."""
    explained = set(explained)
    dearest = sorted(got, key=lambda each: (-each.seconds, each.row.position))
    most = max((each.seconds for each in got), default=0.0)
    rows = []
    for each in dearest[:_MOST_ROWS]:
        row = each.row
        link = f"miss-{row.position}" if row.position in explained else f"text-{row.key}" if row.key in texts else ""
        cause = f"{row.outcome}: {row.cause}" if row.cause else row.outcome
        stage, longest = max(each.stages.items(), key=lambda item: item[1], default=("", 0.0))
        rows.append(
            (
                f"program-{row.position}",
                (
                    Cell(short(row.module_name), link=link, kind="wrap"),
                    Cell(middle_cut(row.shapes), kind="wrap"),
                    Cell(short(cause, 80), kind="found" if each.is_found else "compiled"),
                    seconds(each.seconds, most),
                    Cell(f"{stage} {duration(longest)}" if stage else "", longest),
                    Cell(short(row.site), kind="wrap"),
                ),
            )
        )
    columns = (
        *(("function", False), ("arguments", False), ("came from", False)),
        *(("seconds", True), ("most of it", True), ("called at", False)),
    )
    return Table(name, "The programs of this run", columns, rows, max(0, len(got) - _MOST_ROWS))


def runs(period: Sequence[RunOf], known: Mapping[str, float], shown: Mapping[int, Mapping[str, Any]]) -> Table:
    """Return the runs of the period, the latest first; ``shown`` are their sums by number."""
    rows = []
    latest = period[::-1]
    most = max((each["ready_seconds"] for each in shown.values()), default=0.0)
    for of in latest[:_MOST_ROWS]:
        run: Run = of.stored.run
        found = sum(each.is_found for each in of.programs)
        compiled = [each for each in of.programs if not each.is_found]
        rows.append(
            (
                "",
                (
                    Cell(run.run[:_SHORT_RUN], kind="code"),
                    Cell(short(shown[of.stored.id]["command"], 80), kind="wrap"),
                    moment(run.began_at),
                    seconds(shown[of.stored.id]["ready_seconds"], most),
                    number(found),
                    number(len(compiled)),
                    seconds(sum(each.compile_seconds for each in compiled)),
                    seconds(sum(saved_by(each, known) for each in of.programs)),
                    Cell(shown[of.stored.id]["state"]),
                ),
            )
        )
    columns = (
        *(("run", False), ("program", False), ("began", False), ("ready after", True), ("from the cache", True)),
        *(("compiled", True), ("compiling", True), ("saved", True), ("state", False)),
    )
    return Table("runs", "The runs", columns, rows, max(0, len(latest) - _MOST_ROWS))


def causes(found: Sequence[Mapping[str, Any]]) -> Table:
    """Return the causes of compiles with their meanings, and what to do about each."""
    most = max((each["seconds"] for each in found), default=0.0)
    rows = []
    for each in found:
        dearest = sorted(each["functions"], key=lambda name: -each["functions"][name])
        meant = f"{each['meaning'][:1].upper()}{each['meaning'][1:]}."
        rows.append(
            (
                "",
                (
                    Cell(each["cause"]),
                    number(each["count"]),
                    seconds(each["seconds"], most),
                    Cell(" ".join([meant, *advice.for_cause(each["cause"])]), kind="text"),
                    Cell(short(", ".join(dearest[:3]) + (" and others" if len(dearest) > 3 else "")), kind="wrap"),
                ),
            )
        )
    columns = (("cause", False), ("programs", True), ("compiling", True), ("it means", False), ("most of it", False))
    return Table("causes", "Why programs were compiled", columns, rows)


def compared(found: Sequence[Mapping[str, Any]]) -> Table:
    """Return the programs of two runs side by side, the largest difference first."""
    rows = []
    for each in sorted(found, key=lambda row: -abs(row["more_seconds"]))[:_MOST_ROWS]:
        more = each["more_seconds"]
        rows.append(
            (
                "",
                (
                    Cell(short(each["module_name"]), kind="wrap"),
                    Cell(middle_cut(each["shapes"]), kind="wrap"),
                    *(_of_side(each[side]) for side in "ab"),
                    Cell(f"{'+' if more >= 0 else ''}{duration(more)}", more, kind="worse" if more > 0.005 else ""),
                ),
            )
        )
    columns = (("function", False), ("arguments", False), ("A", True), ("B", True), ("B \N{MINUS SIGN} A", True))
    return Table("compared", "Programs of both runs", columns, rows, max(0, len(found) - _MOST_ROWS))


def _of_side(side: Mapping[str, Any]) -> Cell:
    if not side["count"]:
        return Cell("not asked for", -1.0)
    return Cell(duration(side["seconds"]) + (", compiled" if side["compiled"] else ", found"), side["seconds"])


def dearest(entries: Sequence[Mapping[str, Any]]) -> Table:
    """Return the entries that took longest to compile."""
    most = max((each["compile_seconds"] or 0.0 for each in entries), default=0.0)
    rows = [
        (
            "",
            (
                Cell(each["key"][:_SHORT_KEY], kind="code"),
                Cell(short(each["module_name"] or ""), kind="wrap"),
                seconds(each["compile_seconds"], most),
                number(each["hits"] or 0),
                seconds((each["hits"] or 0) * (each["compile_seconds"] or 0.0)),
                _size(each["stored_size"]),
                Cell(f"{each['platform'] or ''} {each['jaxlib_version'] or ''}", kind="whole"),
                moment(each["last_used_at"]),
            ),
        )
        for each in entries
    ]
    columns = (
        *(("key", False), ("function", False), ("compile time", True), ("hits", True), ("not compiled again", True)),
        *(("size", True), ("made for", False), ("last used", False)),
    )
    return Table("dearest", "The dearest entries", columns, rows)


def groups(name: str, caption: str, title: str, found: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """Return sums over groups of entries."""
    most = max((each["bytes"] or 0 for _, each in found), default=0)
    rows = [
        (
            "",
            (
                Cell(short(label), kind="wrap"),
                number(each["entries"]),
                _size(each["bytes"])._replace(bar=100 * (each["bytes"] or 0) / most if most else None),
                seconds(each["seconds"] or 0.0),
                number(each["hits"] or 0),
            ),
        )
        for label, each in found
    ]
    columns = ((title, False), ("entries", True), ("size", True), ("compile time", True), ("hits", True))
    return Table(name, caption, columns, rows)


def gone(found: Sequence[Mapping[str, Any]], missed: Mapping[str, tuple[int, float]]) -> Table:
    """Return what left the store, and how much of it was compiled again: by cause, programs and seconds."""
    most = max((each["seconds"] or 0.0 for each in found), default=0.0)
    rows = []
    for each in found:
        count, lost = missed.get(each["reason"], (0, 0.0))
        rows.append(
            (
                "",
                (
                    Cell(each["reason"]),
                    number(each["entries"]),
                    seconds(each["seconds"] or 0.0, most),
                    number(count),
                    seconds(lost),
                    Cell(ledger.CAUSES.get(each["reason"], ""), kind="text"),
                ),
            )
        )
    columns = (
        *(("reason", False), ("entries", True), ("compile time", True)),
        *(("compiled again", True), ("which took", True), ("it means", False)),
    )
    return Table("gone", "What left the store and has not come back", columns, rows)


def toolchains(found: Sequence[Mapping[str, Any]]) -> Table:
    """Return the toolchains and where they are installed."""
    rows = []
    for each in found:
        places = sorted({one["place"] for one in each["installations"] if one["state"] != "gone"})
        rows.append(
            (
                "",
                (
                    Cell(each["digest"][:_SHORT_KEY], kind="code"),
                    Cell(f"{each['platform'] or ''} {each['jaxlib_version'] or ''}"),
                    Cell(each["state"], kind="worse" if each["state"] == "stale" else ""),
                    number(each["entries"]),
                    _size(each["bytes"]),
                    seconds(each["compile_seconds"]),
                    Cell(
                        short(", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")),
                        kind="wrap",
                    ),
                ),
            )
        )
    columns = (
        *(("toolchain", False), ("jaxlib", False), ("state", False), ("entries", True)),
        *(("size", True), ("compile time", True), ("where", False)),
    )
    return Table("toolchains", "The toolchains that compiled the entries", columns, rows)
