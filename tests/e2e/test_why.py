"""``xcache why`` names the one way in which a program has changed, says what to do, and where in the code it is."""

from __future__ import annotations

import json

import jax
import pytest
from support.command_line import Shell
from support.marks import thorough
from support.places import Place
from support.program_files import program_text

ON = {"XCACHE": "1", "PYTHONHASHSEED": "0"}
IN_ONE_PROCESS, ON_MESHES = program_text("change_in_many_ways"), program_text("change_meshes")
FOUR_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}

# Whether the program has shardings by the names of the mesh's axes.
HAS_NAMES = getattr(jax.config, "jax_use_shardy_partitioner", True)

# The way, and what must be said: of the difference, of what to do.
WAYS = {
    "shape": ("argument 0 (x) is f32[8,130] here, f32[8,128] in the stored program", "executable of its own"),
    "batch": ("2 arguments (x, y) differ in a dimension: 7 here, 32 in the stored program", "executable of its own"),
    "dtype": ("argument 0 (x) is bf16[8,8] here, f32[8,8] in the stored program", "executable of its own"),
    "number": ("is 0.01 here, 0.1 in the stored program", "Nothing else differs"),
    "weak": ("argument 1 is weakly typed in the stored program, but not here", "weakly typed"),
    "donated": ("argument 0 (x) is donated here, but not in the stored program", "donate_argnums"),
    "static": ("tanh", "a static argument"),
    "static_size": ("f32[65] here", "a static argument"),
    "compiler_option": (
        "xla_cpu_enable_fast_math (in compiler_options) is true here, false",
        "compiler_options of jax.jit",
    ),
    "precision": ("dot_general", "jax_default_matmul_precision"),
    "seed": ("is 1 here, 0 in the stored program", "Nothing else differs"),
    "small_seed": ("is 42 here, 0 in the stored program", "Nothing else differs"),
    "generator": ("", "the function itself does something else"),
    "dropout": ("", "the function itself does something else"),
    "key_kind": ("argument 1 is a random key of another kind: key<rbg>[] here, key<fry>[]", ""),
    "key_count": ("argument 1 (keys) is ui32[4,2] here, ui32[3,2] in the stored program", "executable of its own"),
    "raw_key": ("argument 1 is a random key in one program only: u32[2] here, key<fry>[]", "jax.random.PRNGKey"),
    "left_out": (
        "it has 1 argument here, 2 in the stored program (only there: values['bias'])",
        "a field that is None",
    ),
    "loop": ("is 7 here, 5 in the stored program", "length of jax.lax.scan"),
    "timestamp": ("a constant of type f32", "Nothing else differs"),
    "order": ("the same operations come in another order", "a dict that was filled in another order"),
    "array": ("a constant of type f32[8]", "An array that is built into the program"),
    "structure": ("it has 2 arguments here (only here: bias), 1 in the stored program", "a field that is None"),
    "result_name": ("only the name of result 0 has changed", "a new name costs one compile"),
    "inner_name": (
        "the names of inner functions have changed: leaky_relu here, leaky before",
        "costs one compile",
    ),
    "after": ("only the function's name has changed: jit_after here, jit_before before", "costs one compile"),
    "operation": ("cosine : f32[8,8]", "the function itself does something else"),
    "operands": ("subtract", "takes other values"),
    "device_count": ("it runs on 4 devices here, on 2 devices in the stored program", "Each mesh"),
    "mesh_shape": (
        ("its mesh is (x=2, y=2) here, (x=4, y=1) in the stored program", "Each mesh")
        if HAS_NAMES
        else ("argument 0 (a) has the sharding {devices=[2,1,2]", "the mesh in use")
    ),
    "sharding": (
        "argument 0 (a) has the sharding P('x', 'y') here, P('x', None) in the stored program"
        if HAS_NAMES
        else "argument 0 (a) has the sharding {devices=[2,2]<=[4]} here, {devices=[2,1,2]<=[4]",
        "jax.device_put",
    ),
}
MUST_NOT_MISS = ("same", "renamed_variable", "moved_line", "order_of_arguments")


def run(place: Place, program: str, **environment: str) -> None:
    result = place.run(program, **ON | environment)
    assert (result.returncode, result.stderr) == (0, "")


def why(place: Place, *arguments: str) -> dict[str, dict]:
    done = Shell(place).run("why", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return {miss["module_name"].removeprefix("jit_"): miss for miss in json.loads(done.stdout)["misses"]}


def changed_in(place: Place) -> dict[str, dict]:
    """Return the misses of programs of which everything was changed, by the way."""
    misses = {}
    for program, environment in ((IN_ONE_PROCESS, {}), (ON_MESHES, FOUR_DEVICES)):
        for changed in ("", "1"):
            run(place, program, CHANGED=changed, **environment)
        misses |= why(place)
    return misses


def said(miss: dict) -> str:
    return json.dumps(miss["differences"], indent=1)


def test_a_program_that_was_changed_in_one_way_is_told_that_way(place):
    """All is one test, because the programs take most of the time."""
    misses = changed_in(place)
    for way, (text, advice) in WAYS.items():
        differences = misses[way]["differences"]
        assert any(text in each["text"] for each in differences), said(misses[way])
        assert advice in " ".join(f"{each['text']} {each['advice']}" for each in differences), said(misses[way])
        # One change is not told as many.
        assert len([each for each in differences if each["advice"]]) == (way != "key_kind"), said(misses[way])
    for way in ("number", "seed", "timestamp", "array", "operation", "order", "precision", "operands"):
        function = IN_ONE_PROCESS.splitlines().index(f"def {way}(x, y):" if way == "operands" else f"def {way}(x):")
        within = range(function + 1, function + 5)
        assert any(f"(<string>:{line})" in said(misses[way]) for line in within), said(misses[way])
    assert misses.keys().isdisjoint(MUST_NOT_MISS)
    assert_a_stranger_can_read_it(Shell(place).run("why", "device_count").stdout)


def assert_a_stranger_can_read_it(shown: str) -> None:
    title, *_ = [line for line in shown.splitlines() if line.startswith("jit_device_count(")]
    assert "called at <string>:" in title
    assert "  - it runs on 4 devices here, on 2 devices in the stored program\n    Each mesh" in shown


ONE = """
import os, jax, jax.numpy as jnp
@jax.jit
def step(x, key):
    y = jnp.sort(x @ x.T)
    if os.environ.get("RANDOM"):
        y = y + jax.random.normal(key, y.shape)
    return y
step(jnp.ones((8, 8)), jax.random.key(0))
"""
# Changes of the surroundings: environment before and after, cause, text, advice.
SURROUNDINGS = {
    "x64": ({}, {"JAX_ENABLE_X64": "1"}, "other program", "f64[8,8] here", "jax_enable_x64"),
    "precision": ({}, {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}, "other program", "dot_general", "matmul_precision"),
    "random": (
        *({"RANDOM": "1"}, {"RANDOM": "1", "JAX_THREEFRY_PARTITIONABLE": "0"}),
        *("other program", "", "jax_threefry_partitionable"),
    ),
    "flag": (
        *({}, {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}, "other flags"),
        *("the flag --xla_cpu_enable_fast_math of XLA_FLAGS is true here, not set in the stored entry", "XLA_FLAGS"),
    ),
    "devices": (
        *({}, {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}, "other platform"),
        *(
            "the number of devices of the CPU client is 2 here, 1 in the stored entry",
            "xla_force_host_platform_device_count",
        ),
    ),
    "threads": ({"NPROC": "2"}, {"NPROC": "3"}, "other platform", "the number of threads", "NPROC"),
}


@pytest.mark.once
@pytest.mark.parametrize("way", thorough(SURROUNDINGS, usual=("flag",)))
def test_what_surrounds_a_program_is_told(place, way):
    before, after, cause, text, advice = SURROUNDINGS[way]
    run(place, ONE, **before)
    run(place, ONE, **after)
    miss = why(place, "step")["step"]
    assert miss["cause"] == cause
    assert any(text in each["text"] for each in miss["differences"]), said(miss)
    # A setting of jax is a difference of its own.
    assert advice in " ".join(f"{each['text']} {each['advice']}" for each in miss["differences"]), said(miss)


SET = """
import jax, jax.numpy as jnp
scales = {"alpha": 2.0, "beta": 3.0, "gamma": 4.0, "delta": 5.0}
@jax.jit
def step(x):
    for name in set(scales):
        x = jnp.tanh(x * scales[name])
    return x
step(jnp.ones((8, 8)))
"""


@pytest.mark.thorough
@pytest.mark.once
def test_the_order_of_a_set_is_told(place):
    run(place, SET, PYTHONHASHSEED="1")
    run(place, SET, PYTHONHASHSEED="2")
    (difference,) = why(place, "step")["step"]["differences"]
    assert "another order" in difference["text"]
    assert "a set" in difference["advice"]


@pytest.mark.thorough
@pytest.mark.once
def test_functions_without_names_are_told_apart_by_the_place_of_the_call(place):
    source = """
import os, jax, jax.numpy as jnp
one, other = eval(os.environ["SCALES"])
jax.jit(lambda x: x * one)(jnp.ones((8, 8)))
jax.jit(lambda x: x * other)(jnp.ones((8, 8)))
"""
    run(place, source, SCALES="2.0, 3.0")
    run(place, source, SCALES="4.0, 5.0")
    done = Shell(place).run("why", "--all")
    assert done.returncode == 0, done.stderr
    for values in ("4 here, 2 in", "5 here, 3 in"):
        assert f"{values} the stored program" in done.stdout


@pytest.mark.thorough
@pytest.mark.once
def test_the_nearest_of_many_shapes_is_compared(place):
    """The last one that was stored differs in everything, an earlier one in one size."""
    source = """
import os, jax, jax.numpy as jnp
@jax.jit
def step(x, y):
    return x @ y
for shapes in eval(os.environ["SHAPES"]):
    step(*map(jnp.ones, shapes))
"""
    run(place, source, SHAPES="[((8, 16), (16, 32)), ((5, 5), (5, 5)), ((2, 3), (3, 4))]")
    run(place, source, SHAPES="[((9, 16), (16, 32))]")
    (difference,) = why(place, "step")["step"]["differences"]
    assert difference["text"] == "argument 0 (x) is f32[9,16] here, f32[8,16] in the stored program"


@pytest.mark.thorough
@pytest.mark.once
def test_of_programs_that_are_as_near_one_with_the_same_devices_is_compared(place):
    """The last one that was stored differs in the number of devices, too."""
    run(place, ONE)
    run(place, ONE, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    run(place, ONE, JAX_DEFAULT_MATMUL_PRECISION="highest")
    difference, setting = why(place, "step")["step"]["differences"]
    assert "matmul_precision" in difference["advice"]
    assert setting["text"].startswith("jax_default_matmul_precision is highest here, and was None")
