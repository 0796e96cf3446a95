"""What the tests that start daemons from their own process have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from places import Place

from xcache.client import Client
from xcache.launcher import Launcher


@contextlib.contextmanager
def starters(place: Place) -> Iterator[Callable[..., Client]]:
    """Makes clients that may start a daemon, and closes them."""
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
    """A daemon was here before."""
    place.start_daemon()
    place.stop()
