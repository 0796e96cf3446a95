"""Changes of jax's code after a description are noticed, and have all lowered until jax's caches are cleared."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xcache.hook.structure.beginning import Beginning
from xcache.hook.structure.description import Description
from xcache.hook.structure.encoding import CannotSkipError, Encoding
from xcache.hook.structure.libraries import is_from_its_file
from xcache.hook.structure.marks import Marks
from xcache.hook.structure.pristine import pristine

X = np.ones((8, 8), np.float32)


def changed_late(structures, change, undo, function=lambda x: x * 2):
    """Return whether all is lowered after a change, and as before once it is undone and jax's caches are cleared."""
    before = structures.of(function, X)
    assert not before.startswith("<")
    change()
    try:
        pristine.refresh()
        with pytest.raises(CannotSkipError, match="code of jax changed while it was in use"):
            pristine.digest()
        after = structures.of(function, X)
    finally:
        undo()
    assert structures.of(function, X) == before
    return after != before


@pytest.fixture
def watched(structures):
    """Watch jax from here on, as when xcache is switched on."""
    pristine.watch(Beginning())
    yield structures
    pristine._beginning = None
    jax.clear_caches()


def gamma(x):
    return jax.random.gamma(jax.random.key(0), x)


def test_a_patch_that_was_undone_before_its_function_was_met_has_all_lowered(watched):
    before = watched.of(lax.linalg.cholesky, X)
    jax.clear_caches()
    pristine._forget()
    watched.of(lambda x: x * 2, X)
    module = sys.modules[lax.linalg.cholesky.__module__]
    with mock.patch.object(module, "cholesky", None):
        pass
    assert "code of jax changed while it was in use" in watched.of(lax.linalg.cholesky, X)
    # jax's caches were cleared.
    assert watched.of(lax.linalg.cholesky, X) == before


def test_a_method_that_was_put_back_before_its_class_was_met_has_all_lowered(watched):
    pristine._forget()
    with mock.patch.object(jax.core.ShapedArray, "update", None):
        pass
    assert "code of jax changed while it was in use" in watched.of(gamma, X)


def test_a_module_of_jax_s_that_the_program_imports_is_no_change(watched, monkeypatch):
    before = watched.of(gamma, X)
    pristine._forget()
    monkeypatch.delitem(sys.modules, "jax.experimental.jet", raising=False)
    importlib.import_module("jax.experimental.jet")
    assert watched.of(gamma, X) == before


def read(kind):
    return [each for each in pristine._reach_of_lowering().fixed if type(each) is kind]


def test_what_a_closure_of_jax_s_holds_is_watched(structures):
    structures.of(lambda x: x * 2, X)
    cell = next(each for each in read(types.CellType) if type(each.cell_contents) is int)
    value = cell.cell_contents
    assert changed_late(
        structures,
        lambda: setattr(cell, "cell_contents", value + 1),
        lambda: setattr(cell, "cell_contents", value),
    )


def test_the_bases_of_a_class_of_jax_s_are_watched(structures):
    from jax._src import core

    bases = core.ShapedArray.__bases__
    middle = type("Middle", bases, {"__slots__": (), "__module__": "jax._src.core"})
    assert changed_late(
        structures,
        lambda: setattr(core.ShapedArray, "__bases__", (middle,)),
        lambda: setattr(core.ShapedArray, "__bases__", bases),
    )


def test_the_function_in_an_object_of_jax_s_is_watched(structures):
    from jax._src.lax import other

    function = other.logaddexp.fun
    assert changed_late(
        structures,
        lambda: setattr(other.logaddexp, "fun", lax.add),
        lambda: setattr(other.logaddexp, "fun", function),
        lambda x: lax.cumlogsumexp(x),
    )


def test_the_rule_in_an_entry_of_jax_s_tables_is_watched(structures):
    from jax._src.interpreters import mlir

    entry = mlir._lowerings[lax.sin_p]
    if not hasattr(entry, "rule"):
        pytest.skip("this jax keeps functions in the table")
    rule = entry.rule
    assert changed_late(
        structures,
        lambda: object.__setattr__(entry, "rule", mlir._lowerings[lax.cos_p].rule),
        lambda: object.__setattr__(entry, "rule", rule),
        lambda x: jnp.sin(x),
    )


def test_another_dictionary_of_an_object_of_jax_s_is_noticed(structures):
    from jax._src.lax import other

    names = vars(other.logaddexp)
    assert changed_late(
        structures,
        lambda: setattr(other.logaddexp, "__dict__", {**names, "fun": lax.add}),
        lambda: setattr(other.logaddexp, "__dict__", names),
        lambda x: lax.cumlogsumexp(x),
    )


def test_an_equal_dictionary_of_an_object_of_jax_s_is_another_one(structures):
    """It would not be watched."""
    from jax._src.lax import other

    names = vars(other.logaddexp)
    assert not changed_late(
        structures,
        lambda: setattr(other.logaddexp, "__dict__", {**names}),
        lambda: setattr(other.logaddexp, "__dict__", names),
        lambda x: lax.cumlogsumexp(x),
    )


def test_the_state_of_a_partial_of_jax_s_is_watched(structures):
    structures.of(lambda x: x * 2, X)
    made = next(each for each in read(functools.partial) if len(each.args) == 1)
    state = made.func, made.args, made.keywords, None
    assert changed_late(
        structures,
        lambda: made.__setstate__((made.func, (*made.args, 1), made.keywords, None)),
        lambda: made.__setstate__(state),
    )


def test_a_default_that_is_changed_in_place_counts(structures):
    from jax._src.interpreters import mlir

    before = structures.of(lambda x: x * 2, X)
    defaults = mlir.lower_jaxpr_to_fun.__kwdefaults__
    name = next(name for name, value in defaults.items() if value is None)
    try:
        defaults[name] = 1
        assert structures.of(lambda x: x * 2, X) != before
    finally:
        defaults[name] = None
    assert structures.of(lambda x: x * 2, X) == before


def test_code_that_changed_since_jax_has_traced_has_all_lowered_until_its_caches_are_cleared(structures, monkeypatch):
    from jax._src.interpreters import mlir

    before = structures.of(lambda x: x * 2, X)
    with monkeypatch.context() as patch:
        patch.setattr(mlir, "DEVICE_TO_DEVICE_TYPE", mlir.DEVICE_TO_DEVICE_TYPE + 1)
        pristine.refresh()
    pristine.refresh()
    with pytest.raises(CannotSkipError, match="code of jax changed while it was in use"):
        pristine.digest()
    assert structures.of(lambda x: x * 2, X) == before


def test_code_that_was_replaced_is_jax_s_own_again(structures):
    from jax._src.interpreters import mlir

    before, function = structures.of(lambda x: x * 2, X), mlir.shape_tensor
    code = function.__code__
    try:
        function.__code__ = (lambda *_, **__: X).__code__
        assert structures.of(lambda x: x * 2, X).startswith("<function of jax replaced")
    finally:
        function.__code__ = code
    assert structures.of(lambda x: x * 2, X) == before


def test_a_function_that_emits_operations_is_watched(structures, monkeypatch):
    from jax._src.lib.mlir.dialects import hlo

    assert not structures.of(lambda x: x * 2, X).startswith("<")
    original = hlo.multiply
    monkeypatch.setattr(hlo, "multiply", lambda *a, **k: original(*a, **k))
    assert structures.of(lambda x: x * 2, X).startswith("<function of jax replaced")


def test_a_value_at_the_address_of_one_that_is_gone_is_another_value():
    def function(rate=1.0):
        return rate

    function.__defaults__ = None
    function.__defaults__ = (float(len(X)),)
    marks = Marks([function])
    function.__defaults__ = None
    # Python gives the next tuple the place of the last one, if nothing keeps that.
    function.__defaults__ = (float(len(X) + 1),)
    assert marks.have_changed()


class Lying(type):
    """A metaclass whose classes say that they are that of ``...``."""

    def __eq__(cls, other):
        return other is type(...)

    def __hash__(cls):
        return hash(type(...))


def test_an_object_whose_class_says_that_it_is_another_is_refused():
    value = Lying("Ellipsis", (), {})()
    with pytest.raises(CannotSkipError, match="compares as it likes"):
        Description(is_complete=False).write(value)
    with pytest.raises(CannotSkipError, match="compares as it likes"):
        Encoding().encode(value)


def test_a_module_with_a_name_of_jax_s_beyond_its_folder_is_the_program_s(monkeypatch):
    module = types.ModuleType("jax.of_the_program")
    module.__file__ = __file__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile("def function(): pass", __file__, "exec"), vars(module))  # noqa: S102
    assert not is_from_its_file(module.function, module.__name__)
    assert is_from_its_file(lax.full_like, lax.full_like.__globals__["__name__"])
