"""The program component has what a program says, and not where it is written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib.mlir import ir

from xcache.errors import UncacheableError
from xcache.keys.program import canonical
from xcache.wire.hashing import digest

STEPS = {
    "sin": "x = jnp.sin(x)",
    "double": "x = x * 2.0",
    "triple": "x = x * 3.0",
    "shift": "x = x + 1.0",
    "cumsum": "x = jnp.cumsum(x)",
    "where": "x = jnp.where(x > 0, x, -x)",
    "dot": "x = x * jnp.dot(x, x)",
}
step_lists = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5)


def lowered(function, *arguments, **jit_options):
    return jax.jit(function, **jit_options).lower(*arguments).compiler_ir("stablehlo")


def of(module, *, keep_locations=False, ignore_partitioning_pointer=False, callbacks_hold_pointers=True) -> str:
    return digest(
        canonical(
            module,
            keep_locations=keep_locations,
            ignore_partitioning_pointer=ignore_partitioning_pointer,
            callbacks_hold_pointers=callbacks_hold_pointers,
        )
    )


def program(steps: list[str], *, file: str = "a.py", line: int = 0):
    """Lower a function with these steps, as if it were written in ``file`` after ``line`` empty lines."""
    source = "\n" * line + "def f(x):\n    " + "\n    ".join(STEPS[step] for step in steps) + "\n    return x\n"
    scope = {"jnp": jnp}
    exec(compile(source, file, "exec"), scope)  # noqa: S102 - where code says it is from is what is tested
    return scope["f"]


X = jax.ShapeDtypeStruct((4,), jnp.float32)


@settings(max_examples=25, deadline=None)
@given(step_lists, st.integers(0, 40))
def test_the_file_and_line_do_not_count(steps, line):
    here, there = lowered(program(steps), X), lowered(program(steps, file="/elsewhere/b.py", line=line), X)
    assert of(here) == of(there)
    # Unless the user asked jax for it.
    assert of(here, keep_locations=True) != of(there, keep_locations=True)


@settings(max_examples=40, deadline=None)
@given(step_lists, step_lists)
def test_the_operations_count(one, other):
    assert (of(lowered(program(one), X)) == of(lowered(program(other), X))) == (one == other)


def test_canonical_leaves_the_module_as_it_was():
    module = lowered(program(["sin", "dot"], file="kept.py"), X)
    before = module.operation.get_asm(enable_debug_info=True)
    of(module)
    assert module.operation.get_asm(enable_debug_info=True) == before
    assert "kept.py" in before


def base(x):
    return x * 2.0 + jnp.array([1.0, 2.0, 3.0, 4.0], x.dtype)


def another_constant(x):
    return x * 2.0 + jnp.array([1.0, 2.0, 3.0, 5.0], x.dtype)


base_name = base.__name__
another_constant.__name__ = base_name


@pytest.mark.parametrize(
    "other",
    [
        lambda: lowered(another_constant, X),
        lambda: lowered(base, jax.ShapeDtypeStruct((4,), jnp.bfloat16)),
        lambda: lowered(base, jax.ShapeDtypeStruct((1, 4), jnp.float32)),
        lambda: lowered(base, X, donate_argnums=0),
        lambda: lowered(base, X, keep_unused=True, in_shardings=_sharded()),
    ],
    ids=["constant", "dtype", "shape", "donation", "sharding"],
)
def test_everything_else_about_a_program_counts(other):
    assert of(other()) != of(lowered(base, X))


def _sharded():
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("d",)), P("d"))


def test_a_large_constant_counts_to_its_last_bit():
    ones = np.ones(100_000, np.float32)
    other = ones.copy()
    other[-1] = np.nextafter(np.float32(1), np.float32(2))

    def adding(constant):
        def f(x):
            return x + constant

        return lowered(f, jax.ShapeDtypeStruct((100_000,), jnp.float32))

    assert of(adding(ones)) == of(adding(ones.copy()))
    assert of(adding(ones)) != of(adding(other))


def test_a_python_callback_is_refused_where_it_holds_a_pointer():
    def f(x):
        return jax.pure_callback(lambda y: np.asarray(y) * 2, X, x)

    with pytest.raises(UncacheableError, match="python callback"):
        of(lowered(f, X))
    assert of(lowered(f, X), callbacks_hold_pointers=False)


PARTITIONED = """
func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
  %y = stablehlo.custom_call @CustomSPMDPartitioning(%x) {{backend_config = "{pointer}"}}
       : (tensor<4xf32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}}"""


def partitioned(pointer: str):
    module = lowered(base, X)
    with module.context:
        return ir.Module.parse(PARTITIONED.format(pointer=pointer))


def test_custom_partitioning_is_refused_unless_the_user_lets_its_pointer_be_ignored():
    one, other = partitioned("140001"), partitioned("140002")
    with pytest.raises(UncacheableError, match="custom_partitioning"):
        of(one)
    assert of(one, ignore_partitioning_pointer=True) == of(other, ignore_partitioning_pointer=True)
