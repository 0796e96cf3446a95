"""Compiling through jaxlib: the example of the documentation, and every form a program may have."""

from __future__ import annotations

import json
import textwrap

import pytest
from support.program_files import program_text

from xcache import direct

FORMS = program_text("compile_each_form")


def example() -> str:
    text = direct.__doc__ or ""
    return textwrap.dedent(text[text.index("    import jax") : text.index("(The example uses")])


@pytest.mark.thorough
def test_the_example_runs_and_hits_the_second_time(place):
    for hits in (0, 1):
        result = place.run(example() + "\nprint(xcache.stats().hits)")
        assert result.stdout.splitlines() == ["[0. 2. 4.]", str(hits)], result.stderr


def test_every_form_of_a_program(place):
    place.run(FORMS)
    hits, misses, errors = json.loads(place.run(FORMS).stdout)
    assert (hits, misses, errors) == (4, 0, {})


@pytest.mark.once
def test_a_program_that_asks_is_told_what_the_cache_did(place):
    assert place.run(example(), XCACHE_LOG="info").stderr == "xcache: 0 hits, 1 miss, 0.0 s saved\n"


@pytest.mark.thorough
@pytest.mark.once
def test_off_means_off(place):
    result = place.run(example() + "\nprint(xcache.stats().requests)", XCACHE="0")
    assert result.stdout.splitlines() == ["[0. 2. 4.]", "0"]
    assert not place.dir.exists()


@pytest.mark.once
def test_the_jaxlib_way_and_the_jax_way_share_statistics_and_daemon(place):
    source = example() + "\njax.jit(lambda v: v - 1)(jax.numpy.ones(3))\nprint(xcache.stats().requests)"
    result = place.run(source, XCACHE="1")
    assert int(result.stdout.splitlines()[1]) >= 3, result.stderr


def test_a_program_that_cannot_be_compiled_raises_what_jaxlib_raises(place):
    source = example().replace("stablehlo.add", "stablehlo.no_such_operation")
    result = place.run(source)
    assert result.returncode == 1
    assert "MLIRError" in result.stderr
