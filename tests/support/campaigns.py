"""Campaigns: series of faults of any length, which count what they tried and found."""

from __future__ import annotations

from collections import Counter


class Campaign:
    """One series of faults: its length, its seed and its counts."""

    def __init__(self, rounds: int | None, seed: int, *, soak: float | None = None, crowd: int | None = None) -> None:
        self.seed = seed
        self.notes: list[str] = []
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._rounds = rounds
        self._soak = soak
        self._crowd = crowd

    @property
    def is_long(self) -> bool:
        """True if the user set its length; only then are times judged."""
        return any(given is not None for given in (self._rounds, self._soak, self._crowd))

    def rounds(self, usual: int) -> int:
        """Return the number of rounds."""
        return usual if self._rounds is None else self._rounds

    def seconds(self, usual: float) -> float:
        """Return the length of a steady load."""
        return usual if self._soak is None else self._soak

    def programs(self, usual: int) -> int:
        """Return the number of programs that ask at once."""
        return usual if self._crowd is None else self._crowd

    def note(self, text: str) -> None:
        """Add a measurement to the report at the end of the run."""
        self.notes.append(text)

    def fault(self) -> None:
        """Count a fault."""
        self.counts["faults tried"] += 1

    def checked(self, entries: int) -> None:
        """Count entries that were compared with what was sent."""
        self.counts["entries checked"] += entries

    def problem(self, kind: str, text: str) -> None:
        """Count a problem: a loss, a wrong load, a crash, or anything else that must not be."""
        assert kind in CAMPAIGN_COUNTS, kind
        self.counts[kind] += 1
        self.problems.append(f"{kind}: {text}")

    def judge(self) -> None:
        """Fail if there was a problem, or if nothing was tried."""
        assert not self.problems, "\n".join([f"{len(self.problems)} problems", *self.problems[:20]])
        assert any(self.counts[kind] for kind in ATTEMPT_COUNTS), "the campaign tried nothing"


CAMPAIGN_COUNTS = ("faults tried", "entries checked", "losses", "wrong loads", "crashes", "other problems")
# Counted by some campaigns only.
OTHER_COUNTS = ("requests answered", "samples")
# A campaign without any of these counts has not run.
ATTEMPT_COUNTS = ("faults tried", "entries checked", "requests answered")
