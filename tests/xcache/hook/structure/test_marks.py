"""Every change of an object is noticed, wherever the interpreter keeps its attributes."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest
from jax._src import core

from xcache.hook.structure.encoding import Encoding
from xcache.hook.structure.marks import Marks
from xcache.hook.structure.pristine import pristine


class Plain:
    """An object that has room for few attributes."""


def made(count: int) -> Plain:
    value = Plain()
    for number in range(count):
        setattr(value, f"a{number}", object())
    return value


def add_many(value):
    for number in range(100):
        setattr(value, f"b{number}", object())


CHANGES = {
    "an attribute": lambda value: setattr(value, "a0", object()),
    "through its dictionary": lambda value: vars(value).update(a1=object()),
    "another attribute": lambda value: setattr(value, "other", object()),
    "one attribute less": lambda value: delattr(value, "a2"),
    "more attributes than there is room for": add_many,
    "its dictionary": lambda value: setattr(value, "__dict__", dict(vars(value))),
    "no attributes": lambda value: vars(value).clear(),
}


@pytest.mark.parametrize("first", CHANGES)
@pytest.mark.parametrize("then", CHANGES)
def test_a_change_is_noticed_and_so_is_the_next(first, then):
    value, still = made(4), [made(3), types.SimpleNamespace(a=1), jax.jit(lambda x: x)]
    marks = Marks([value, *still])
    assert not marks.have_changed()
    CHANGES[first](value)
    assert marks.have_changed()
    marks.take()
    assert not marks.have_changed()
    vars(value).update(a0=1, a1=2, a2=3)
    marks.take()
    CHANGES[then](value)
    assert marks.have_changed()


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_named(change):
    values = [made(4), made(4), types.SimpleNamespace(a=1), vars(made(2)), types.ModuleType("m"), lambda: 1]
    marks = Marks(values)
    assert marks.take_anew() == []
    CHANGES[change](values[1])
    assert any(each is values[1] for each in marks.take_anew())
    assert marks.take_anew() == []
    values[4].name = values[3]["name"] = 1
    values[5].__code__ = (lambda: 2).__code__
    assert [*map(id, marks.take_anew())] == [*map(id, values[3:])]


@pytest.mark.parametrize("kind", [types.SimpleNamespace, type("Other", (Plain,), {})])
def test_an_object_of_another_class_is_noticed(kind):
    value = kind()
    value.a = object()
    marks = Marks([made(2), value])
    value.a = object()
    assert marks.have_changed()


def test_an_abstract_array_that_somebody_has_changed_has_its_own_encoding():
    def encoded() -> str:
        pristine.refresh()
        encoding = Encoding()
        encoding.encode(aval)
        return encoding.digest()

    # An earlier test may have changed jax's code and put it back.
    pristine.refresh()
    jax.clear_caches()
    aval = core.ShapedArray((3,), np.dtype("float32"))
    before = encoded()
    assert encoded() == before
    object.__setattr__(aval, "shape", (4,))
    try:
        assert encoded() != before
    finally:
        object.__setattr__(aval, "shape", (3,))
    assert encoded() == before
