"""A daemon, and somebody who talks to it."""

from __future__ import annotations

import pytest
from conversation import talking


@pytest.fixture
def talk(place):
    place.start_daemon()
    with talking(place) as conversation:
        yield conversation
