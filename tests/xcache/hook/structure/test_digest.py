"""Programs that lower to something else have another structure; the same program written anew has the same."""

from __future__ import annotations

import functools
import sys
import types
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
    structures.met.clear()
    jax.jit(lambda x: x).trace(X).lower(lowering_platforms=("cpu", "tpu"))
    assert structures.met == ["<several platforms>"]


def test_a_primitive_of_the_program_has_to_be_lowered(structures):
    from jax._src import core
    from jax._src.interpreters import mlir

    # It has the name of one of jax's.
    shadow = core.Primitive("sin")
    shadow.def_abstract_eval(lambda x: x)
    mlir.register_lowering(shadow, mlir.lower_fun(lambda x: jnp.cos(x), multiple_results=False))
    try:
        assert structures.of(lambda x: shadow.bind(x), X) == "<lowering rule outside jax: sin>"
        # Other programs do not use it.
        assert not structures.of(lambda x: x * 2, X).startswith("<")
    finally:
        del mlir._lowerings[shadow]


def test_a_rule_that_was_replaced_makes_all_be_lowered(structures):
    from jax._src.interpreters import mlir

    before = structures.of(lambda x: jax.nn.softmax(x), X)
    own = mlir._lowerings[lax.exp_p]
    mlir.register_lowering(lax.exp_p, mlir.lower_fun(lambda x, accuracy: jnp.sin(x), multiple_results=False))
    try:
        assert structures.of(lambda x: jax.nn.softmax(x), X) in (
            "<rule of jax replaced: exp>",
            "<lowering rule outside jax: exp>",
        )
        # A rule of jax's may use it on the way.
        assert structures.of(lambda x: x * 2, X).startswith("<")
    finally:
        mlir._lowerings[lax.exp_p] = own
    assert structures.of(lambda x: jax.nn.softmax(x), X) == before


@pytest.fixture
def registered():
    """Register lowering rules for the length of a test."""
    from jax._src.interpreters import mlir

    before = dict(mlir._lowerings)
    yield mlir.register_lowering
    mlir._lowerings.clear()
    mlir._lowerings.update(before)


def lowered_by(function: Any) -> Any:
    from jax._src.interpreters import mlir

    return mlir.lower_fun(function, multiple_results=False)


def test_a_primitive_that_jax_s_functions_lower_is_known_by_them(structures, registered):
    from jax._src import core

    mine = core.Primitive("mine")
    mine.abstract_eval = lax.sin_p.abstract_eval
    found = []
    for function in (lax.tan, lax.cbrt, lax.tan, functools.partial(lax.mul, np.float32(2))):
        registered(mine, lowered_by(function))
        found.append(structures.of(lambda x: mine.bind(x), X))
    assert found[0] == found[2]
    assert len({*found}) == 3
    assert not any(each.startswith("<") for each in found)


def test_a_rule_is_known_by_the_rules_it_uses(structures, registered):
    from jax._src import core

    inner, outer = core.Primitive("inner"), core.Primitive("outer")
    inner.abstract_eval = outer.abstract_eval = lax.sin_p.abstract_eval
    registered(outer, lowered_by(inner.bind))
    found = []
    for function in (lax.tan, lax.cbrt, lax.tan):
        registered(inner, lowered_by(function))
        found.append(structures.of(lambda x: outer.bind(x), X))
    assert found[0] == found[2] != found[1]
    assert not found[0].startswith("<")


def test_a_rule_that_holds_an_array_has_to_be_lowered(structures, registered):
    from jax._src import core

    mine = core.Primitive("mine")
    mine.abstract_eval = lax.sin_p.abstract_eval
    registered(mine, lowered_by(functools.partial(lax.mul, np.full((8, 8), 2.0, np.float32))))
    assert structures.of(lambda x: mine.bind(x), X).startswith("<rule of jax that cannot be described: mine")


def test_a_rule_of_jax_s_in_the_wrong_place_counts_wherever_lowering_may_meet_it(structures, registered):
    before = structures.of(lambda x: x * 2, X)
    registered(lax.exp_p, _rule_of(lax.sin_p))
    changed = structures.of(lambda x: x * 2, X)
    assert changed != before
    assert not changed.startswith("<")


def _rule_of(primitive: Any) -> Any:
    from jax._src.interpreters import mlir

    entry = mlir._lowerings[primitive]
    return getattr(entry, "rule", entry)


def test_a_function_of_jax_s_in_the_wrong_place_counts(structures, monkeypatch):
    from jax._src.lax import lax as module

    before = structures.of(lambda x: x * 2, X)
    with monkeypatch.context() as patch:
        patch.setattr(module, "exp", module.log)
        changed = structures.of(lambda x: x * 2, X)
    assert changed != before
    assert not changed.startswith("<")
    assert structures.of(lambda x: x * 2, X) == before


def test_partials_of_jax_s_that_change_places_count(structures, monkeypatch):
    from jax._src.lax import lax as module

    before = structures.of(lambda x: x * 2, X)
    with monkeypatch.context() as patch:
        equal, unequal = module._opaque_eq_hlo, module._opaque_ne_hlo
        patch.setattr(module, "_opaque_eq_hlo", unequal)
        patch.setattr(module, "_opaque_ne_hlo", equal)
        assert structures.of(lambda x: x * 2, X) not in (before, "")
    assert structures.of(lambda x: x * 2, X) == before


def test_a_function_of_jax_s_that_cannot_be_described_has_all_lowered(structures, monkeypatch):
    from jax._src.lax import lax as module

    with monkeypatch.context() as patch:
        patch.setattr(module, "_opaque_eq_hlo", functools.partial(module._opaque_eq_hlo, np.ones(8)))
        assert structures.of(lambda x: x * 2, X).startswith("<function of jax that cannot be described")
    assert not structures.of(lambda x: x * 2, X).startswith("<")


@pytest.mark.parametrize("held", [[1], {"a": 1}, {1}], ids=["list", "dictionary", "set"])
def test_a_rule_of_jax_s_is_told_by_what_it_holds(structures, registered, held):
    def rolled(shift):
        return mlir.lower_fun(functools.partial(jnp.roll, shift=shift, axis=[0]), multiple_results=False)

    from jax._src.interpreters import mlir

    registered(lax.lgamma_p, rolled(held))
    first = structures.of(lambda x: x * 2, X)
    registered(lax.lgamma_p, rolled(type(held)()))
    assert structures.of(lambda x: x * 2, X) != first
    assert not first.startswith("<")


def test_a_module_that_jax_imports_late_does_not_count_for_a_program_without_it(structures):
    before = structures.of(lambda x: x * 2, X)
    from jax.experimental import sparse  # noqa: F401

    assert structures.of(lambda x: x * 2, X) == before


def test_a_function_that_emits_operations_is_watched(structures, monkeypatch):
    from jax._src.lib.mlir.dialects import hlo

    assert not structures.of(lambda x: x * 2, X).startswith("<")
    original = hlo.multiply
    monkeypatch.setattr(hlo, "multiply", lambda *a, **k: original(*a, **k))
    assert structures.of(lambda x: x * 2, X).startswith("<function of jax replaced")


def test_a_function_of_jax_s_in_the_wrong_place_counts_in_a_module_that_lowering_uses(structures, monkeypatch):
    from jax._src.lib.mlir.dialects import hlo

    before = structures.of(lambda x: x * 2, X)
    with monkeypatch.context() as patch:
        patch.setattr(hlo, "multiply", hlo.add)
        assert structures.of(lambda x: x * 2, X) not in (before, "")
    assert structures.of(lambda x: x * 2, X) == before


def test_a_constant_of_a_module_that_lowers_counts(structures, monkeypatch):
    from jax._src.interpreters import mlir

    before = structures.of(lambda x: x * 2, X)
    with monkeypatch.context() as patch:
        patch.setattr(mlir, "DEVICE_TO_DEVICE_TYPE", mlir.DEVICE_TO_DEVICE_TYPE + 1)
        assert structures.of(lambda x: x * 2, X) not in (before, "")
    assert structures.of(lambda x: x * 2, X) == before


def test_a_decorator_of_jax_s_does_not_hide_a_function_of_the_program_s(structures, monkeypatch):
    from jax._src.interpreters import mlir
    from jax._src.traceback_util import api_boundary

    original = mlir.delegate_lowering
    with monkeypatch.context() as patch:
        patch.setattr(mlir, "delegate_lowering", api_boundary(lambda *a, **k: original(*a, **k)))
        assert structures.of(lambda x: x * 2, X).startswith("<function of jax replaced")
    assert not structures.of(lambda x: x * 2, X).startswith("<")


@pytest.mark.parametrize("kind", [property, staticmethod, classmethod, functools.cached_property])
def test_code_of_the_program_s_in_a_class_of_jax_s_has_all_lowered(kind, structures, monkeypatch):
    from jax._src import core

    monkeypatch.setattr(core.ShapedArray, "of_the_program", kind(lambda *_: 1), raising=False)
    # An import has all modules examined.
    monkeypatch.setitem(sys.modules, "imported_by_a_test", types.ModuleType("imported_by_a_test"))
    assert structures.of(lambda x: x * 2, X).startswith("<function of jax replaced")


def test_a_patched_helper_of_jax_makes_all_be_lowered(structures):
    from jax._src.interpreters import mlir

    original = mlir.delegate_lowering
    try:
        mlir.delegate_lowering = functools.wraps(original)(lambda *a, **k: original(*a, **k))
        assert structures.of(lambda x: x * 2, X).startswith("<function of jax replaced")
    finally:
        mlir.delegate_lowering = original
    assert not structures.of(lambda x: x * 2, X).startswith("<")


def test_a_mock_in_jax_makes_all_be_lowered(structures):
    from unittest import mock

    from jax._src.lax import lax as module

    with mock.patch.object(module, "_nary_lower_hlo", mock.MagicMock(wraps=module._nary_lower_hlo)):
        assert structures.of(lambda x: x * 2, X).startswith("<function of jax replaced")
    assert not structures.of(lambda x: x * 2, X).startswith("<")


class Wrapper:
    """Wraps a function as wrapt does: it says that it equals the function."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def __eq__(self, other: object) -> bool:
        return self.wrapped == other

    def __hash__(self) -> int:
        return hash(self.wrapped)


def test_a_wrapper_that_equals_what_it_wraps_makes_all_be_lowered(structures, registered, monkeypatch):
    from jax._src.interpreters import mlir

    before = structures.of(lambda x: jnp.sin(x), X)
    with monkeypatch.context() as patch:
        patch.setattr(mlir, "delegate_lowering", Wrapper(mlir.delegate_lowering))
        assert structures.of(lambda x: jnp.sin(x), X).startswith("<function of jax replaced")
    assert structures.of(lambda x: jnp.sin(x), X) == before
    mlir._lowerings[lax.sin_p] = Wrapper(mlir._lowerings[lax.sin_p])
    assert structures.of(lambda x: jnp.sin(x), X).startswith("<")


def test_who_imported_a_module_of_jax_s_does_not_count(structures, monkeypatch):
    from jax._src.lax import lax as module

    # pytest imports jax's test helpers by a loader of its own.
    monkeypatch.setattr(module, "__loader__", structures)
    assert not structures.of(lambda x: x * 2, X).startswith("<")


def test_modules_of_jax_s_that_it_imports_late_are_its_own(structures):
    # With flags of absl and classes of libraries in them.
    from jax._src import tpu_custom_call  # noqa: F401
    from jax.experimental import pallas  # noqa: F401

    assert not structures.of(lambda x: x * 2, X).startswith("<")


def test_a_rule_that_borrows_the_name_of_jax_s_makes_all_be_lowered(structures):
    from jax._src.interpreters import mlir

    own = mlir._lowerings[lax.exp_p]
    named = {"own": getattr(own, "rule", own), "functools": functools}
    # A notebook's code has no file, and functools.wraps gives it jax's module and name.
    exec("def patched(*a, **k):\n    return own(*a, **k)\npatched.__module__ = 'jax._src.lax.lax'", named)  # noqa: S102
    mlir.register_lowering(lax.exp_p, named["patched"])
    try:
        assert structures.of(lambda x: x * 2, X) == "<rule of jax replaced: exp>"
    finally:
        mlir._lowerings[lax.exp_p] = own


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
