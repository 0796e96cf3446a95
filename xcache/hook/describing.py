"""Describe programs, once that is worth the description of jax's code that it takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax._src import core

from xcache.hook.structure.encoding import CannotSkipError

# Measured on two processors: 0.15 to 0.3 s for a description, 0.04 to 0.15 ms to lower one equation of many.
_DESCRIPTION_SECONDS = 0.2
_SECONDS_PER_EQUATION = 0.00005
# A program that did not gain in its last run must spend so much more before it is believed to have changed.
_UNEXPECTED = 3


class Describing:
    """The structures of one process's programs, and what it has spent on lowering before it made any."""

    def __init__(self, expected: Callable[[], float], memo_folder: Path, *, always: bool) -> None:
        """``expected`` tells how many descriptions are paid for by skipping the lowerings of the program's last run.

        ``memo_folder`` is where the digest of jax's files is remembered.
        """
        self._expected, self._memo_folder, self._is_worth_it = expected, memo_folder, always
        self._spent = 0.0
        # The seconds that the description of jax's code took; infinite until there is one.
        self._price = float("inf")
        self._structure: Callable[..., Any] | None = None

    def begin(self) -> None:
        """Describe programs from now on."""
        self._is_worth_it = True

    def structure(self, module_name: str, jaxpr: Any, arguments: Any) -> Any:
        """Return a program's structure; raise CannotSkipError if there is none, or nothing is gained by it."""
        if not self._is_worth_it and not self._is_now_worth_it(jaxpr):
            raise CannotSkipError("lowering is cheap")
        if self._structure is None:
            self._prepare()
        return self._structure(module_name, jaxpr, arguments)  # type: ignore[misc] # it is there now

    def note_lowering(self, seconds: float) -> None:
        """Note the time that a lowering took."""
        if self._structure is None:
            self._spent += seconds

    def worth(self, seconds: float) -> float:
        """Return how many descriptions are paid for by saving so many seconds once, and those spent before."""
        spent, self._spent = self._spent, 0.0
        return (seconds + spent) / self._price

    def _is_now_worth_it(self, jaxpr: Any) -> bool:
        expected = self._expected()
        spent = self._spent + _SECONDS_PER_EQUATION * _equations(jaxpr.jaxpr)
        self._is_worth_it = expected >= 1 or spent >= _DESCRIPTION_SECONDS * (_UNEXPECTED if expected else 1)
        return self._is_worth_it

    def _prepare(self) -> None:
        # In case that the import fails.
        self._structure = _refuse
        began = time.perf_counter()
        from xcache.hook.structure import ambient, digest
        from xcache.hook.structure.pristine import pristine

        ambient.memo_folder = self._memo_folder
        with contextlib.suppress(CannotSkipError):
            ambient.jax_files()
            pristine.refresh()
            pristine.digest()
        self._structure = digest.structure
        self._price = max(time.perf_counter() - began, 0.001)


def _refuse(*_: Any) -> None:
    raise CannotSkipError("this version of jax")


def _equations(jaxpr: Any) -> int:
    return len(jaxpr.eqns) + sum(map(_equations, core.subjaxprs(jaxpr)))
