"""How long a program waits for remote stores that have nothing for it, in all: a slow one must not cost minutes."""

from __future__ import annotations

from collections.abc import Callable

from xcached.caller import Process

# A program may wait in vain for so many times the bound of one wait, and for this share of what its compiles took.
_TIMES, _SHARE = 2.0, 0.5


class Patience:
    """Counts the waits of each process. Belongs to the serving thread."""

    def __init__(self, longest: Callable[[], float]) -> None:
        """``longest`` returns the setting for one wait."""
        self._longest = longest

    def is_left(self, process: Process) -> bool:
        """Return whether a process may wait once more."""
        return process.waited_in_vain <= _TIMES * self._longest() + _SHARE * process.compiled

    def note(self, process: Process, seconds: float, *, in_vain: bool) -> None:
        """Note a wait. One that brought something makes up for those before."""
        process.waited_in_vain = process.waited_in_vain + seconds if in_vain else 0.0
