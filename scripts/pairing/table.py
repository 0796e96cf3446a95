"""All pairs."""

from __future__ import annotations

from collections.abc import Iterator

from pairing import bindings, classes, files, patches, paths, settings, values
from pairing.pair import Pair


def all_pairs() -> Iterator[Pair]:
    """Yield every pair."""
    for family in (bindings, classes, values, patches, paths, files, settings):
        yield from family.pairs()
