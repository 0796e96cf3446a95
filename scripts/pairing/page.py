"""Writes the tables of docs/soundness.md from what was recorded of pairs: ``python -m pairing.page RECORDS PAGE``."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- written by scripts/pairs -->", "<!-- scripts/pairs until here -->"
_COLUMNS = (
    "pairs", "differ", "same on purpose", "with a shortcut",
    "runs", "lowerings skipped", "calls not traced", "hits", "wrong",
)  # fmt: skip


def counted(records: Iterable[dict[str, Any]]) -> Counter[str]:
    """Return the numbers of one row."""
    counts: Counter[str] = Counter()
    for record in records:
        if record["verdict"] == "tests nothing":
            continue
        told = record["counts"]
        skipped, untraced = told.get("lowerings: skipped", 0), told.get("calls: skipped", 0)
        counts.update(
            {
                "pairs": 1,
                "differ": record["differs"],
                "same on purpose": not record["differs"],
                "with a shortcut": bool(skipped or untraced),
                "runs": record["runs"],
                "lowerings skipped": skipped,
                "calls not traced": untraced,
                "hits": told.get("hits", 0),
                "wrong": record["verdict"] == "wrong",
            }
        )
    return counts


def tables(recorded: dict[str, Sequence[dict[str, Any]]]) -> str:
    """Return a table of the versions of jax, and one of the families of pairs."""
    lines = [*_heading("jax")]
    lines += [_row(version, counted(records)) for version, records in recorded.items()]
    everything = [record for records in recorded.values() for record in records]
    lines += [_row("all", counted(everything)), "", *_heading("what differs")]
    for family in dict.fromkeys(record["family"] for record in everything):
        lines.append(_row(family, counted(record for record in everything if record["family"] == family)))
    return "\n".join(lines)


def _heading(first: str) -> tuple[str, str]:
    return f"| {first} | {' | '.join(_COLUMNS)} |", "|---" * (len(_COLUMNS) + 1) + "|"


def _row(name: str, counts: Counter[str]) -> str:
    return f"| {name} | {' | '.join(f'{counts[column]:,}' for column in _COLUMNS)} |"


def write(page: Path, text: str) -> None:
    """Replace what is between the markers of a page."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


def main() -> None:
    folder, page = map(Path, sys.argv[1:])
    files = sorted(folder.glob("*.json"), key=lambda file: [int(part) for part in re.findall(r"\d+", file.stem)])
    write(page, tables({file.stem: json.loads(file.read_text()) for file in files}))


if __name__ == "__main__":
    main()
