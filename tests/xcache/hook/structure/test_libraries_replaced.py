"""Functions of Python's and of libraries that jax's code reads count: a program may put its own in their place."""

from __future__ import annotations

import builtins
import functools
import logging
import math
import operator
import threading
import time
import warnings
from unittest import mock

import jax
import numpy as np
import pytest
from numpy._core.overrides import array_function_dispatch

from xcache.hook.structure.encoding import CannotSkipError
from xcache.hook.structure.pristine import pristine

X = np.ones((8, 8), np.float32)


def bessel(x):
    return jax.lax.bessel_i0e(x)


def other(function):
    @functools.wraps(function)
    def replacement(*arguments, **options):
        return function(*arguments, **options)

    return replacement


@pytest.fixture
def replace(monkeypatch):
    """Put something in the place of a library's function, in a process that has described nothing yet."""

    def put(module, name, value):
        monkeypatch.setattr(module, name, value)
        pristine._forget()
        pristine._changed_in = None

    yield put
    monkeypatch.undo()
    pristine._forget()
    pristine._changed_in = None


@pytest.mark.parametrize(
    ("module", "name", "make"),
    [
        (np, "array", other),
        (math, "prod", lambda _: mock.MagicMock()),
        (math, "prod", functools.partial(functools.partial, other)),
        (builtins, "len", lambda function: lambda value: function(value)),
        (operator, "mul", other),
        (np, "log2", lambda function: np.frompyfunc(other(function), 1, 1)),
        (np, "log2", lambda function: np.vectorize(other(function))),
        (np, "sum", lambda function: array_function_dispatch(other(function))(other(function))),
        (np.vectorize, "__call__", other),
    ],
    ids=["function", "mock", "partial", "builtin", "operator", "ufunc", "vectorized", "dispatcher", "method"],
)
def test_a_library_s_function_that_the_program_has_replaced_has_all_lowered(structures, replace, module, name, make):
    before = structures.of(bessel, X)
    replace(module, name, make(getattr(module, name)))
    found = structures.of(bessel, X)
    assert found.startswith("<")
    assert "function of a library replaced" in found
    assert name in found
    assert not before.startswith("<")


def test_another_function_of_the_library_itself_is_another_program(structures, replace):
    before = structures.of(bessel, X)
    replace(np, "array", np.asarray)
    after = structures.of(bessel, X)
    assert after != before
    assert not after.startswith("<")


def test_a_replacement_that_comes_late_has_all_lowered(structures, replace, monkeypatch):
    structures.of(bessel, X)
    monkeypatch.setattr(np, "array", other(np.array))
    pristine.refresh()
    with pytest.raises(CannotSkipError, match=r"code of jax changed while it was in use: numpy\.array"):
        pristine.digest()


def test_another_number_in_a_library_is_another_program(structures, replace):
    before = structures.of(bessel, X)
    replace(np, "inf", 1e30)
    after = structures.of(bessel, X)
    assert after != before
    assert not after.startswith("<")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (builtins, "print"), (builtins, "open"), (builtins, "display"), (builtins, "exit"), (logging, "info"),
        (warnings, "warn"), (threading, "Lock"), (time, "time"),
    ],
)  # fmt: skip
def test_functions_that_reach_outside_of_the_process_may_be_replaced(structures, replace, monkeypatch, module, name):
    before = structures.of(bessel, X)
    monkeypatch.setattr(module, name, getattr(module, name, print), raising=False)
    replace(module, name, other(getattr(module, name)))
    assert structures.of(bessel, X) == before


def test_new_names_among_the_builtins_are_no_change(structures, monkeypatch):
    before = structures.of(bessel, X)
    monkeypatch.setattr(builtins, "shape", other(len), raising=False)
    monkeypatch.setattr(builtins, "_", 7, raising=False)
    pristine.refresh()
    assert structures.of(bessel, X) == before
