"""Describe programs, where that is worth the description of jax's code that it takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xcache.hook.structure.encoding import CannotSkipError

# A process that was not expected to gain, and spends so many seconds of a processor on lowering, has changed: 0.15 to
# 0.4 s for a description were measured.
_SURPRISING_SECONDS = 2.0
_CHEAP = "lowering is cheap"
_UNSEEN = "an earlier program was not described"
_UNKNOWN = "this version of jax"


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
        self._is_decided = always
        # Why no program is described, once that is decided.
        self._reason: str | None = None
        self._spent = 0.0
        # The seconds that the description of jax's code took; infinite until there is one.
        self._price = float("inf")
        # The module that makes structures, once it is needed.
        self._made_by: Any = None
        self._beginning: Any = None

    def watch(self) -> None:
        """Notice from now on what is changed in jax before it is described, also in modules that were just imported."""
        from xcache.hook.structure.beginning import Beginning

        if self._beginning is None:
            self._beginning = Beginning()
        else:
            self._beginning.see_new()

    def end(self) -> None:
        """Notice nothing more: xcache's own functions leave jax."""
        if self._made_by is not None:
            from xcache.hook.structure.pristine import pristine

            pristine.watch(None)

    def structure(self, module_name: str, jaxpr: Any, arguments: Any) -> Any:
        """Return a program's structure; raise CannotSkipError if there is none, or nothing is gained by it."""
        if not self._is_decided:
            expected = self._expected()
            self._is_decided = True
            if expected is not None and expected < 1:
                self._reason = _CHEAP
        if self._reason is not None:
            raise CannotSkipError(self._reason)
        if self._made_by is None:
            self._prepare()
        try:
            return self._made_by.structure(module_name, jaxpr, arguments)
        except CannotSkipError:
            self.see(jaxpr)
            raise

    def is_as_then(self, structure: Any) -> bool:
        """Return whether jax's code is as it was when a structure was made: another thread may change it."""
        return bool(self._made_by.is_as_then(structure))

    def begin(self) -> None:
        """Describe programs, from the next process on if it is too late: more than lowering is gained by it."""
        if self._is_decided and self._reason == _CHEAP:
            self._surprise()
        self._is_decided = True
        if self._made_by is None:
            self._prepare()

    def see(self, jaxpr: Any) -> None:
        """Look at a program that is lowered without a structure: jax's caches will have traces of its rules."""
        if self._made_by is not None and self._reason is None:
            self._made_by.look_at(jaxpr)
        else:
            self._is_decided = True
            self._reason = self._reason or _UNSEEN

    def note_lowering(self, seconds: float) -> None:
        """Note the time that a lowering took."""
        self._spent += seconds
        if self._reason == _CHEAP and self._spent >= _SURPRISING_SECONDS:
            self._surprise()

    def worth(self, seconds: float) -> float:
        """Return how many descriptions are paid for by saving so many seconds once."""
        return seconds / self._price

    def _surprise(self) -> None:
        surprised, self._surprised = self._surprised, lambda: None
        surprised()

    def _prepare(self) -> None:
        """Describe jax's code; a second thread that comes meanwhile waits for that."""
        began = time.thread_time()
        try:
            from xcache.hook.structure import ambient, digest
            from xcache.hook.structure.pristine import pristine
        except BaseException:
            self._reason = _UNKNOWN
            raise
        ambient.memo_folder = self._memo_folder
        with contextlib.suppress(CannotSkipError):
            ambient.jax_files()
            pristine.refresh()
            pristine.watch(self._beginning)
            pristine.digest()
        self._made_by = digest
        self._price = max(time.thread_time() - began, 0.001)
