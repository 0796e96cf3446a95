"""The picture that ``xcache monitor`` draws: lines for a terminal of any width and height."""

from __future__ import annotations

import math
import os
import pwd
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from xcache import start_up
from xcache.cli.following import Told
from xcache.cli.output import counted, duration, printable, size
from xcache.wire import commands, ledger

# On a narrower terminal each program takes several lines.
_WIDE = 66
# Seconds over which hits and misses are averaged, and misses that are kept to be shown.
_PACE_SECONDS, _MOST_MISSES = 10.0, 200
# Activities of one program that are shown.
_MOST_ACTIVITIES = 4
_STYLES = {"compiling": "yellow", "waiting": "cyan", "loading": "green"}

Row = Mapping[str, Any]


class View:
    """The last view of the daemon, and the way it is drawn."""

    def __init__(self, *, ascii_only: bool = False, one_moment: bool = False) -> None:
        """With ``one_moment``, nothing was watched before, so that nothing is counted."""
        self._one_moment = one_moment
        self._seen: commands.Seen | None = None
        self._problem = ""
        self._heard = self._began = time.time()
        self._hits = self._misses = self._left_out = 0
        # Seconds, hits and misses of the last notices.
        self._pace: deque[tuple[float, int, int]] = deque()
        # By run and position, because a row comes again when it has changed; with the time when it came first.
        self._missed: dict[tuple[str, int], tuple[float, Row]] = {}
        self._ellipsis, self._full, self._empty = ("...", "#", ".") if ascii_only else ("…", "█", "░")

    def take(self, told: Told) -> None:
        """Take in what was told."""
        if isinstance(told, str):
            self._problem = told
            return
        self._problem, self._seen, self._heard = "", told, time.time()
        facts: dict[str, Any] = told.facts
        self._hits += facts["hits"]
        self._misses += facts["misses"]
        self._left_out += facts["left_out"]
        self._pace.append((facts["seconds"], facts["hits"], facts["misses"]))
        while sum(seconds for seconds, _, _ in self._pace) > _PACE_SECONDS and len(self._pace) > 1:
            self._pace.popleft()
        for row in told.missed:
            number = str(row["run"]), int(str(row["position"]))
            since, _ = self._missed.get(number, (self._heard, row))
            self._missed[number] = since, row
        for number in list(self._missed)[:-_MOST_MISSES]:
            del self._missed[number]

    def lines(self, width: int, height: int) -> list[Text]:
        """Return the picture, of at most ``height`` lines."""
        head = self._head(width)
        programs = self._programs(width, height)
        misses = self._misses_shown(width)
        # Each part gets what it needs if there is room for both, and the misses a third at least.
        room = max(0, height - len(head) - 2)
        for_misses = min(len(misses), max(room // 3, room - sum(map(len, programs)), 2))
        shown = [*head, Text(""), *self._fitting(programs, room - for_misses), Text(""), *misses[:for_misses]]
        for line in shown:
            line.truncate(width, overflow="ellipsis" if self._ellipsis == "…" else "crop")
        return shown[:height]

    def _head(self, width: int) -> list[Text]:
        title = Text.assemble(("xcache monitor", "bold"))
        keys = "q leaves"
        if self._seen is not None:
            facts: dict[str, Any] = self._seen.facts
            age = time.time() - self._heard
            about = f"  daemon {facts['pid']}, up {duration(math.floor(facts['uptime_seconds'] + age))}"
            title.append(about if width >= len(title) + len(about) + len(keys) + 2 else "")
        title.append(" " * max(2, width - len(title) - len(keys)) + keys, "dim")
        lines = [title]
        if self._problem:
            lines += _wrapped(Text(self._problem, "bold red"), width)
        if self._seen is not None:
            lines.append(self._fill(self._seen.facts, width))
            for parts in filter(None, (self._rates(), self._numbers(self._seen.facts))):
                together = Text("; ".join(parts))
                lines += [together] if together.cell_len <= width else map(Text, parts)
        return lines

    def _fill(self, facts: Row, width: int) -> Text:
        """Return how full the store is."""
        if facts["entries"] is None:
            return Text("the store cannot be read", "red")
        share = max(
            facts["bytes"] / facts["max_size"] if facts["max_size"] else 0.0,
            facts["entries"] / facts["max_entries"] if facts["max_entries"] else 0.0,
        )
        most = f" of {size(facts['max_size'])}" if facts["max_size"] else ""
        entries = f" of {facts['max_entries']}" if facts["max_entries"] else ""
        text = f"{facts['entries']}{entries} entries, {size(facts['bytes'])}{most}"
        if facts["max_size"] or facts["max_entries"]:
            text += f" ({share:.0%})"
        bar = min(30, width - len(text) - 4)
        line = Text(text)
        if bar >= 10 and (facts["max_size"] or facts["max_entries"]):
            full = min(bar, round(share * bar))
            line.append("  ").append(self._full * full, "red" if share > 0.95 else "green")
            line.append(self._empty * (bar - full), "dim")
        return line

    def _rates(self) -> list[str]:
        if self._one_moment:
            return []
        seconds = sum(seconds for seconds, _, _ in self._pace) or 1.0
        hits, misses = (max(0, sum(each)) / seconds for each in zip(*((h, m) for _, h, m in self._pace), strict=True))
        since = time.strftime("%H:%M", time.localtime(self._began))
        return [
            f"{hits:.1f} hits/s, {misses:.1f} misses/s",
            f"since {since}: hits {self._hits}, misses {self._misses}",
        ]

    def _numbers(self, facts: Row) -> list[str]:
        texts = []
        if facts["connected"]:
            doing = f"{facts['compiling']} compiling, {facts['waiting']} waiting"
            texts.append(f"{counted(facts['connected'], 'program')}: {doing}")
        if facts["other_connected"]:
            texts.append(f"other users' {facts['other_connected']}: {facts['other_compiling']} compiling")
        return texts

    def _programs(self, width: int, height: int) -> list[list[Text]]:
        """Return the lines of each program, after the title."""
        if self._seen is None:
            return []
        if not self._seen.programs:
            return [[Text("no program is connected", "dim")]]
        doing: dict[object, list[Row]] = {}
        for activity in self._seen.doing:
            doing.setdefault(activity["pid"], []).append(activity)
        programs: Sequence[Row] = self._seen.programs
        if len(programs) <= height // 2:
            # The daemon names busy programs first. If there is room for all, each stays in its line.
            programs = sorted(programs, key=lambda row: (-row["seconds"], row["pid"]))
        if width < _WIDE:
            return [self._narrow(row, doing.get(row["pid"], []), width) for row in programs]
        names = [_label(row) for row in programs]
        name_width = min(max(map(len, (*names, "program"))), width // 4)
        pid, hits, misses = (
            max(len(title), *(len(str(row[title])) for row in programs)) for title in ("pid", "hits", "misses")
        )
        lines = [
            [Text(f"{'pid':>{pid}}  {'program':{name_width}}  {'hits':>{hits}} {'misses':>{misses}}  doing", "bold")]
        ]
        for row, name in zip(programs, names, strict=True):
            first = f"{row['pid']:>{pid}}  {self._cut(name, name_width):{name_width}}  "
            first += f"{row['hits']:>{hits}} {row['misses']:>{misses}}  "
            each = self._activities(doing.get(row["pid"], []), width - len(first)) or [Text("-", "dim")]
            lines.append([Text(" " * len(first) if number else first) + text for number, text in enumerate(each)])
        return lines

    def _narrow(self, row: Row, doing: Sequence[Row], width: int) -> list[Text]:
        count = f", hits {row['hits']}, misses {row['misses']}"
        name = self._cut(f"{row['pid']} {_label(row)}", max(8, width - len(count)))
        title = Text.assemble((name, "bold"), count)
        return [title, *(Text("  ") + text for text in self._activities(doing, width - 2))]

    def _activities(self, doing: Sequence[Row], width: int) -> list[Text]:
        texts = [self._activity(row, width) for row in doing[:_MOST_ACTIVITIES]]
        if len(doing) > _MOST_ACTIVITIES:
            texts.append(Text(f"and {len(doing) - _MOST_ACTIVITIES} more", "dim"))
        return texts

    def _activity(self, row: Row, width: int) -> Text:
        """Return what a program does; only the name is cut, so that the time is always seen."""
        # Seconds go on between two notices.
        took = duration(row["seconds"] + (0.0 if self._problem else time.time() - self._heard))
        before, after = f"{row['kind']} ", f" for {took}"
        if row["kind"] == "waiting":
            before, after = "waiting for ", f" of {row['of_pid']}, {took}"
        elif row["kind"] == "compiling" and row["waiting"]:
            after += f", {row['waiting']} wait"
        elif row.get("ahead"):
            before = "loading ahead "
        room = max(6, width - len(before) - len(after))
        name = self._cut(printable(row["module_name"]) or str(row["key"])[:12], room)
        return Text(f"{before}{name}{after}", _STYLES.get(str(row["kind"]), ""))

    def _misses_shown(self, width: int) -> list[Text]:
        """Return a title and a line for each miss, the latest first."""
        if not self._missed:
            return [] if self._seen is None or self._one_moment else [Text("no miss yet", "dim")]
        shown = [*reversed(self._missed.values())]
        more = f" ({self._left_out} left out)" if self._left_out else ""
        if width < _WIDE:
            return [Text(f"last misses{more}", "bold"), *(self._narrow_miss(*each, width) for each in shown)]
        pid = max(len("pid"), *(len(str(row["pid"])) for _, row in shown))
        name = min(max(len("function"), *(len(str(row["module_name"])) for _, row in shown)), width // 3)
        title = f"{'missed':8}  {'pid':>{pid}}  {'function':{name}}  {'compile':>7}  cause{more}"
        return [Text(title, "bold"), *(self._miss(*each, pid, name, width) for each in shown)]

    def _narrow_miss(self, since: float, row: Row, width: int) -> Text:
        cause = f": {_cause(row)}"
        clock = _clock(since)
        name = self._cut(printable(str(row["module_name"])), max(12, width - len(clock[0]) - 1 - len(cause)))
        return Text.assemble(clock, f" {name}{cause}")

    def _miss(self, since: float, row: Row, pid: int, name: int, width: int) -> Text:
        function = self._cut(printable(str(row["module_name"])), name)
        line = Text.assemble(
            _clock(since),
            f"  {row['pid']:>{pid}}  {function:{name}}  {_compile_time(row):>7}  ",
            (_cause(row), "yellow"),
        )
        # The file and the line, without the folders that lead there.
        site = printable(str(row["site"])).partition(" in ")[0].rpartition("/")[2]
        return line.append(f"  {site}" if line.cell_len + 2 + len(site) <= width else "")

    def _fitting(self, programs: Sequence[Sequence[Text]], room: int) -> list[Text]:
        """Return as many programs as there is room for, and say how many are left out."""
        if sum(map(len, programs)) <= room:
            return [line for lines in programs for line in lines]
        shown: list[Text] = []
        for number, lines in enumerate(programs):
            if len(shown) + len(lines) > room - 1:
                return [*shown, Text(f"and {counted(len(programs) - number, 'more program')}", "dim")][: max(0, room)]
            shown += lines
        return shown

    def _cut(self, text: str, width: int) -> str:
        return text if len(text) <= width else text[: max(0, width - len(self._ellipsis))] + self._ellipsis


def _clock(moment: float) -> tuple[str, str]:
    """Return a time of day, dim."""
    return time.strftime("%H:%M:%S", time.localtime(moment)), "dim"


def _cause(row: Row) -> str:
    """Return why a program was compiled."""
    return printable(str(row["cause"]) if row["outcome"] == ledger.MISS else f"not cacheable: {row['cause']}")


def _compile_time(row: Row) -> str:
    """Return how long the compile took; empty while that is not known."""
    fields = {name: row[name] for name in ledger.Row._fields}
    seconds = sum(span.seconds for span in start_up.spans_of(ledger.Row(**fields)) if span.stage == "compile")
    return duration(seconds) if seconds else ""


def _label(row: Row) -> str:
    """Return a program's name, with its user's if that is another one."""
    name = printable(str(row["program"])) or "?"
    if row["uid"] == os.getuid():
        return name
    try:
        return f"{name} ({pwd.getpwuid(row['uid']).pw_name})"
    except (KeyError, OverflowError):
        return f"{name} (uid {row['uid']})"


def _wrapped(text: Text, width: int) -> list[Text]:
    """Return a text in lines of this width, broken between words."""
    from rich.console import Console

    return list(text.wrap(Console(width=max(width, 10)), max(width, 10)))
