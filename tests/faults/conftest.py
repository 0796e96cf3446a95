"""Users of one machine, and a program with its store."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest
from support.engines import redis_engine as redis_engine
from support.places import Place, new_place
from support.small_programs import Reference, Running
from support.users import Machine, make_machine, talking_as


@pytest.fixture
def machine(place: Place) -> Machine:
    """A machine of its own, as far as accounts go."""
    return make_machine(place)


@pytest.fixture
def users(machine):
    """Makes connections of users; trusted are the members of a team, Alice and Carol, and the builder."""
    machine.start(XCACHE_TRUSTED_WRITERS="@team builder", XCACHE_USER_QUOTA="1M")
    with contextlib.ExitStack() as stack:

        def user(uid):
            return stack.enter_context(talking_as(machine, uid))

        user.place = machine.place
        yield user


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    """Made once: a run without xcache and a store with everything in it."""
    with new_place() as place:
        without = Running(place, XCACHE="0").ended()
        # A busy machine's daemon may answer late, and what is late is not stored.
        filled = Running(place, XCACHE_TIMEOUT="60s").ended()
        assert (filled.results, filled.stats["errors"]) == (without.results, {})
        place.stop()
        yield Reference(without, place.dir)


@pytest.fixture
def warm(place: Place, reference: Reference) -> Place:
    """A place whose store has everything in it; its daemon does not run."""
    shutil.copytree(reference.store, place.dir)
    return place
