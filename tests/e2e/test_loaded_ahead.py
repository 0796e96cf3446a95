"""Real programs whose executables are loaded before they ask for them."""

from __future__ import annotations

import json
import os

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="nothing is loaded ahead on one processor"),
]

PROGRAM = """
import json, os, sys, time
import jax, jax.numpy as jnp, numpy as np, xcache
from xcache import prefetch
from xcache.cache import current
# On a machine that is busy everything takes long.
prefetch._ON_TRUST_SECONDS = 1000.0
x = np.arange(64, dtype=np.float32).reshape(8, 8)
expected = lambda k: (x * k + 1).sum()
jax.devices()
{first}
results = [float(jax.jit(lambda v, k=k: (v * k + 1).sum())(x)) for k in {numbers}]
assert results == [float(expected(k)) for k in {numbers}]
{last}
s = xcache.stats()
print(json.dumps({{"hits": s.hits, "misses": s.misses, "prefetched": s.prefetched, "errors": s.errors}}))
"""
# Until everything that is foreseen is loaded: then nothing depends on who is faster.
WAIT = """
prefetcher = current()._prefetcher
deadline = time.monotonic() + 30
while prefetcher._predictions and time.monotonic() < deadline:
    places = list(prefetcher._places.values())
    if len(places) >= {count} and all(place.done for place in places): break
    time.sleep(0.01)
"""


def run(place, numbers=range(6), first="", last="", name="program.py", **environment):
    path = place.root / name
    path.write_text(PROGRAM.format(numbers=list(numbers), first=first, last=last))
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, path],
        env=place.env | {"XCACHE": "1", "JAX_PLATFORMS": "cpu"} | environment,
        cwd=place.root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert said.pop("errors") == {}
    return said


def test_the_second_run_finds_everything_loaded(place):
    assert run(place) == {"hits": 0, "misses": 6, "prefetched": 0}
    assert run(place, first=WAIT.format(count=6)) == {"hits": 6, "misses": 0, "prefetched": 6}
    assert run(place, XCACHE_PREFETCH="0") == {"hits": 6, "misses": 0, "prefetched": 0}


def test_a_renamed_program_is_known_by_what_it_asks_for(place):
    run(place)
    said = run(place, name="renamed.py", numbers=[0], last=WAIT.format(count=5))
    assert said == {"hits": 1, "misses": 0, "prefetched": 0}
    again = "results += [float(jax.jit(lambda v, k=k: (v * k + 1).sum())(x)) for k in range(1, 6)]"
    said = run(place, name="renamed again.py", numbers=[0], last=WAIT.format(count=5) + again)
    assert said["hits"] == 6
    assert said["prefetched"] == 5


def test_a_program_that_changed_completely_is_right_all_the_same(place):
    run(place)
    assert run(place, numbers=range(100, 106), first=WAIT.format(count=6)) == {
        "hits": 0,
        "misses": 6,
        "prefetched": 0,
    }
    # What it wants now is what is foreseen from here on.
    assert run(place, numbers=range(100, 106), first=WAIT.format(count=6))["prefetched"] == 6
    # And if it changes back, as soon as it has asked for something.
    again = "results += [float(jax.jit(lambda v, k=k: (v * k + 1).sum())(x)) for k in range(1, 6)]"
    said = run(place, numbers=[0], first=WAIT.format(count=6), last=WAIT.format(count=6 + 5) + again)
    assert said == {"hits": 6, "misses": 0, "prefetched": 5}


def test_a_renamed_program_is_known_by_its_name_from_then_on(place):
    run(place)
    run(place, name="renamed.py")
    assert run(place, name="renamed.py", first=WAIT.format(count=6))["prefetched"] == 6


def test_what_was_loaded_ahead_serializes_to_what_can_be_run(place):
    run(place, numbers=[3])
    last = """
from jax.experimental import serialize_executable as s
compiled = jax.jit(lambda v: (v * 3 + 1).sum()).lower(x).compile()
assert float(s.deserialize_and_load(*s.serialize(compiled))(x)) == expected(3)
"""
    run(place, numbers=[], last=last)
    said = run(place, numbers=[], first=WAIT.format(count=1), last=last)
    assert said["prefetched"] >= 1


def test_what_was_made_with_other_flags_is_not_loaded(place):
    run(place)
    first = """
deadline = time.monotonic() + 30
while current()._prefetcher._places and time.monotonic() < deadline: time.sleep(0.01)
assert not current()._prefetcher._places
"""
    said = run(place, first="time.sleep(1)" + first, XLA_FLAGS="--xla_cpu_enable_fast_math=true")
    assert said == {"hits": 0, "misses": 6, "prefetched": 0}


def test_children_and_threads_of_a_program_are_right(place):
    run(place)
    last = """
import threading
from concurrent.futures import ThreadPoolExecutor
jax.clear_caches()
with ThreadPoolExecutor(6) as pool:
    assert list(pool.map(lambda k: float(jax.jit(lambda v: (v * k + 1).sum())(x)), range(6))) == results
"""
    said = run(place, last=last)
    assert said["misses"] == 0


def test_a_program_that_ends_at_once_ends_well(place):
    run(place, numbers=range(30))
    for _ in range(3):
        assert run(place, numbers=[])["misses"] == 0
        said = run(place, numbers=[0, 1], last="os._exit(0) if False else None")
        assert said["hits"] == 2
