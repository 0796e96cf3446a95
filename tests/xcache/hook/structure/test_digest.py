"""Programs that lower to something else have another structure; the same program written anew has the same."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

X = np.ones((8, 8), np.float32)
C = np.arange(64.0, dtype=np.float32).reshape(8, 8)


def scaled(by: Any) -> Any:
    """Return a function made anew at each call, as a second run of the program makes it."""
    return lambda x: jnp.sin(x) * by


def test_the_same_program_made_twice_has_one_structure(structures):
    assert structures.of(scaled(2.0), X) == structures.of(scaled(2.0), X)


def scanned(**options: Any) -> Any:
    return lambda x: lax.scan(lambda c, a: (c + a, c), x[0], x, **options)


def normal(seed: int) -> Any:
    return lambda x: jax.random.normal(jax.random.key(seed), (4,)) + x.sum()


def bits(implementation: str) -> Any:
    return lambda x: jax.random.bits(jax.random.key(0, impl=implementation), (4,))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (jnp.sin, jnp.cos),
        (scaled(2.0), scaled(3.0)),
        (scaled(0.0), scaled(-0.0)),
        (lambda x: x + C, lambda x: x + (C + 1)),
        (lambda x: x + C, lambda x: x + C.T),
        (lambda x: x + C, lambda x: x + C.astype(np.float16)),
        (lambda x: x + np.ones((8, 8), "f"), lambda x: x + np.broadcast_to(np.float32(1), (8, 8))),
        # An axis of one element that numpy has added has the stride zero, too.
        (lambda x: x + np.ones(8, "f")[None], lambda x: x + np.ones((1, 8), "f")),
        (lambda x: x @ x, lambda x: jnp.dot(x, x, precision="highest")),
        (lambda x: {"a": x}, lambda x: {"b": x}),
        (scanned(), scanned(unroll=2)),
        (scanned(), scanned(reverse=True)),
        (lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), lambda x: lax.cond(x.sum() > 0, jnp.cos, jnp.sin, x)),
        (lambda x: jnp.sum(x, axis=0), lambda x: jnp.sum(x, axis=1)),
        (lambda x: lax.sort(x, dimension=0), lambda x: lax.sort(x, dimension=0, is_stable=False)),
        (lambda x: lax.reduce_precision(x, 5, 3), lambda x: lax.reduce_precision(x, 5, 4)),
        (normal(0), normal(1)),
        (bits("rbg"), bits("threefry2x32")),
        (jax.grad(lambda x: jnp.sin(x).sum()), jax.grad(lambda x: jnp.cos(x).sum())),
    ],
)
def test_another_program_has_another_structure(structures, one, other):
    # One name for both, because the name of a function is in its module.
    assert structures.of(lambda x: one(x), X) != structures.of(lambda x: other(x), X)


def test_arguments_count(structures):
    def function(x, y=None):
        return x * 2

    wide = np.ones((8, 16), np.float32)
    found = [
        structures.of(function, X),
        structures.of(function, wide),
        structures.of(function, X.astype(np.int32)),
        structures.of(function, X, donate_argnums=0),
        structures.of(function, X, X, keep_unused=True),
        structures.of(function, 1.0),
        structures.of(function, np.float32(1.0)),
    ]
    assert len(set(found)) == len(found)


def test_an_axis_left_to_the_compiler_counts(structures):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))

    def constrained(axis):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis))
        return lambda x: lax.with_sharding_constraint(x, sharding)

    axes = (None, "x", jax.sharding.PartitionSpec.UNCONSTRAINED)
    found = [structures.of(constrained(axis), X) for axis in axes]
    assert len({*found}) == 3
    assert not any(each.startswith("<") for each in found)


def kernel(line: int) -> Any:
    """Return a function that calls a kernel which is written at this line."""
    from jax.experimental import pallas

    made: dict[str, Any] = {}
    source = "\n" * line + "def kernel(a, out): out[...] = a[...] + 1"
    exec(compile(source, "kernels.py", "exec"), made)  # noqa: S102 - the same kernel at any line
    return pallas.pallas_call(made["kernel"], jax.ShapeDtypeStruct(X.shape, X.dtype), interpret=True)


def test_where_a_kernel_was_written_counts_only_where_jax_embeds_it(structures):
    from jax._src import cache_key

    calls = [kernel(line) for line in (1, 1, 1, 2)]
    # Lowering the first one has jax import modules, whose settings count from then on.
    _, one, same, other = [structures.of(lambda x, call=call: call(x), X) for call in calls]
    assert one == same
    assert not one.startswith("<")
    assert (one == other) == hasattr(cache_key, "_strip_mosaic_debug_info")


def test_the_function_s_name_counts(structures):
    def first(x):
        return x

    def second(x):
        return x

    assert structures.of(first, X) != structures.of(second, X)


def test_one_inner_function_used_twice_differs_from_two_equal_ones(structures):
    def inner():
        return jax.jit(lambda x: jnp.sin(x) * 2)

    one, another = inner(), inner()
    assert structures.of(lambda x: one(x) + one(x), X) != structures.of(lambda x: one(x) + another(x), X)


def test_one_constant_used_twice_differs_from_two_equal_ones(structures):
    one, another = C.copy(), C.copy()
    assert structures.of(lambda x: (x + one) * one, X) != structures.of(lambda x: (x + one) * another, X)


def test_where_a_function_was_written_does_not_count(structures):
    here = {}
    for lines in ("", "\n\n\n"):
        exec(f"{lines}def function(x):\n    return x * 3", here)  # noqa: S102
        here.setdefault("first", structures.of(here["function"], X))
    assert here["first"] == structures.of(here["function"], X)


@pytest.mark.parametrize("name, value", [("jax_default_matmul_precision", "highest"), ("jax_enable_x64", True),
                                         ("jax_threefry_partitionable", False),
                                         ("jax_numpy_rank_promotion", "warn")])  # fmt: skip
def test_the_configuration_counts(structures, name, value):
    before = structures.of(lambda x: x * 3, X)
    old = getattr(jax.config, name)
    if old == value:
        pytest.fail("the test changes nothing")
    jax.config.update(name, value)
    try:
        assert structures.of(lambda x: x * 3, X) != before
    finally:
        jax.config.update(name, old)
    assert structures.of(lambda x: x * 3, X) == before


def test_where_jax_logs_does_not_count(structures):
    before = structures.of(lambda x: x * 3, X)
    with jax.log_compiles(False):
        assert structures.of(lambda x: x * 3, X) == before


def callback(x):
    return jax.pure_callback(lambda value: value, x, x)


def test_a_program_that_calls_back_has_to_be_lowered(structures):
    assert structures.of(callback, X).startswith("<callable outside jax: ")


def test_several_platforms_have_to_be_lowered(structures):
    with pytest.raises(structures.Noted):
        jax.jit(lambda x: x).trace(X).lower(lowering_platforms=("cpu", "tpu"))
    assert structures.met == ["<several platforms>"]


def test_constants_that_can_change_are_told(structures):
    changing = C.copy()
    found = structures.all_of(lambda x: x + changing, X)
    assert not isinstance(found, str), found
    assert any(each is changing or np.shares_memory(each, changing) for each in found.constants)


def test_a_kernel_that_is_printed_has_to_be_lowered(structures):
    from jax.experimental import pallas

    def kernel(read, written):
        written[...] = read[...] * 2

    def call(x, *, debug):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(kernel, out_shape=shape, interpret=True, debug=debug)(x)

    assert not structures.of(functools.partial(call, debug=False), X).startswith("<")
    assert structures.of(functools.partial(call, debug=True), X) == "<kernel that is printed while it is lowered>"
