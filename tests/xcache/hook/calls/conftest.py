"""Each test begins with jax as it is now, though an earlier one of this process has patched it."""

from __future__ import annotations

import jax
import pytest

from xcache.hook.structure import digest  # noqa: F401 - its table of types
from xcache.hook.structure.pristine import pristine


@pytest.fixture(autouse=True)
def _jax_as_it_is() -> None:
    pristine.refresh()
    jax.clear_caches()
