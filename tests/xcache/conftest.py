"""Caches of one process."""

from __future__ import annotations

import pytest

from xcache.cache import Cache
from xcache.prefetch.fetcher import Loader


@pytest.fixture
def caches(place):
    """Makes caches, each as in a process of its own; all are closed with the test."""
    place.start_daemon()
    made: list[Cache] = []

    def cache(mode: str = "on", loader: Loader | None = None, **settings: object) -> Cache:
        made.append(Cache(place.config(**settings), mode, "test", loader))
        return made[-1]

    yield cache
    for each in made:
        each.close()
