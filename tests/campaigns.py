"""Campaigns: series of faults, as long as one likes, that count what they tried and what they saw."""

from __future__ import annotations

from collections import Counter


class Campaign:
    """One series of faults: how long it is, what its choices follow from, and what it counted."""

    def __init__(self, rounds: int | None, seed: int, *, soak: float | None = None, crowd: int | None = None) -> None:
        self.seed = seed
        self.notes: list[str] = []
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._rounds = rounds
        self._soak = soak
        self._crowd = crowd

    def rounds(self, usual: int) -> int:
        """How many rounds there are to be."""
        return usual if self._rounds is None else self._rounds

    def seconds(self, usual: float) -> float:
        """How long a steady load is to last."""
        return usual if self._soak is None else self._soak

    def programs(self, usual: int) -> int:
        """How many programs are to ask at once."""
        return usual if self._crowd is None else self._crowd

    def note(self, text: str) -> None:
        """Something measured, to be said at the end of the run."""
        self.notes.append(text)

    def fault(self) -> None:
        """One more fault was tried."""
        self.counts["faults tried"] += 1

    def checked(self, entries: int) -> None:
        """So many entries were compared with what was sent."""
        self.counts["entries checked"] += entries

    def problem(self, kind: str, text: str) -> None:
        """Something that must not be: a loss, a wrong load, a crash, or anything else."""
        assert kind in CAMPAIGN_COUNTS, kind
        self.counts[kind] += 1
        self.problems.append(f"{kind}: {text}")

    def judge(self) -> None:
        """Fail if anything was seen that must not be."""
        assert not self.problems, "\n".join([f"{len(self.problems)} problems", *self.problems[:20]])


CAMPAIGN_COUNTS = ("faults tried", "entries checked", "losses", "wrong loads", "crashes", "other problems")
# Counted by some campaigns only.
OTHER_COUNTS = ("requests answered", "samples")
