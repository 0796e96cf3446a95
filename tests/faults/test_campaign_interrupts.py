"""At every line of xcache's that a program's compile goes through: it is interrupted, or a handler compiles there.

The short form strikes at one line in twelve; ``scripts/campaign interrupts`` at every line.
"""

from __future__ import annotations

import json
import sys

import pytest
from support.alongside import running
from support.program_files import program_path

# The bounds are against hangs: a busy machine takes minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


# The short form's share of the lines.
ONE_IN = 12


@pytest.fixture
def one_in(campaign):
    return 1 if campaign.is_long else ONE_IN


@pytest.fixture
def run(place, campaign, one_in):
    """Return a function that runs a program of tests/programs to its end and returns what it found."""

    def run(name):
        variables = {
            "XCACHE": "1",
            "PYTHONPATH": place.with_support["PYTHONPATH"],
            "ONE_LINE_IN": str(one_in),
            "LINES_SEED": str(campaign.seed),
        }
        # Each of some hundred attempts may start a daemon, and a busy machine takes its time for that.
        with running([sys.executable, program_path(name)], place, **variables) as program:
            out, err = program.communicate(timeout=500)
        assert program.returncode == 0, err[-6000:]
        found = json.loads(out)
        campaign.counts["faults tried"] += found["lines"]
        # Each thread that loads ahead has a connection of its own.
        assert isinstance(found["left open"], int), found
        return found, err

    return run


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["interrupt_at_every_line", "compile_at_every_line"], ids=["interrupted", "compiled there"]
)
def test_at_every_line(place, run, one_in, name):
    place.start_daemon()
    found, err = run(name)
    # Some of them are met in every version: keys, client, connection, protocol, queue.
    assert found["lines"] > 100 // one_in
    # It does not wait for itself, nor for a timeout.
    assert found.get("longest wait", 0) < 4
    assert err == ""


@pytest.mark.thorough
def test_an_interrupt_while_it_is_switched_on_comes_out_at_the_next_compile(run, one_in):
    found, _ = run("interrupt_where_it_is_switched_on")
    assert found["lines"] > 30 // one_in
