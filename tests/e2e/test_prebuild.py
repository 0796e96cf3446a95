"""``xcache.prebuild`` and ``xcache prebuild``: the calls that were named hit."""

from __future__ import annotations

import json

import pytest
from support.cluster import dask_cluster
from support.command_line import Shell
from support.marks import further, thorough

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = """
import inspect, json, os, sys
import jax, jax.numpy as jnp, numpy as np, xcache
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

@jax.jit
def serve(weights, x, *, scale=None):
    y = jnp.tanh(x @ weights["w"])
    return y if scale is None else y * scale

@jax.jit
def told(x):
    return jax.pure_callback(lambda y: np.asarray(y) + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

S = jax.ShapeDtypeStruct
weights = {"w": S((8, 8), np.float32)}
whole = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
specs = [(weights, S((size, 8), np.float32)) for size in (1, 2, 4, 4)]
specs.append(inspect.signature(serve.__wrapped__).bind(weights, S((2, 8), np.float32), scale=S((), np.float32)))
specs.append(({"w": S((8, 8), np.float32)}, S((4, 8), np.float32, sharding=whole)))
found = [xcache.prebuild(serve, *specs, workers=2), xcache.prebuild(told, (S((3,), np.float32),))]
before = xcache.stats()
w = {"w": np.eye(8, dtype=np.float32)}
results = [serve(w, np.full((size, 8), 0.5, np.float32)) for size in (1, 2, 4)]
results.append(serve(w, np.full((2, 8), 0.5, np.float32), scale=np.float32(2)))
results.append(serve(w, jax.device_put(np.full((4, 8), 0.5, np.float32), whole)))
results.append(told(np.zeros(3, np.float32)))
after = xcache.stats()
print(json.dumps({
    "found": [each._asdict() for each in found],
    "hits": after.hits - before.hits,
    "misses": after.misses - before.misses,
    "results": [np.asarray(each).round(4).tolist() for each in results],
}))
"""
MODULE = """
import jax, jax.numpy as jnp

@jax.jit
def serve(weights, x, *, scale=None):
    y = jnp.tanh(x @ weights["w"])
    return y if scale is None else y * scale

def plain(x):
    return x
"""
TOML = """
[[calls]]
arguments = [{w = "float32[8,8]"}, "f32[2,8]"]
[[calls]]
arguments = [{w = "float32[8,8]"}, "float32[4,8]"]
keywords = {scale = "f32[]"}
"""
USES = """
import numpy as np, xcache, serving
w = {"w": np.eye(8, dtype=np.float32)}
serving.serve(w, np.ones((2, 8), np.float32))
serving.serve(w, np.ones((4, 8), np.float32), scale=np.float32(1))
print(xcache.stats().hits, xcache.stats().misses)
"""
NOWHERE = """
import jax, numpy as np, serving, xcache
specs = [({"w": jax.ShapeDtypeStruct((8, 8), np.float32)}, jax.ShapeDtypeStruct((2, 8), np.float32))]
print(xcache.prebuild(serving.serve, *specs, dask="tcp://127.0.0.1:9"))
"""


def ran(place, **environment: str) -> dict:
    environment = {"XCACHE": "1", "JAX_PLATFORMS": "cpu"} | environment
    done = place.run(PROGRAM, XLA_FLAGS="--xla_force_host_platform_device_count=2", **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_calls_hit_after_they_were_prebuilt(place):
    cold = ran(place)
    assert cold["found"][0] == {"built": 5, "there": 0, "here": 0, "failed": []}
    # Only this process has the function that it calls.
    assert cold["found"][1] == {"built": 0, "there": 0, "here": 1, "failed": []}
    assert (cold["hits"], cold["misses"]) == (5, 0)
    warm = ran(place)
    assert warm["found"][0] == {"built": 0, "there": 5, "here": 0, "failed": []}
    assert (warm["hits"], warm["results"]) == (5, cold["results"])
    assert warm["results"] == ran(place, XCACHE="0")["results"]


@pytest.mark.parametrize("mode", thorough(["0", "readonly"], usual=["0"]))
def test_without_a_cache_to_store_in_nothing_is_done_and_a_line_says_so(place, mode):
    done = place.run(PROGRAM, XCACHE=mode, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["found"]
    assert found == [{"built": 0, "there": 0, "here": 0, "failed": []}] * 2
    assert done.stderr.count("prebuild() compiles nothing") == 1


def test_the_command_compiles_what_a_file_lists(place):
    (place.root / "serving.py").write_text(MODULE)
    (place.root / "calls.toml").write_text(TOML)
    shell = Shell(place)
    shell.env |= {"PYTHONPATH": str(place.root), "JAX_PLATFORMS": "cpu"}
    done = shell.run("prebuild", "serving:serve", "--spec", str(place.root / "calls.toml"), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    text = shell.say("prebuild", "--help")
    assert all(f'"{name}"' in text for name in told)
    assert (told["calls"], told["built"], told["there"], told["here"], told["failed"]) == (2, 2, 0, 0, [])
    used = place.run(USES, XCACHE="1", JAX_PLATFORMS="cpu")
    assert used.stdout == "2 0\n", used.stderr


@pytest.mark.thorough
@pytest.mark.once
def test_a_cluster_compiles_what_a_file_lists(place):
    (place.root / "serving.py").write_text(MODULE)
    (place.root / "calls.toml").write_text(TOML)
    shell = Shell(place)
    shell.env |= {"PYTHONPATH": str(place.root), "JAX_PLATFORMS": "cpu"}
    with dask_cluster(place, workers=1) as cluster:
        command = ("prebuild", "serving:serve", "--spec", str(place.root / "calls.toml"), "--dask", cluster.address)
        told = json.loads(shell.run(*command, "--json").stdout)
        assert (told["built"], told["failed"]) == (2, [])
        assert len(cluster.begun()) == 2
    used = place.run(USES, XCACHE="1", JAX_PLATFORMS="cpu")
    assert used.stdout == "2 0\n", used.stderr


@pytest.mark.thorough
def test_a_cluster_that_is_not_there_does_not_stop_a_program(place):
    (place.root / "serving.py").write_text(MODULE)
    (place.root / "calls.json").write_text('{"calls": [{}]}')
    done = place.run(NOWHERE, XCACHE="1", JAX_PLATFORMS="cpu")
    assert (done.returncode, done.stdout) == (0, "Prebuilt(built=1, there=0, here=0, failed=())\n")
    assert "no Dask scheduler answers at tcp://127.0.0.1:9" in done.stderr
    assert "prebuild() compiles on this machine" in done.stderr
    shell = Shell(place)
    shell.env |= {"PYTHONPATH": str(place.root), "JAX_PLATFORMS": "cpu"}
    command = ("prebuild", "serving:serve", "--spec", str(place.root / "calls.json"), "--dask", "tcp://127.0.0.1:9")
    done = shell.run(*command)
    assert done.returncode == 1
    assert done.stderr.startswith("xcache: no Dask scheduler answers at tcp://127.0.0.1:9")


@pytest.mark.thorough
@pytest.mark.once
def test_the_command_compiles_in_its_own_process_where_programs_may_not(place):
    (place.root / "calling.py").write_text(
        "import jax\n"
        "back = jax.jit(lambda v: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((3,), 'float32'), v))\n"
    )
    (place.root / "calls.json").write_text('{"calls": [{"arguments": ["f32[3]"]}]}')
    shell = Shell(place)
    shell.env |= {"PYTHONPATH": str(place.root), "JAX_PLATFORMS": "cpu"}
    shell.env |= {"XCACHE": "1", "XCACHE_ON_MISS": "fail", "XCACHE_ON_MISS_AFTER": "0"}
    done = shell.run("prebuild", "calling:back", "--spec", str(place.root / "calls.json"), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["here"] == 1


@pytest.mark.parametrize(
    ("function", "content", "said"),
    [
        ("serving", "[]", "not of the form MODULE:FUNCTION"),
        *further(
            ("serving:nothing", '{"calls": [{}]}', "serving has no nothing"),
            ("nowhere:serve", '{"calls": [{}]}', "nowhere cannot be imported"),
            ("serving:plain", '{"calls": [{}]}', "is not a jitted function"),
        ),
        ("serving:serve", "{", "is not JSON"),
        *further(
            ("serving:serve", "{}", "lists no calls"),
            ("serving:serve", '{"calls": [3]}', "call 1 in"),
            ("serving:serve", '{"calls": [{"arguments": ["float33[2]"]}]}', "jax knows no type float33"),
            ("serving:serve", '{"calls": [{"arguments": ["f32[2]"]}]}', "jax cannot trace a call of serving:serve"),
        ),
    ],
)
def test_a_wrong_call_is_one_sentence(place, function, content, said):
    (place.root / "serving.py").write_text(MODULE)
    (place.root / "calls.json").write_text(content)
    shell = Shell(place)
    shell.env |= {"PYTHONPATH": str(place.root), "JAX_PLATFORMS": "cpu"}
    done = shell.run("prebuild", function, "--spec", str(place.root / "calls.json"))
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
