"""Values that a function can read where nobody looks first count for the digest of a call."""

from __future__ import annotations

import functools
import operator
import types
import typing

import jax
import numpy as np
import pytest
from support.describing import reading, told

from xcache.hook.structure.encoding import CannotSkipError


class Scale:
    """Metadata of an annotation."""

    def __init__(self, value):
        self.value = value


class Filled(dict):
    """Has a value for what it lacks."""

    def __missing__(self, _):
        return self.value


def with_annotation(value):
    return type(
        "Annotated", (), {"__module__": __name__, "__annotations__": {"x": typing.Annotated[float, Scale(value)]}}
    )


def function_with_annotation(value):
    def function(x):
        return x

    function.__annotations__ = {"x": Scale(value)}
    return function


def generic(value):
    inner = type("Inner", (), {"__module__": __name__, "value": value})
    made = type("Made", (), {"__module__": __name__})
    made.__orig_bases__ = (list[inner],)
    return made


def filled(value):
    made = Filled()
    made.value = value
    return types.MappingProxyType(made)


def wrapper(kind, value):
    made = kind(max)
    made.value = value
    return made


@pytest.mark.parametrize(
    "make",
    [
        with_annotation,
        function_with_annotation,
        generic,
        filled,
        lambda value: typing.TypeVar("T", bound=type("Bound", (), {"__module__": __name__, "value": value})),
        lambda value: typing.NewType("New", type("Super", (), {"__module__": __name__, "value": value})),
        functools.partial(wrapper, staticmethod),
        functools.partial(wrapper, classmethod),
        functools.partial(wrapper, functools.lru_cache),
        lambda value: [value, 7].__len__ if value == 1 else [].__len__,
    ],
    ids=["class", "function", "bases", "proxy", "variable", "type", "static", "class method", "cached", "falsy owner"],
)
def test_it_counts(make):
    first, same, other = (told(reading("USED", USED=make(value))) for value in (1, 1, 2))
    assert first == same != other


def test_a_scalar_of_a_class_of_the_program_s_is_refused():
    class Mine(np.float64):
        """It may say anything of itself."""

    with pytest.raises(CannotSkipError, match="unknown type"):
        told(reading("USED", USED=Mine(1)))


def test_a_setting_that_no_lowering_reads_counts_for_a_function_that_may_read_it():
    def with_setting(value):
        before = jax.config.jax_raise_persistent_cache_errors
        jax.config.update("jax_raise_persistent_cache_errors", value)
        try:
            return told(lambda x: x * jax.config.jax_raise_persistent_cache_errors)
        finally:
            jax.config.update("jax_raise_persistent_cache_errors", before)

    assert with_setting(False) == with_setting(False) != with_setting(True)


def test_a_text_that_is_a_path_to_a_function_s_globals_is_refused():
    with pytest.raises(CannotSkipError, match="__globals__"):
        told(lambda x: operator.attrgetter("__func__.__globals__")(x))
