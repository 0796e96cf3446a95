"""Helpers for tests that start daemons from their own process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from support.places import Place
from xcache.client.client import Client
from xcache.client.launcher import Launcher


@contextlib.contextmanager
def starters(place: Place) -> Iterator[Callable[..., Client]]:
    """Return a function that makes clients which may start a daemon; close them at the end."""
    clients: list[Client] = []

    def make(timeout: float = 20, **settings: object) -> Client:
        config = place.config(timeout=timeout, **settings)
        clients.append(Client(config, "test", Launcher(config)))
        return clients[-1]

    try:
        yield make
    finally:
        for client in clients:
            client.close()


def with_a_store(place: Place) -> None:
    """Make a place where a daemon has run before."""
    place.start_daemon()
    place.stop()
