"""The data among a function's globals count for the digest of a call, whatever holds them."""

from __future__ import annotations

import argparse
import array
import collections
import collections.abc
import copy
import ctypes
import dataclasses
import datetime
import decimal
import functools
import io
import itertools
import json
import math
import os
import pathlib
import queue
import random
import re
import threading
import typing
import weakref
from collections.abc import Callable

import click
import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from support.describing import Plain, reading, told, using

from xcache.hook.structure.encoding import CannotSkipError


@dataclasses.dataclass
class Derived:
    layers: int = 1

    def __post_init__(self):
        self.width = 2


def derived(width):
    made = Derived()
    made.width = width
    return made


class Named(list):
    """A list with a name."""

    def __init__(self, name, values=()):
        super().__init__(values)
        self.name = name


class Hidden(list):
    """A list that says it is empty."""

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


class Lazy:
    """Stands for something else, and finds it when it is asked for anything, as lazily imported modules do."""

    def __getattribute__(self, name):
        raise AssertionError(f"{name} was asked for")


def mesh(name):
    return jax.sharding.Mesh(np.array(jax.devices()[:1]), (name,))


def cycle(value):
    made = [value]
    made.append(made)
    return made


def ladder(height):
    """Return nested lists in which each holds the next one twice."""
    made = []
    for _ in range(height):
        made = [made, made]
    return made


GLOBALS = {
    "set of tuples": ({(1, 2)}, {(1, 3)}),
    "set of sets": ({frozenset({"a"})}, {frozenset({"b"})}),
    "order of numbers in a set": ({0, 8}, {8, 0}),
    "length of a list of nothing": ([None], [None, None]),
    "list and nothing": ([], [None]),
    "list of functions": ([max], [max, max]),
    "functions in a list": ([max], [min]),
    "function": (max, min),
    "type of Python's": (int, float),
    "nothing": (None, 0),
    "attribute set after the fields": (derived(2), derived(3)),
    "name of a list": (Named("a"), Named("b")),
    "items of a named list": (Named("a", [1]), Named("a", [2])),
    "ordered dictionary": (collections.OrderedDict(a=1), collections.OrderedDict(a=2)),
    "bytes that can change": (bytearray(b"a"), bytearray(b"b")),
    "array": (array.array("i", [1]), array.array("i", [2])),
    "view of memory": (memoryview(b"a"), memoryview(b"b")),
    "default of a dictionary": (collections.defaultdict(int, a=1), collections.defaultdict(float, a=1)),
    "chain": (collections.ChainMap({"a": 1}), collections.ChainMap({"a": 2})),
    "dictionary of the library": (collections.UserDict(a=1), collections.UserDict(a=2)),
    "longest deque": (collections.deque([1], 2), collections.deque([1], 3)),
    "time": (datetime.timedelta(1), datetime.timedelta(2)),
    "path": (pathlib.Path("/a"), pathlib.Path("/b")),
    "pattern": (re.compile("a"), re.compile("b")),
    "arguments": (argparse.Namespace(rate=1), argparse.Namespace(rate=2)),
    "argument of a partial": (functools.partial(max, 1), functools.partial(max, 2)),
    "object of a bound method": ([1].count, [2].count),
    "tree": (jax.tree.structure([1]), jax.tree.structure((1,))),
    "mesh": (mesh("a"), mesh("b")),
    "partitions": (jax.sharding.PartitionSpec("a"), jax.sharding.PartitionSpec("b")),
    "universal function": (jax.numpy.add, jax.numpy.multiply),
    "function with arguments": (ravel_pytree([1.0])[1], ravel_pytree((1.0,))[1]),
    "property": (property(doc="a"), property(doc="b")),
    "static method": (staticmethod(max), staticmethod(min)),
    "cycle": (cycle(1), cycle(2)),
    "ladder": (ladder(40), ladder(41)),
}


@pytest.mark.parametrize(("one", "other"), GLOBALS.values(), ids=GLOBALS)
def test_the_globals_of_a_function_count_with_all_that_they_hold(one, other):
    assert told(using(one)) == told(using(copy_of(one))) != told(using(other))


def copy_of(value):
    if isinstance(value, jax.numpy.ufunc):
        # Its name would not lead to the copy.
        return value
    try:
        return copy.deepcopy(value)
    except TypeError:  # it cannot be copied, as a view of memory
        return value


def test_an_object_of_another_class_among_the_globals_counts_by_its_class_and_attributes():
    assert told(using(Plain(1))) == told(using(Plain(1))) != told(using(Plain(2))) != told(using(derived(2)))


def test_the_items_of_a_list_that_hides_them_count():
    assert told(using(Hidden([1]))) == told(using(Hidden([1]))) != told(using(Hidden([2])))


def test_an_object_among_the_globals_is_not_asked_for_anything():
    # Lazy raises whatever it is asked for.
    assert told(using(Lazy())) == told(using(Lazy())) != told(using(Plain(1)))


def test_the_configuration_of_jax_counts_elsewhere():
    before = told(using(jax.config))
    with jax.numpy_dtype_promotion("strict"):
        assert told(using(jax.config)) == before


@pytest.mark.parametrize(
    "value",
    [list(range(400_000)), [np.zeros(1 << 20)], bytes(1 << 21), bytearray(1 << 21), array.array("d", bytes(1 << 21))],
    ids=["objects", "array", "bytes", "bytes that can change", "array of Python's"],
)
def test_a_global_that_is_too_large_to_read_is_refused(value):
    with pytest.raises(CannotSkipError, match="large"):
        told(using(value))


class InC(ctypes.Structure):
    _fields_ = (("rate", ctypes.c_int),)


@pytest.mark.parametrize(
    "value",
    [queue.SimpleQueue(), (number for number in range(3)), InC(1), ValueError(1), threading.Lock(), random.Random(1),
     decimal.Decimal(1), {"a": 1}.values(), re.match("a", "ab"), itertools.count(1), io.StringIO("a"), os.environ,
     weakref.ref(Plain)],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_an_object_whose_state_nobody_can_read_to_the_end_is_refused(value):
    with pytest.raises(CannotSkipError, match=r"unknown type|outside the program"):
        told(using(value))


class Transformation(typing.NamedTuple):
    """Two functions, as an optimizer of optax is."""

    init: Callable[..., object]
    update: Callable[..., object]


def scaling_by(rate, *more):
    def function(x, shift=rate):
        return x * rate + shift, more

    return function


class Settings(collections.abc.Mapping):
    """A mapping whose items come from an attribute, as in many configurations."""

    def __init__(self, **items):
        self._items = items

    def __getitem__(self, name):
        return self._items[name]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


@pytest.mark.parametrize(
    "make",
    [
        lambda rate: (lambda x, shift=rate: x + shift),
        scaling_by,
        lambda rate: scaling_by(0, scaling_by(rate)),
        lambda rate: functools.wraps(max)(scaling_by(rate)),
        lambda rate: jax.jit(scaling_by(rate)),
        lambda rate: [jax.custom_jvp(scaling_by(rate))],
        lambda rate: Transformation(max, scaling_by(rate)),
        lambda rate: jax.nn.initializers.normal(rate),
        lambda rate: Settings(inner=Settings(rate=rate)),
    ],
    ids=["default", "closure", "closure of a closure", "named as another", "jitted", "in a list", "optimizer",
         "initializer", "mapping"],
)  # fmt: skip
def test_what_a_function_among_the_globals_was_made_with_counts(make):
    assert told(using(make(0.5))) == told(using(make(0.5))) != told(using(make(0.25)))


def test_a_function_that_closes_over_itself_can_be_told():
    def function(x):
        return function(x)

    assert told(using(function)) == told(using(function))


def in_a_closure(value):
    return lambda x: x * value.put_there


def in_a_default(value):
    return reading("held.put_there", held=[value])


@pytest.mark.parametrize("make", [in_a_closure, in_a_default])
@pytest.mark.parametrize(
    "owner", [math, json, np, click, jax.scipy, collections.Counter, click.style], ids=lambda owner: owner.__name__
)
@pytest.mark.parametrize(
    "put", [float, lambda value: [value], lambda value: Plain(value), lambda value: np.full(3, value)],
    ids=["a number", "a list", "an object", "an array"],
)  # fmt: skip
def test_what_the_program_has_put_into_others_counts_however_these_are_reached(monkeypatch, owner, make, put):
    digests = []
    for value in (1, 1, 2):
        monkeypatch.setattr(owner, "put_there", put(value), raising=False)
        digests.append(told(make(owner)))
    assert digests[0] == digests[1] != digests[2]


def test_a_function_that_the_program_has_put_into_a_module_of_pythons_counts(monkeypatch):
    digests = []
    for value in (1, 2):
        monkeypatch.setattr(math, "put_there", reading("VALUE", VALUE=value), raising=False)
        digests.append(told(in_a_closure(math)))
    assert digests[0] != digests[1]


def test_a_function_with_builtins_of_its_own_reads_these():
    one, other = ({"__builtins__": {"scale": rate}, "__name__": "apart"} for rate in (2.0, 3.0))
    for space in (one, other):
        exec("def function(x): return x * scale", space)  # noqa: S102
    assert told(one["function"]) != told(other["function"])


def test_a_module_whose_attribute_has_a_computed_name_is_refused():
    def function(x, name):
        return x * getattr(others, name)

    others = math
    with pytest.raises(CannotSkipError, match="computed name: getattr"):
        told(function)
    # All that jax's modules hold is described.
    others = jax.nn
    told(function)


def test_a_mapped_file_is_refused():
    with pytest.raises(CannotSkipError, match=r"outside the program: numpy\.memmap"):
        told(using(np.memmap))
