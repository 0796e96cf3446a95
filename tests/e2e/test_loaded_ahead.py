"""Real programs whose executables are loaded before they ask for them."""

from __future__ import annotations

import json
import os

import jax
import pytest
from support.command_line import Shell
from support.program_files import program_text

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="nothing is loaded ahead on one processor")

PROGRAM = """
import json, os, sys, threading, time
import jax, jax.numpy as jnp, numpy as np, xcache
from xcache.prefetch import prefetcher
# On a machine that is busy everything takes long.
prefetcher._ON_TRUST_SECONDS = 1000.0
prefetcher.processors.Processors.are_taken = lambda _: False
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
client = lambda: jax.devices()[0].client
is_loading = lambda: any(thread.name == "xcache-prefetch" for thread in threading.enumerate())
deadline = time.monotonic() + 30
while (is_loading() or len(client().live_executables()) < {count}) and time.monotonic() < deadline:
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


@pytest.mark.thorough
def test_a_program_that_may_not_sleep_is_not_told_of_threads(place):
    """Some tests have each call of time.sleep raise, to find those of the program."""
    source = """
import time
def refuse(seconds):
    raise RuntimeError("a sleep")
time.sleep = refuse
import jax, jax.numpy as jnp
for factor in range(5):
    jax.jit(lambda x: (x * factor).sum())(jnp.ones(8))
import xcache
print(xcache.stats().misses)
"""
    runs = [place.run(source, XCACHE="1", JAX_PLATFORMS="cpu") for _ in range(2)]
    assert [each.stderr for each in runs] == ["", ""]
    assert runs[1].stdout == "0\n"


def test_the_second_run_finds_everything_loaded(place):
    assert run(place) == {"hits": 0, "misses": 6, "prefetched": 0}
    assert run(place, first=WAIT.format(count=6)) == {"hits": 6, "misses": 0, "prefetched": 6}
    assert run(place, XCACHE_PREFETCH="0") == {"hits": 6, "misses": 0, "prefetched": 0}


@pytest.mark.slow
@pytest.mark.thorough
def test_a_program_that_changed_completely_is_right_all_the_same(place):
    run(place)
    assert run(place, numbers=range(100, 106), first=WAIT.format(count=6)) == {
        "hits": 0,
        "misses": 6,
        "prefetched": 0,
    }
    # The daemon predicts from now on what the program wanted this time.
    assert run(place, numbers=range(100, 106), first=WAIT.format(count=6))["prefetched"] == 6


@pytest.mark.thorough
@pytest.mark.slow
def test_a_renamed_program_is_known_by_its_name_from_then_on(place):
    run(place)
    run(place, name="renamed.py")
    assert run(place, name="renamed.py", first=WAIT.format(count=6))["prefetched"] == 6


@pytest.mark.thorough
def test_an_executable_loaded_ahead_serializes_to_one_that_runs(place):
    run(place, numbers=[3])
    last = """
from jax.experimental import serialize_executable as s
compiled = jax.jit(lambda v: (v * 3 + 1).sum()).lower(x).compile()
assert float(s.deserialize_and_load(*s.serialize(compiled))(x)) == expected(3)
"""
    run(place, numbers=[], last=last)
    said = run(place, numbers=[], first=WAIT.format(count=1), last=last)
    assert said["prefetched"] >= 1


@pytest.mark.thorough
@pytest.mark.slow
def test_entries_made_with_other_flags_are_not_loaded(place):
    run(place)
    first = WAIT.format(count=0) + "assert not client().live_executables()"
    said = run(place, first=first, XLA_FLAGS="--xla_cpu_enable_fast_math=true")
    assert said == {"hits": 0, "misses": 6, "prefetched": 0}


@pytest.mark.thorough
@pytest.mark.once
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


@pytest.mark.slow
@pytest.mark.thorough
def test_a_program_that_ends_at_once_ends_well(place):
    run(place, numbers=range(30))
    for _ in range(3):
        assert run(place, numbers=[])["misses"] == 0
        said = run(place, numbers=[0, 1], last="os._exit(0) if False else None")
        assert said["hits"] == 2


@pytest.mark.thorough
def test_a_program_that_clears_its_backends_gets_nothing_of_the_old_client(place):
    """An executable that was loaded for a client runs only on that client's devices."""
    run(place)
    first = f"""{WAIT.format(count=6)}
import gc, weakref
old = weakref.ref(jax.devices()[0].client)
from jax.extend.backend import clear_backends
clear_backends()
gc.collect()
assert old() is None, "the old client is still alive"
"""
    assert run(place, first=first) == {"hits": 6, "misses": 0, "prefetched": 0}


@pytest.mark.thorough
def test_jax_finds_no_client_leaked_when_it_clears_its_backends(place):
    """jax itself can look for that (``jax_debug_leaked_clients_on_clear_backends``)."""
    if not hasattr(jax.config, "jax_debug_leaked_clients_on_clear_backends"):
        pytest.skip("this jax does not look for leaked clients")
    run(place)
    first = f"""{WAIT.format(count=6)}
jax.config.update("jax_debug_leaked_clients_on_clear_backends", True)
from jax.extend.backend import clear_backends
clear_backends()
"""
    assert run(place, first=first)["hits"] == 6


# A client of the program's own beside jax's has devices of the same numbers.
ON_A_CLIENT = """
from jaxlib import xla_client
client = {client}
put = lambda v: jax.device_put(v, client.devices()[0])
for k in range(6):
    y = jax.jit(lambda v: (v * k + 1).sum())(put(x))
    assert [d.client is client for d in y.devices()] == [True]
    assert float(y) == expected(k)
"""


@pytest.mark.thorough
def test_a_client_of_the_program_s_own_gets_nothing_of_jax_s(place):
    run(place, numbers=[], first=ON_A_CLIENT.format(client="jax.devices()[0].client"))
    own = ON_A_CLIENT.format(client="xla_client.make_cpu_client()")
    assert run(place, numbers=[], first=WAIT.format(count=6) + own) == {"hits": 6, "misses": 0, "prefetched": 0}


@pytest.mark.thorough
@pytest.mark.once
def test_a_program_without_a_default_backend_waits_for_nothing(place):
    """Its compiles are for a client of its own: jax is never asked for a backend, and nothing is loaded ahead."""
    for expected in ("0 4 0", "4 0 0"):
        done = place.run(program_text("compile_without_a_default_backend"), JAX_PLATFORMS="cpu")
        assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr[-3000:]


REGISTER = program_text("register_a_foreign_call")
CALLED = """
is_set_up = True
jax.block_until_ready(jax.jit(lambda v: jax.ffi.ffi_call("particular", jax.ShapeDtypeStruct(v.shape, v.dtype))(v))(x))
assert instantiated and all(instantiated), instantiated
"""


@pytest.mark.thorough
@pytest.mark.once
def test_code_that_the_program_has_registered_does_not_run_before_it_is_asked_for(place):
    """Loading makes the state of such calls, from what may not be set up yet; it is cached all the same."""
    assert run(place, first=REGISTER, last=CALLED) == {"hits": 0, "misses": 7, "prefetched": 0}
    for _ in range(2):
        said = run(place, first=REGISTER + WAIT.format(count=6), last=CALLED)
        assert said == {"hits": 7, "misses": 0, "prefetched": 6}


@pytest.mark.thorough
@pytest.mark.once
def test_what_was_loaded_in_vain_is_in_the_run(place):
    run(place)
    run(place, numbers=range(5), first=WAIT.format(count=6))
    shell = Shell(place)
    shown = json.loads(shell.run("run", "--json").stdout)
    assert shown["outcomes"] == {"loaded ahead": 5, "not asked for": 1}
    (row,) = (each for each in shown["programs"] if each["outcome"] == "not asked for")
    assert [(span["stage"], span["thread"]) for span in row["spans"]] == [("load", "xcache-prefetch")]
    assert "5 programs: 5 loaded ahead; 1 more loaded ahead in vain" in shell.run("run").stdout
    assert shell.run("compare", shown["run"]).returncode == 0
