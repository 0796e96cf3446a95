"""Describe programs, where that is worth the description of jax's code that it takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xcache.hook.structure.encoding import CannotSkipError

# A process that was not expected to gain, and spends so many seconds on lowering, has changed: 0.15 to 0.3 s for a
# description were measured on two processors.
_SURPRISING_SECONDS = 1.0


class Describing:
    """The structures of one process's programs.

    The process decides before it lowers its first program: what it lowers later, jax's caches may have from code that
    is not there any more when it is described.
    """

    def __init__(
        self,
        expected: Callable[[], float | None],
        surprised: Callable[[], None],
        memo_folder: Path,
        *,
        always: bool,
    ) -> None:
        """``expected`` tells how many descriptions are paid for by skipping the lowerings of the program's last run.

        It returns None if that is not known. ``surprised`` has the next process describe, so that it will be.
        ``memo_folder`` is where the digest of jax's files is remembered.
        """
        self._expected, self._surprised, self._memo_folder = expected, surprised, memo_folder
        self._is_worth_it = True if always else None
        self._spent = 0.0
        # The seconds that the description of jax's code took; infinite until there is one.
        self._price = float("inf")
        self._structure: Callable[..., Any] | None = None

    def structure(self, module_name: str, jaxpr: Any, arguments: Any) -> Any:
        """Return a program's structure; raise CannotSkipError if there is none, or nothing is gained by it."""
        if self._is_worth_it is None:
            expected = self._expected()
            self._is_worth_it = expected is None or expected >= 1
        if not self._is_worth_it:
            raise CannotSkipError("lowering is cheap")
        if self._structure is None:
            self._prepare()
        return self._structure(module_name, jaxpr, arguments)  # type: ignore[misc] # it is there now

    def begin(self) -> None:
        """Describe programs, from the next process on if it is too late: more than lowering is gained by it."""
        if self._is_worth_it is None:
            self._is_worth_it = True
        elif not self._is_worth_it:
            self._surprise()

    def note_lowering(self, seconds: float) -> None:
        """Note the time that a lowering took."""
        self._spent += seconds
        if self._is_worth_it is False and self._spent >= _SURPRISING_SECONDS:
            self._surprise()

    def worth(self, seconds: float) -> float:
        """Return how many descriptions are paid for by saving so many seconds once."""
        return seconds / self._price

    def _surprise(self) -> None:
        surprised, self._surprised = self._surprised, lambda: None
        surprised()

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
