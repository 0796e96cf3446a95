"""Threads of one program that compile at the same time."""

from __future__ import annotations

import pytest
from support.program_files import program_text


@pytest.mark.thorough
def test_the_first_threads_to_iterate_over_devices_do_not_meet(place):
    for _ in ("cold", "warm"):
        # No other threads: while one of them collects, none is collected here.
        result = place.run(program_text("compile_where_devices_are_listed"), XCACHE="1", XCACHE_PREFETCH="0")
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout == f"{[28.0 * k + 8 for k in range(12)]}\n"


@pytest.mark.thorough
def test_a_program_with_small_stacks_gives_xcache_usual_ones(place):
    ran = [place.run(program_text("compile_with_small_stacks"), XCACHE=mode) for mode in ("0", "1", "1")]
    assert {(each.returncode, each.stdout, each.stderr) for each in ran} == {(0, ran[0].stdout, "")}
