"""The threads a CPU client was made with are known, whatever has changed since, and are in its keys."""

from __future__ import annotations

import json

import pytest
from support.program_files import program_text

from xcache.keys import cpu_clients


def test_each_client_of_a_process_has_the_threads_it_was_made_with(place):
    result = place.run(program_text("make_cpu_clients"))
    found = json.loads(result.stdout or "{}")
    wanted = [1, 5, 7, 3, 1, 256, 4]
    assert found["known"] == found["asked"] == wanted, result.stderr
    # XLA named its threads from 0.8 on; without names it is asked.
    assert all(threads in (None, right) for threads, right in zip(found["watched"], wanted, strict=True))
    assert found["watched"][-1] is None
    # The first and the fifth are alike.
    assert found["described"] == len(wanted) - 1


@pytest.mark.parametrize("raw", [b"", b"\x01", b"\xff" * 40, b"\x0a\x02\x0a\x00", bytes(100)])
def test_an_executable_of_another_form_says_nothing(raw):
    assert cpu_clients._threads_in(raw) is None


_CODE = """
import os, sys
{before}
import jax, jax.numpy as jnp, xcache
jax.devices()
{after}
jax.jit(lambda x: jnp.cumsum(x * 2)).lower(jax.ShapeDtypeStruct((100_000,), jnp.float32)).compile()
print(xcache.stats().hits)
"""


def hits(place, before: str = "", after: str = "") -> int:
    result = place.run(_CODE.format(before=before, after=after), XCACHE="1")
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_program_whose_client_has_other_threads_finds_nothing_of_the_others(place):
    """The environment is the same when the keys are made, the clients are not."""
    set_now = "os.environ['PJRT_NPROC'] = '7'"
    assert hits(place, before=set_now) == 0
    # XLA has made the client by then.
    assert hits(place, after=set_now) == 0
    assert hits(place) == 1
    assert hits(place, before=set_now, after="del os.environ['PJRT_NPROC']") == 1


@pytest.mark.thorough
@pytest.mark.slow
def test_the_number_of_virtual_devices_counts(place):
    """XLA makes a thread for each device, and cuts loops into as many parts."""
    counts = ["os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'", ""]
    counts.append("import jax; jax.config.update('jax_num_cpu_devices', 9)")
    assert [hits(place, before=count) for count in counts] == [0, 0, 0]
    assert [hits(place, before=count) for count in counts] == [1, 1, 1]


@pytest.mark.slow
def test_the_clients_of_one_process_are_kept_apart(place):
    """Nobody watched how these were made: XLA is asked."""
    first, second = (place.run(program_text("compile_for_three_clients")) for _ in range(2))
    assert second.stdout.strip() == "3", second.stderr
    # The third may come before the first is stored.
    assert first.stdout.strip() in ("0", "1"), first.stderr
