"""Programs that start together compile everything once between them."""

from __future__ import annotations

import json

import pytest
from support.program_files import program_text
from support.together import SHORT_PROGRAM, begin, end

JOB = """
import dataclasses, json, os, sys, jax
jax.distributed.initialize(os.environ["COORDINATOR"], num_processes=2, process_id=int(os.environ["RANK"]))
import jax.numpy as jnp, numpy as np, xcache
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("d",))
rows = NamedSharding(mesh, P("d"))
x = jax.make_array_from_callback((8, 4), rows, lambda index: np.arange(32.0).reshape(8, 4)[index])
total = jax.jit(lambda v: (v * 2).sum(), out_shardings=NamedSharding(mesh, P()))(x)
local = jax.jit(lambda v: v * 3 + 1)(np.float32(2))
print(json.dumps([float(total), float(local), dataclasses.asdict(xcache.stats())]))
jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_four_programs_started_together_compile_everything_once(place):
    children = [begin(place, SHORT_PROGRAM, XCACHE_TIMEOUT="60s") for _ in range(4)]
    ended = [end(child) for child in children]
    assert len({json.dumps(result) for (result, _), _ in ended}) == 1
    stats = [stats for (_, stats), _ in ended]
    ((stored,),) = place.query("SELECT count(*) FROM entries")
    assert sum(each["misses"] for each in stats) == stored
    assert sum(each["hits"] for each in stats) == 3 * stored
    assert {stderr for _, stderr in ended} == {""}


@pytest.mark.thorough
@pytest.mark.once
def test_threads_of_one_program_compile_the_same_once(place):
    said, _ = end(begin(place, program_text("compile_the_same_in_five_threads"), XCACHE_TIMEOUT="60s"))
    assert said == [5, 1, 1, 4]


@pytest.mark.thorough
@pytest.mark.once
def test_processes_of_one_job_do_not_wait_for_each_other_and_each_finds_its_own_again(place, free_port):
    for expected_misses in (True, False):
        coordinator = f"127.0.0.1:{free_port()}"
        environment = {"COORDINATOR": coordinator, "XCACHE_TIMEOUT": "60s", "JAX_PLATFORMS": "cpu"}
        children = [begin(place, JOB, RANK=str(rank), **environment) for rank in range(2)]
        ended = [end(child)[0] for child in children]
        assert [said[:2] for said in ended] == [[992.0, 7.0]] * 2
        for *_, stats in ended:
            assert bool(stats["misses"]) is expected_misses
            assert stats["wait_seconds"] == 0
            assert stats["errors"] == {}
