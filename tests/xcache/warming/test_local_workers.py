"""The processes that compile, kept between two tasks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from xcache.warming.building import LocalWorkers
from xcache.warming.place import Place

PLACE = Place("cpu", 1, 1, (), ())
ASKED = {"action": "toolchain", "platform": "cpu"}


@pytest.fixture
def workers() -> Iterator[LocalWorkers]:
    with contextlib.closing(LocalWorkers(sys.executable)) as made:
        yield made


def test_a_worker_that_ended_while_it_was_idle_costs_no_task(workers):
    found = workers.ask(PLACE, ASKED, 60.0)
    (idle,) = workers._idle
    os.kill(idle._process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, idle._process.pid, os.WEXITED | os.WNOWAIT)
    assert workers.ask(PLACE, ASKED, 60.0) == found
    assert len(workers._idle) == 1
