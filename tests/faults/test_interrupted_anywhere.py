"""At every line of xcache's that a program's compile goes through: it is interrupted, or a handler compiles there."""

from __future__ import annotations

import json
import sys

import pytest
from support.alongside import running
from support.program_files import program_path

# The bounds are against hangs: a busy machine takes minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def running_program(place, name):
    search = place.with_support["PYTHONPATH"]
    return running([sys.executable, program_path(name)], place, XCACHE="1", PYTHONPATH=search)


@pytest.mark.parametrize(
    "name", ["interrupt_at_every_line", "compile_at_every_line"], ids=["interrupted", "compiled there"]
)
def test_at_every_line(place, name):
    place.start_daemon()
    with running_program(place, name) as program:
        out, err = program.communicate(timeout=500)
    assert program.returncode == 0, err[-6000:]
    found = json.loads(out)
    # Some of them are met in every version: keys, client, connection, protocol, queue.
    assert found["lines"] > 100
    # It does not wait for itself, nor for a timeout.
    assert found.get("longest wait", 0) < 4
    # Each thread that loads ahead has a connection of its own.
    assert isinstance(found["left open"], int), found
    assert err == ""


def test_an_interrupt_while_it_is_switched_on_comes_out_at_the_next_compile(place):
    # Each of some hundred attempts starts a daemon, and a busy machine takes its time for that.
    with running_program(place, "interrupt_where_it_is_switched_on") as program:
        out, err = program.communicate(timeout=500)
    assert program.returncode == 0, err[-6000:]
    found = json.loads(out)
    assert found["lines"] > 30
    assert isinstance(found["left open"], int), found
