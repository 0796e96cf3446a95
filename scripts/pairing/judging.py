"""Judges what the runs of a pair gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pairing.pair import Pair
from pairing.running import Ran


def judged(pair: Pair, runs: Sequence[Ran]) -> dict[str, Any]:
    """Return a record of a pair: whether all runs gave what they give without xcache, and what was counted."""
    off = {run.side: run.result for run in runs if run.where == "off"}
    on = [run for run in runs if run.where != "off"]
    wrong = [run for run in on if run.result != off[run.side]]
    counts: Counter[str] = Counter()
    for run in on:
        counts.update(run.counts)
    verdict, why = "right", ""
    if wrong:
        verdict = "wrong"
        told = []
        for run in wrong:
            other = "B" if run.side == "A" else "A"
            whose = f"{other}'s" if run.result == off[other] else "neither's"
            told.append(f"{run.where} gave {whose}")
        why = f"{', '.join(told)}; last: {_short(wrong[-1].result)} instead of {_short(off[wrong[-1].side])}"
    elif off["A"] != off["B"] and pair.is_same:
        verdict, why = "tests nothing", f"A and B should be the same: {_short(off['A'])} / {_short(off['B'])}"
    elif off["A"] == off["B"] and not pair.is_same:
        verdict, why = "tests nothing", f"both give {_short(off['A'])}"
    return {
        "name": pair.name, "family": pair.family, "jit": pair.jit, "verdict": verdict, "why": why,
        "differs": off["A"] != off["B"], "raises": str(off["A"][0]).startswith("raised"), "counts": dict(counts),
        "runs": len(on),
    }  # fmt: skip


def _short(result: Any) -> str:
    text = str(result)
    return text if len(text) < 300 else f"{text[:300]}..."
