"""Clients that start daemons from the test's own process, and a clock that can be moved on."""

from __future__ import annotations

import time
import types

import pytest
from support.starting import starters

from xcache.client import breaker, connection
from xcache.client import client as client_module


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


@pytest.fixture
def clock(monkeypatch):
    """Time that goes on as usual, and can be moved on."""

    made = types.SimpleNamespace(ahead=0.0)
    for module, name in (
        (breaker, "monotonic"),
        (client_module, "monotonic"),
        (client_module, "own_time"),
        (connection, "own_time"),
    ):
        monkeypatch.setattr(module, name, lambda: time.monotonic() + made.ahead)
    return made
