"""Clients that start daemons from the test's own process."""

from __future__ import annotations

import pytest
from support.starting import starters


@pytest.fixture
def here(place, monkeypatch):
    """A daemon that is started from this very process finds its modules, and this place."""
    for name, value in place.env.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def connected(place):
    """Makes clients that may start a daemon."""
    with starters(place) as make:
        yield make
