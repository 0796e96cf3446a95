"""Programs give the same results without xcache, cold and warm; and what can be cached is compiled once."""

from __future__ import annotations

import os

import jax
import pytest
from support.marks import thorough
from support.programs import FOUR_DEVICES, NEEDS, PROGRAMS, SHARDED, SHORT, SORT, TOP_K, run

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3])
OLD_CALLBACKS = VERSION < (0, 11)
UNCACHEABLE = {
    "laid out": {"result layouts that this jaxlib forgets": 1} if (0, 8) <= VERSION < (0, 9, 2) else {},
    "callback": {"python callback": 1} if OLD_CALLBACKS else {},
    "partitioned": {"custom_partitioning": 1},
    "inspected": {"inspect_array_sharding": 1},
}
# The others have nothing more that lowering reads.
CHECKED = ("plain", "exported", "sharded", "laid out")


@pytest.mark.parametrize("name", thorough(PROGRAMS, usual=["plain", "sharded"]))
def test_a_program_is_the_same_off_cold_and_warm_and_whether_it_is_lowered_or_not(place, name):
    if name == "nested" and VERSION < (0, 8):
        pytest.skip("this jax cannot evaluate it")
    needs = NEEDS.get(name, {})
    off = run(place, PROGRAMS[name], mode=None, **needs)
    cold, warm = (run(place, PROGRAMS[name], XCACHE_LOWERING="skip", **needs) for _ in range(2))
    checked = [run(place, PROGRAMS[name], XCACHE_LOWERING="check", **needs)] if name in CHECKED else []
    assert off.stats["requests"] == 0
    for ran in (cold, warm, *checked):
        assert ran.result == off.result
        assert ran.complaints == off.complaints
        uncacheable = ran.stats["uncacheable"]
        assert ran.stats["errors"] == {}
        assert ran.stats["hits"] + ran.stats["misses"] + sum(uncacheable.values()) == ran.stats["requests"] > 0
        assert not {"contradiction", "error"} & ran.stats["lowerings"].keys()
        assert ran in checked or "checked" not in ran.stats["lowerings"]
    assert warm.stats["uncacheable"] == UNCACHEABLE.get(name, warm.stats["uncacheable"])
    # A program may well compile the same thing twice.
    assert cold.stats["misses"] > 0 or cold.stats["uncacheable"]
    assert warm.stats["misses"] == 0
    if cold.stats["lowerings"].get("no alias"):
        assert warm.stats["lowerings"]["skipped"] > 0
        assert all(ran.stats["lowerings"]["checked"] > 0 for ran in checked)


@pytest.mark.parametrize(
    ("program", "compiles"), [(SORT, 1), pytest.param(TOP_K, 3, marks=pytest.mark.thorough)], ids=["sort", "top_k"]
)
def test_a_sort_is_stored_although_it_cannot_be_serialized_once_it_has_run(place, program, compiles):
    off = run(place, program, mode=None)
    cold = run(place, program)
    warm = run(place, program)
    assert off.result == cold.result == warm.result
    assert off.complaints == cold.complaints == warm.complaints
    assert (warm.stats["hits"], warm.stats["requests"], warm.stats["uncacheable"]) == (compiles, compiles, {})


@pytest.mark.thorough
def test_custom_partitioning_is_cached_when_the_user_says_its_pointer_does_not_count(place):
    allowed = FOUR_DEVICES | {"JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "1"}
    cold = run(place, PROGRAMS["partitioned"], **allowed)
    warm = run(place, PROGRAMS["partitioned"], **allowed)
    assert cold.result == warm.result
    assert (warm.stats["misses"], warm.stats["uncacheable"]) == (0, {})


@pytest.mark.thorough
@pytest.mark.once
def test_the_surroundings_that_do_not_count(place):
    surroundings = (
        {"PYTHONHASHSEED": "7"},
        {"XLA_FLAGS": "--xla_dump_hlo_pass_re=none --xla_force_host_platform_device_count=1"},
        {"JAX_COMPILATION_CACHE_DIR": "/nonexistent/xcache-not-used"},
        {"PYTHONOPTIMIZE": "1", "HOME": "/"},
    )
    run(place, SHORT)
    for elsewhere in surroundings:
        warm = run(place, "# further down\n" * 30 + SHORT, **elsewhere)
        assert (warm.stats["misses"], warm.stats["errors"]) == (0, {}), elsewhere


@pytest.mark.thorough
def test_the_surroundings_that_do(place):
    surroundings = (
        {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"},
        {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"},
        {"PJRT_NPROC": "1"},
        # XLA has a thread for each of them.
        FOUR_DEVICES,
        {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        {"JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "1"},
    )
    run(place, "out = listed(jax.jit(lambda v: v * 2)(x))")
    for elsewhere in surroundings:
        other = run(place, "out = listed(jax.jit(lambda v: v * 2)(x))", **elsewhere)
        assert (other.stats["hits"], other.stats["errors"]) == (0, {}), elsewhere


PINNED = """
import os
{pin}
import jax, numpy as np, xcache
jax.jit(lambda v: v * 2)(np.ones((8, 4), np.float32))
print(xcache.stats().hits)
"""


@pytest.mark.thorough
@pytest.mark.once
def test_the_number_of_processors_a_program_may_use_counts(place):
    first, again, pinned = (
        place.run(PINNED.format(pin=pin), XCACHE="1").stdout.strip()
        for pin in ("", "", "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})")
    )
    assert (first, again) == ("0", "1")
    assert pinned == ("0" if len(os.sched_getaffinity(0)) > 1 else "1")


@pytest.mark.thorough
def test_another_order_of_devices_is_another_program(place):
    run(place, SHARDED, **FOUR_DEVICES)
    turned = run(place, SHARDED.replace("np.array(jax.devices())", "np.array(jax.devices()[::-1])"), **FOUR_DEVICES)
    assert turned.stats["misses"] >= 2
