"""The structure of a function, as jax would lower it for its arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from xcache.hook.skipping import Replacement
from xcache.hook.structure import digest
from xcache.hook.structure.encoding import CannotSkipError
from xcache.hook.structure.pristine import pristine


class Structures:
    """Has jax begin to lower functions, and notes the structure of what it was about to lower."""

    class Noted(Exception):  # noqa: N818 - it only ends the lowering
        """The structure is known."""

    def __init__(self) -> None:
        self.met: list[digest.Structure | str] = []

    def of(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
        """Return the digest of what jax lowers for a function; a reason in angle brackets if there is none."""
        found = self.all_of(function, *arguments, **options)
        return found if isinstance(found, str) else found.digest

    def all_of(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> digest.Structure | str:
        """Return the structure of what jax lowers for a function."""
        self.met.clear()
        # jax does not lower again what it has lowered, and may hold what code has traced that a test has changed.
        pristine.refresh()
        jax.clear_caches()
        with contextlib.suppress(self.Noted):
            jax.jit(function, **options).trace(*arguments).lower()
        assert len(self.met) == 1, "jax has not lowered it, or has lowered something else as well"
        return self.met[0]


@pytest.fixture
def structures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Structures]:
    from jax._src.interpreters import mlir

    made, original = Structures(), mlir.lower_jaxpr_to_module

    def lower(name: str, jaxpr: Any, **options: Any) -> Any:
        try:
            made.met.append(digest.structure(name, jaxpr, options))
        except CannotSkipError as reason:
            made.met.append(f"<{reason}>")
        # With what a test has put in place of jax's code, the lowering itself may fail.
        raise made.Noted

    monkeypatch.setattr(mlir, "lower_jaxpr_to_module", Replacement(original, lower))
    yield made
    jax.clear_caches()


@pytest.fixture
def registered() -> Iterator[Callable[..., None]]:
    """Register lowering rules for the length of a test."""
    from jax._src.interpreters import mlir

    before = dict(mlir._lowerings)
    yield mlir.register_lowering
    mlir._lowerings.clear()
    mlir._lowerings.update(before)
