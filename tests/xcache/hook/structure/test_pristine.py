"""Changed functions, classes and constants of jax's change the structure, or have all lowered."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xcache.hook.structure import libraries

X = np.ones((8, 8), np.float32)


def test_a_function_of_jax_s_in_the_wrong_place_counts(structures, monkeypatch):
    from jax._src.lax import special as module

    def found():
        return structures.of(lambda x: lax.igamma(x, x), X), structures.of(lambda x: x * 2, X)

    before = found()
    with monkeypatch.context() as patch:
        patch.setattr(module, "exp", module.log)
        changed = found()
    assert changed[0] != before[0]
    # It cannot meet the function.
    assert changed[1] == before[1]
    assert not changed[0].startswith("<")
    assert found() == before


def test_partials_of_jax_s_that_change_places_count(structures, monkeypatch):
    from jax._src.lax import lax as module

    before = structures.of(lambda x: x * 2, X)
    with monkeypatch.context() as patch:
        equal, unequal = module._opaque_eq_hlo, module._opaque_ne_hlo
        patch.setattr(module, "_opaque_eq_hlo", unequal)
        patch.setattr(module, "_opaque_ne_hlo", equal)
        assert structures.of(lambda x: x * 2, X) not in (before, "")
    assert structures.of(lambda x: x * 2, X) == before


def test_what_a_partial_of_jax_s_holds_counts(structures, monkeypatch):
    from jax._src.lax import lax as module

    def holding(value):
        with monkeypatch.context() as patch:
            patch.setattr(module, "_opaque_eq_hlo", functools.partial(module._opaque_eq_hlo, value))
            return structures.of(lambda x: x * 2, X)

    found = [*map(holding, (1, True, -0.0, 0.0)), structures.of(lambda x: x * 2, X)]
    assert len({*found}) == len(found)


def test_an_array_of_a_module_of_jax_s_counts(structures, monkeypatch):
    from jax._src.interpreters import mlir

    def holding(value):
        with monkeypatch.context() as patch:
            patch.setattr(mlir, "DEVICE_TO_DEVICE_TYPE", value)
            return structures.of(lambda x: x * 2, X)

    found = [*map(holding, (np.ones(8), np.zeros(8))), structures.of(lambda x: x * 2, X)]
    assert len({*found}) == len(found)
    assert holding(np.ones(100_000)).startswith("<function of jax")


def test_a_module_that_jax_imports_late_does_not_count_for_a_program_without_it(structures):
    before = structures.of(lambda x: x * 2, X)
    from jax.experimental import sparse  # noqa: F401

    assert structures.of(lambda x: x * 2, X) == before


def test_a_function_in_a_table_by_dtypes_counts(structures, monkeypatch):
    from jax._src.interpreters import mlir

    before = structures.of(lambda x: x * 2, X)
    table = mlir._dtype_to_ir_type
    with monkeypatch.context() as patch:
        patch.setitem(table, np.dtype(np.float32), table[np.dtype(np.float16)])
        changed = structures.of(lambda x: x * 2, X)
        patch.setitem(table, np.dtype(np.float32), lambda: table[np.dtype(np.float16)]())
        assert structures.of(lambda x: x * 2, X).startswith("<rule of jax replaced: float32")
    assert changed != before
    assert not changed.startswith("<")
    assert structures.of(lambda x: x * 2, X) == before


class Posing:
    """Stands in place of a method, as the wrappers of tracing tools do."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __get__(self, owner: Any, kind: type) -> Any:
        return functools.partial(self.wrapped, owner)


def test_an_object_in_place_of_a_special_method_has_all_lowered(structures, monkeypatch):
    from jaxlib.mlir.dialects import _stablehlo_ops_gen as operations

    before = structures.of(lambda x: jnp.sin(x), X)
    with monkeypatch.context() as patch:
        patch.setattr(operations.SineOp, "__init__", Posing(operations.SineOp.__init__))
        assert structures.of(lambda x: jnp.sin(x), X).startswith("<")
    assert structures.of(lambda x: jnp.sin(x), X) == before


def test_keywords_of_a_partial_method_count(structures, monkeypatch):
    from jax._src import core

    def holding(which):
        with monkeypatch.context() as patch:
            patch.setattr(core.ShapedArray, "_made", functools.partialmethod(core.ShapedArray.update, x=which), False)
            return structures.of(lambda x: x * 2, X)

    found = [*map(holding, (0, 1)), structures.of(lambda x: x * 2, X)]
    assert len({*found}) == len(found)


def test_a_function_that_hands_modules_on_is_watched(structures, monkeypatch):
    from jax._src.interpreters import pxla

    before = structures.of(lambda x: x * 2, X)
    compiled = pxla.MeshComputation.compile
    with monkeypatch.context() as patch:
        patch.setattr(pxla.MeshComputation, "compile", lambda *a, **k: compiled(*a, **k))
        assert structures.of(lambda x: x * 2, X).startswith("<function of jax replaced")
    assert structures.of(lambda x: x * 2, X) == before


def test_the_class_of_an_object_that_jaxlib_makes_is_watched(structures, monkeypatch):
    from jaxlib.mlir import ir

    before = structures.of(lambda x: x * 2, X)
    with monkeypatch.context() as patch:
        patch.setattr(ir.OpResultList, "__getitem__", lambda *_: X, raising=False)
        assert structures.of(lambda x: x * 2, X).startswith("<function of jax replaced")
    assert structures.of(lambda x: x * 2, X) == before


def test_a_module_of_jax_s_with_a_class_of_the_program_s_has_all_lowered(structures, monkeypatch):
    from jax._src.lib.mlir.dialects import hlo

    class Computing(types.ModuleType):
        """A module that makes its attributes when they are read."""

    before = structures.of(lambda x: x * 2, X)
    with monkeypatch.context() as patch:
        patch.setattr(hlo, "__class__", Computing)
        assert structures.of(lambda x: x * 2, X).startswith("<function of jax replaced")
    assert structures.of(lambda x: x * 2, X) == before


def test_a_global_that_code_from_elsewhere_assigns_counts(structures, monkeypatch):
    """jax's own functions assign those that hold its state."""
    from jax._src.interpreters import mlir

    source = "def _set(value):\n  global DEVICE_TO_DEVICE_TYPE\n  DEVICE_TO_DEVICE_TYPE = value\n"

    def holding(value):
        with monkeypatch.context() as patch:
            patch.setattr(mlir, "DEVICE_TO_DEVICE_TYPE", None)
            exec(source, vars(mlir))  # noqa: S102 - one of the ways in which programs change a module
            mlir._set(value)
            del mlir._set
            return structures.of(lambda x: x * 2, X)

    found = [*map(holding, (7, 8)), structures.of(lambda x: x * 2, X)]
    assert len({*found}) == len(found)


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


@pytest.fixture
def before(structures, monkeypatch):
    """The structure of doubling; all modules are examined again for the next program, because one was imported."""
    structure = structures.of(lambda x: x * 2, X)
    monkeypatch.setitem(sys.modules, "imported_by_a_test", types.ModuleType("imported_by_a_test"))
    return structure


def test_an_import_has_all_examined_though_another_module_has_gone(structures, monkeypatch, before):
    from jax._src import core

    structures.of(lambda x: x * 2, X)
    monkeypatch.setattr(core.ShapedArray, "of_the_program", lambda *_: 1, raising=False)
    monkeypatch.delitem(sys.modules, "imported_by_a_test")
    monkeypatch.setitem(sys.modules, "another_import", types.ModuleType("another_import"))
    assert structures.of(lambda x: x * 2, X).startswith("<function of jax replaced")


@pytest.mark.parametrize(
    "kind",
    [
        property, staticmethod, classmethod, functools.cached_property, functools.lru_cache, functools.partial,
        lambda function: property(functools.partial(function)),
        lambda function: staticmethod(functools.lru_cache(function)),
    ],
)  # fmt: skip
def test_code_of_the_program_s_in_a_class_of_jax_s_has_all_lowered(kind, structures, monkeypatch, before):
    from jax._src import core

    assert not before.startswith("<")
    monkeypatch.setattr(core.ShapedArray, "of_the_program", kind(lambda *_: 1), raising=False)
    assert structures.of(lambda x: x * 2, X).startswith("<function of jax replaced")


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("numpy.where", lambda *_: X),
        ("numpy.where", types.ModuleType("of_the_program")),
        ("_src.numpy.ufuncs.lax", types.SimpleNamespace(**{**vars(lax), "exp": lambda *_: X})),
    ],
)
def test_code_of_the_program_s_under_a_public_name_has_all_lowered(name, made, structures, monkeypatch, before):
    monkeypatch.setattr(f"jax.{name}", made)
    assert structures.of(lambda x: x * 2, X).startswith("<function of jax replaced")


def test_asserts_that_pytest_has_rewritten_in_a_module_of_jax_s_are_acceptable(structures, monkeypatch, before):
    from jax._src import test_warning_util
    from jax._src.interpreters import mlir

    assert "@pytest_ar" in vars(test_warning_util)
    # As in jax's test_util, which needs a library that is not here.
    captured = functools.partial(test_warning_util.raise_on_warnings, OfTheProgram())
    monkeypatch.setattr(test_warning_util, "captured", captured, raising=False)
    monkeypatch.setattr(mlir, "of_nobody", 1, raising=False)
    assert not structures.of(lambda x: x * 2, X).startswith("<")


def test_functions_of_jax_s_that_lead_to_each_other_are_acceptable(structures, monkeypatch, before):
    from jax._src.interpreters import mlir

    monkeypatch.setattr(mlir.ModuleContext, "of_itself", types.MethodType(mlir.lower_fun, mlir.ModuleContext), False)
    assert not structures.of(lambda x: x * 2, X).startswith("<")


class OfTheProgram:
    """Its methods may stand in place of jax's functions."""

    def method(self, *_):
        return X


def copied(module, name=None):
    copy = types.ModuleType(name or module.__name__)
    vars(copy).update(vars(module), pi=3)
    return copy


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("shape_tensor", lambda mlir: OfTheProgram().method),
        ("shape_tensor", lambda mlir: functools.partial(mlir.shape_tensor, OfTheProgram().method)),
        ("shape_tensor", lambda mlir: mlir.lower_fun(lambda x: X)),
        ("np", lambda mlir: copied(np)),
        ("core", lambda mlir: copied(mlir.core)),
        ("np", lambda mlir: copied(np, "of_the_program.np")),
    ],
)
def test_code_of_the_program_s_in_another_shape_has_all_lowered(name, make, structures, monkeypatch, before):
    from jax._src.interpreters import mlir

    monkeypatch.setattr(mlir, name, make(mlir))
    assert structures.of(lambda x: x * 2, X).startswith("<function of jax replaced")


def test_another_module_than_jax_s_under_a_name_of_a_module_that_lowers_counts(structures, monkeypatch, before):
    from jax._src.interpreters import mlir

    monkeypatch.setattr(mlir, "re", jnp)
    assert structures.of(lambda x: x * 2, X) not in (before, "")


def test_a_rule_of_jax_experimental_counts_with_its_helpers(structures, monkeypatch):
    from jax.experimental import sparse
    from jax.experimental.sparse import bcoo

    def dense():
        indices = np.stack([np.arange(8)] * 2, 1)
        return structures.of(lambda data: sparse.BCOO((data, indices), shape=(8, 8)).todense(), X[0])

    before = dense()
    assert not before.startswith("<")
    code = bcoo._bcoo_todense_impl.__code__
    with monkeypatch.context() as patch:
        patch.setattr(bcoo._bcoo_todense_impl, "__code__", code.replace(co_consts=(*code.co_consts, 7)))
        assert dense() not in (before, "")
    assert dense() == before


@pytest.mark.parametrize("change", ["class", "constant", "method"])
def test_a_class_of_jax_s_in_the_wrong_place_or_with_another_s_parts_counts(structures, monkeypatch, change):
    from jaxlib.mlir.dialects import _stablehlo_ops_gen as operations

    before = structures.of(lambda x: jnp.sin(x), X)
    with monkeypatch.context() as patch:
        if change == "class":
            patch.setattr(operations, "SineOp", operations.CosineOp)
        elif change == "constant":
            patch.setattr(operations.SineOp, "OPERATION_NAME", "stablehlo.cosine")
        else:
            patch.setattr(operations.SineOp, "__init__", operations.CosineOp.__init__)
        changed = structures.of(lambda x: jnp.sin(x), X)
    assert changed != before
    assert not changed.startswith("<")
    assert structures.of(lambda x: jnp.sin(x), X) == before


def test_a_class_of_the_program_s_in_a_module_of_jax_s_has_all_lowered(structures, monkeypatch, before):
    from jax._src.interpreters import mlir

    class Context(mlir.ModuleContext):
        """A context of the program's own."""

    assert not before.startswith("<")
    monkeypatch.setattr(mlir, "ModuleContext", Context)
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


def test_the_variable_of_a_loop_over_a_set_of_classes_does_not_count(structures, monkeypatch):
    """It is another class in each process."""
    from jax._src.lax import lax as module

    before = structures.of(lambda x: x * 2, X)
    monkeypatch.setattr(module, "_variable_of_a_loop", np.float32, raising=False)
    assert structures.of(lambda x: x * 2, X) == before


@pytest.mark.parametrize("name", ["google.lab.patches", "mlir.patches", "profile"])
def test_a_module_of_the_program_s_with_the_name_of_a_library_s_is_the_program_s(
    name, structures, monkeypatch, tmp_path, before
):
    from jax._src.interpreters import mlir

    module = types.ModuleType(name)
    module.__file__ = str(tmp_path / "profile.py")
    exec("def of_the_program(*arguments): pass", vars(module))  # noqa: S102 - code whose globals are the module's
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(mlir, "delegate_lowering", module.of_the_program)
    libraries.is_of_a_library.cache_clear()
    assert structures.of(lambda x: x * 2, X).startswith("<function of jax replaced")
    libraries.is_of_a_library.cache_clear()
