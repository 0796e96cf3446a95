"""Programs are described once that is worth the description of jax's code."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import pytest

from xcache.hook.describing import Describing
from xcache.hook.structure.encoding import CannotSkipError

SMALL = jax.make_jaxpr(lambda x: x + 1)(jnp.float32(0))


def describing(tmp_path, expected=0.0, *, always=False):
    """Return what describes programs, but without a description."""
    made = Describing(lambda: expected, tmp_path, always=always)
    made._prepare = lambda: setattr(made, "_structure", lambda *_: "described")
    return made


def is_cheap(made, jaxpr=SMALL):
    """Return whether a program is lowered."""
    try:
        return made.structure("jit_f", jaxpr, {}) != "described"
    except CannotSkipError as reason:
        return reason.kind == "lowering is cheap"


def test_a_small_program_is_lowered_unless_somebody_wants_it_skipped(tmp_path):
    assert is_cheap(describing(tmp_path))
    assert not is_cheap(describing(tmp_path, always=True))
    made = describing(tmp_path)
    made.begin()
    assert not is_cheap(made)


def test_a_program_of_many_equations_is_described_at_once(tmp_path):
    def many(x):
        for _ in range(2500):
            x = x + 1
        return x

    def nested(x):
        return jax.jit(many)(jax.jit(many)(x))

    assert is_cheap(describing(tmp_path), jax.make_jaxpr(many)(jnp.float32(0)))
    assert not is_cheap(describing(tmp_path), jax.make_jaxpr(nested)(jnp.float32(0)))


@pytest.mark.parametrize(("expected", "enough"), [(0.0, 0.25), (0.5, 0.7)])
def test_many_lowerings_are_worth_a_description_and_more_of_them_where_the_last_run_did_not_gain(
    tmp_path, expected, enough
):
    made = describing(tmp_path, expected)
    made.note_lowering(enough - 0.2)
    assert is_cheap(made)
    made.note_lowering(0.2)
    assert not is_cheap(made)
    # This lowering is no part of what was spent before.
    made.note_lowering(100.0)
    made._price = 0.5
    assert [made.worth(0.1), made.worth(0.1)] == [pytest.approx((0.1 + enough) / 0.5), pytest.approx(0.2)]


def test_what_the_last_run_would_have_gained_is_worth_a_description(tmp_path):
    assert not is_cheap(describing(tmp_path, 1.0))


def test_a_jax_that_cannot_be_described_is_asked_once(tmp_path, monkeypatch):
    made = Describing(lambda: 0.0, tmp_path, always=True)
    monkeypatch.setitem(sys.modules, "xcache.hook.structure.digest", None)
    monkeypatch.delattr("xcache.hook.structure.digest", raising=False)
    with pytest.raises(ImportError):
        made.structure("jit_f", SMALL, {})
    with pytest.raises(CannotSkipError, match="this version of jax"):
        made.structure("jit_f", SMALL, {})
