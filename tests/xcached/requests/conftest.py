"""Clients that take leases."""

from __future__ import annotations

import pytest
from support.conversation import Conversation


@pytest.fixture
def speakers(place):
    """Makes connections that have said hello; all of them end with the test."""
    place.start_daemon()
    made: list[Conversation] = []

    def speaker() -> Conversation:
        made.append(Conversation(place))
        made[-1].greet()
        return made[-1]

    yield speaker
    for each in made:
        each.close()
