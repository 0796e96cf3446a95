"""A program keeps no descriptor for an executable it has loaded, and can serialize it at any time."""

from __future__ import annotations

import json

import pytest
from support.marks import thorough
from support.program_files import program_text

PROGRAM = program_text("hold_executables")


@pytest.mark.parametrize("prefetch", thorough(["0", "1G"], usual=["0"]))
def test_a_loaded_executable_keeps_no_descriptor(place, prefetch):
    assert place.run(PROGRAM, XCACHE="1", XCACHE_PREFETCH=prefetch).returncode == 0
    done = place.run(PROGRAM, XCACHE="1", XCACHE_PREFETCH=prefetch)
    assert done.returncode == 0, done.stderr[-3000:]
    hits, are_large, more = json.loads(done.stdout)
    assert (hits, are_large) == (12, True)
    # A second connection may have been opened meanwhile, and closed again, for another thread.
    assert more <= 2


@pytest.mark.thorough
def test_a_loaded_executable_can_be_serialized_after_xcache_was_switched_off(place):
    cold, warm = (place.run(program_text("serialize_after_disable"), XCACHE_TIMEOUT="60s") for _ in range(2))
    assert (cold.returncode, warm.returncode) == (0, 0), cold.stderr + warm.stderr
    (misses, expected), (hits, result) = cold.stdout.split(), warm.stdout.split()
    assert (misses, hits, result) == ("0", "1", expected)
