"""A primitive is known by the code that lowers it, and a rule that is not jax's own has all lowered."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

X = np.ones((8, 8), np.float32)


def test_a_primitive_of_the_program_has_to_be_lowered(structures):
    from jax._src import core
    from jax._src.interpreters import mlir

    # It has the name of one of jax's.
    shadow = core.Primitive("sin")
    shadow.def_abstract_eval(lambda x: x)
    mlir.register_lowering(shadow, mlir.lower_fun(lambda x: jnp.cos(x), multiple_results=False))
    try:
        assert structures.of(lambda x: shadow.bind(x), X).startswith("<lowering rule outside jax: sin")
        # Other programs do not use it.
        assert not structures.of(lambda x: x * 2, X).startswith("<")
    finally:
        del mlir._lowerings[shadow]


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
    assert structures.of(lambda x: mine.bind(x), X).startswith("<lowering rule outside jax: mine")


def test_a_rule_that_was_replaced_makes_all_be_lowered(structures):
    from jax._src.interpreters import mlir

    before = structures.of(lambda x: jax.nn.softmax(x), X)
    own = mlir._lowerings[lax.exp_p]
    mlir.register_lowering(lax.exp_p, mlir.lower_fun(lambda x, accuracy: jnp.sin(x), multiple_results=False))
    try:
        reason = structures.of(lambda x: jax.nn.softmax(x), X)
        assert reason.startswith(("<rule of jax replaced: exp", "<lowering rule outside jax: exp"))
        # A rule of jax's may use it on the way.
        assert structures.of(lambda x: lax.igamma(x, x), X).startswith("<")
    finally:
        mlir._lowerings[lax.exp_p] = own
    assert structures.of(lambda x: jax.nn.softmax(x), X) == before


def test_a_rule_of_jax_s_in_the_wrong_place_counts_wherever_lowering_may_meet_it(structures, registered):
    before = structures.of(lambda x: lax.igamma(x, x), X)
    registered(lax.exp_p, _rule_of(lax.sin_p))
    changed = structures.of(lambda x: lax.igamma(x, x), X)
    assert changed != before
    assert not changed.startswith("<")


def _rule_of(primitive: Any) -> Any:
    from jax._src.interpreters import mlir

    entry = mlir._lowerings[primitive]
    return getattr(entry, "rule", entry)


@pytest.mark.parametrize("held", [[1], {"a": 1}, {1}], ids=["list", "dictionary", "set"])
def test_a_rule_of_jax_s_is_told_by_what_it_holds(structures, registered, held):
    def rolled(shift):
        return mlir.lower_fun(functools.partial(jnp.roll, shift=shift, axis=[0]), multiple_results=False)

    from jax._src.interpreters import mlir

    registered(lax.lgamma_p, rolled(held))
    first = structures.of(lambda x: lax.igamma(x, x), X)
    registered(lax.lgamma_p, rolled(type(held)()))
    assert structures.of(lambda x: lax.igamma(x, x), X) != first
    assert not first.startswith("<")


def test_a_rule_that_borrows_the_name_of_jax_s_makes_all_be_lowered(structures):
    from jax._src.interpreters import mlir

    own = mlir._lowerings[lax.exp_p]
    named = {"own": getattr(own, "rule", own), "functools": functools}
    # A notebook's code has no file, and functools.wraps gives it jax's module and name.
    exec("def patched(*a, **k):\n    return own(*a, **k)\npatched.__module__ = 'jax._src.lax.lax'", named)  # noqa: S102
    mlir.register_lowering(lax.exp_p, named["patched"])
    try:
        reason = structures.of(lambda x: lax.igamma(x, x), X)
        assert reason.startswith("<")
        assert "rule of jax replaced: exp" in reason
    finally:
        mlir._lowerings[lax.exp_p] = own
