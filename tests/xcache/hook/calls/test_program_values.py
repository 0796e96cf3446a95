"""The content of the program's own values: equal where it is the same, and different where anything differs."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import datetime
import enum
import fractions
import functools
import operator
import pathlib
import random
import re
import types
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.describing import of_text, told, using

from xcache.hook.structure.encoding import CannotSkipError


class Colour(enum.Enum):
    RED, BLUE = 1, 2


@dataclasses.dataclass
class Options:
    rate: float
    layers: tuple[int, ...] = (1, 2)


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


class Point(collections.namedtuple("Point", "x y")):
    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class Hashing:
    num_hashes: int
    use_hash: bool = True


class Cached:
    @functools.cached_property
    def rate(self):
        return 1

    def with_rate(self, rate):
        self.rate = rate
        return self


def with_derivative(factor):
    @jax.custom_vjp
    def function(x):
        return x

    function.defvjp(lambda x: (x, None), lambda _, slope: (slope * factor,))
    return function


class Settings(dict):
    """A dictionary of the program's own class."""


def scaling(factor, by=1):
    def scaled(x, plus=by):
        return x * factor + plus

    return scaled


def with_attribute(rate):
    function = of_text("def function(x): return x * function.rate")
    function.rate = rate
    return function


class HashOfOne:
    def __init__(self, num_hashes):
        self.num_hashes = num_hashes

    def __hash__(self):
        return hash(self.num_hashes)


class HashOnly:
    def __init__(self, number):
        self._hash = number

    def __hash__(self):
        return self._hash


class Rated(functools.partial):
    """A partial of the program's own."""


class Shadowing:
    __slots__ = ("held",)


class Shadowed(Shadowing):
    held = property(lambda self: 7)


def shadowed(value):
    made = Shadowed()
    Shadowing.held.__set__(made, value)
    return made


class Hiding:
    def __init__(self, value):
        self.value = value

    def __getattribute__(self, name):
        return {} if name == "__dict__" else object.__getattribute__(self, name)


def with_attributes(*names):
    made = types.SimpleNamespace()
    for name in names:
        setattr(made, name, 1)
    return made


def ordered(**attributes):
    made = collections.OrderedDict(a=1)
    vars(made).update(attributes)
    return made


def documented(text, annotation=None):
    def function(x):
        return x

    function.__doc__, function.__annotations__ = text, {"x": annotation}
    return function


def closing_over_nothing(is_empty):
    def function(x):
        return x * held

    if not is_empty:
        held = None
    return function


def read_only(array):
    array.flags.writeable = False
    return array


def with_factor(factor):
    partial = functools.partial(scaling)
    partial.factor = factor
    return partial


class Shouting(str):
    __slots__ = ()

    def __str__(self):
        return "!"


SAME = {
    "closure": lambda: scaling(2.0),
    "partial": lambda: functools.partial(scaling(2.0), plus=3),
    "method": lambda: Options(1.0).__eq__,
    "bound": lambda: Slotted(2).__reduce__,
    "dataclass": lambda: Options(1e-3),
    "slots": lambda: Slotted([1, {"a": 2}]),
    "named tuple": lambda: Point(1, 2),
    "dictionary": lambda: Settings(a=1),
    "namespace": lambda: types.SimpleNamespace(a=1, b=(2, None)),
    "enum": lambda: Colour.RED,
    "class": lambda: Options,
    "module": lambda: jnp,
    "jitted": lambda: jax.jit(scaling(2.0)),
    "function of jax": lambda: jax.nn.gelu,
    "dtype": lambda: np.dtype("float32"),
    "jax's dtype": lambda: jnp.bfloat16,
    "array": lambda: np.arange(3),
    "tree": lambda: jax.tree.structure({"a": Point(1, [2])}),
    "code": lambda: of_text("def function(x): return x + 1"),
    "recursive": lambda: recursive(),
    "field named as a hash": lambda: Hashing(2),
    "derivative": lambda: with_derivative(2.0),
    "bound method of C's": lambda: {"a": 2.0}.get,
    "large array": lambda: jnp.arange(1000),
}
DIFFERENT = {
    "value closed over": (lambda: scaling(2.0), lambda: scaling(2)),
    "default": (lambda: scaling(2.0), lambda: scaling(2.0, by=2)),
    "partial's argument": (lambda: functools.partial(max, 1), lambda: functools.partial(max, 2)),
    "field named as a hash": (lambda: Hashing(2), lambda: Hashing(3)),
    "another such field": (lambda: Hashing(2), lambda: Hashing(2, use_hash=False)),
    "derivative": (lambda: with_derivative(2.0), lambda: with_derivative(3.0)),
    "option of jit": (lambda: jax.jit(scaling), lambda: jax.jit(scaling, static_argnums=1)),
    "object of a method of C's": (lambda: {"a": 2.0}.get, lambda: {"a": 3.0}.get),
    "number of a method of C's": (lambda: (2.0).__mul__, lambda: (3.0).__mul__),
    "cached property that was set": (lambda: Cached().with_rate(2), lambda: Cached().with_rate(3)),
    "element of a large array": (lambda: jnp.arange(1000), lambda: jnp.arange(1000).at[999].set(0)),
    "key of a generator": (lambda: jax.random.key(0), lambda: jax.random.key(1)),
    "object of a method": (lambda: Options(1.0).__eq__, lambda: Options(2.0).__eq__),
    "field": (lambda: Options(1e-3), lambda: Options(1e-3, (1, 3))),
    "slot": (lambda: Slotted(1), lambda: Slotted(2)),
    "item": (lambda: Settings(a=1), lambda: Settings(a=2)),
    "member": (lambda: Colour.RED, lambda: Colour.BLUE),
    "class": (lambda: Options, lambda: Slotted),
    "jitted": (lambda: jax.jit(scaling(2.0)), lambda: jax.jit(scaling(3.0))),
    "element": (lambda: np.arange(3), lambda: np.array([0, 1, 3])),
    "element of jax's": (lambda: jnp.array([True]), lambda: jnp.array([False])),
    "key": (lambda: jax.random.key(0), lambda: jnp.zeros(())),
    "type of array": (lambda: np.arange(3), lambda: np.arange(3.0)),
    "tree": (lambda: jax.tree.structure((1, 2)), lambda: jax.tree.structure([1, 2])),
    "constant": (lambda: of_text("def function(x): return x + 1"), lambda: of_text("def function(x): return x + 2")),
    "inner constant": (
        lambda: of_text("def function(x): return [y + 1 for y in x]"),
        lambda: of_text("def function(x): return [y + 2 for y in x]"),
    ),
    "global": (
        lambda: of_text("def function(x): return x * RATE", RATE=1e-3),
        lambda: of_text("def function(x): return x * RATE", RATE=1e-4),
    ),
    "global array": (
        lambda: of_text("def function(x): return x * TABLE", TABLE=np.arange(3)),
        lambda: of_text("def function(x): return x * TABLE", TABLE=np.arange(4)),
    ),
    **{
        f"global {name}": (lambda one=one: using(one), lambda other=other: using(other))
        for name, one, other in (
            ("numpy scalar", np.float32(2), np.float32(3)),
            ("dictionary with a function", {"a": 1, "f": max}, {"a": 2, "f": max}),
            ("fraction", fractions.Fraction(1), fractions.Fraction(2)),
            ("text of another class", Shouting("a"), Shouting("b")),
            ("dictionary with defaults", collections.defaultdict(int, a=1), collections.defaultdict(int, a=2)),
            ("range", range(2), range(3)),
            ("namespace", types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
            ("tuple of arrays", (np.arange(3),), (np.arange(4),)),
            ("dataclass", Options(1.0), Options(2.0)),
            ("list", [1, [2]], [1, [3]]),
            ("dictionary", {"a": {1}}, {"a": {2}}),
            ("member", Colour.RED, Colour.BLUE),
            ("dtype", np.dtype("float32"), np.dtype("int32")),
            ("type", jnp.float32, jnp.bfloat16),
        )
    },
    "private global": (
        lambda: of_text("def function(x): return x * __rate", __rate=2.0),
        lambda: of_text("def function(x): return x * __rate", __rate=3.0),
    ),
    "weak type": (lambda: jnp.asarray(1.0), lambda: jnp.float32(1)),
    "place of an array": (lambda: jnp.ones(2), lambda: jax.device_put(jnp.ones(2), jax.devices()[0])),
    "attribute of a function": (lambda: with_attribute(2), lambda: with_attribute(3)),
    "only field, and its hash": (lambda: HashOfOne(2), lambda: HashOfOne(3)),
    "nothing but a number named hash": (lambda: HashOnly(2), lambda: HashOnly(3)),
    "attribute of a partial": (lambda: with_factor(2), lambda: with_factor(3)),
    "function of jax's in a closure": (lambda: scaling(jnp.add), lambda: scaling(jnp.multiply)),
    "method of a function of jax's": (lambda: scaling(jnp.add.reduce), lambda: scaling(jnp.multiply.reduce)),
    "function over a function of jax's": (lambda: scaling(jnp.add), lambda: with_attribute(jnp.add)),
    "order of numbers in a set": (lambda: {0, 8}, lambda: {8, 0}),
    "order of keywords": (lambda: functools.partial(max, a=1, b=1), lambda: functools.partial(max, b=1, a=1)),
    "order of attributes": (lambda: with_attributes("a", "b"), lambda: with_attributes("b", "a")),
    "kind of dictionary": (lambda: {"a": 1}, lambda: collections.OrderedDict(a=1)),
    "view of a dictionary": (lambda: {"a": 1}, lambda: types.MappingProxyType({"a": 1})),
    "kind of set": (lambda: {1}, lambda: frozenset({1})),
    "attribute of a dictionary": (lambda: ordered(rate=1), lambda: ordered(rate=2)),
    "one list twice": (lambda: [[1], [1]], lambda: [[1]] * 2),
    "one array twice": (lambda: [np.arange(3), np.arange(3)], lambda: [np.arange(3)] * 2),
    "order in memory": (lambda: np.ones((2, 3)), lambda: np.asfortranarray(np.ones((2, 3)))),
    "array that may not change": (lambda: np.ones(2), lambda: read_only(np.ones(2))),
    "documentation": (lambda: documented("a"), lambda: documented("b")),
    "annotation": (lambda: documented("a", 1), lambda: documented("a", 2)),
    "empty cell": (lambda: closing_over_nothing(True), lambda: closing_over_nothing(False)),
    "slot under a property": (lambda: shadowed(2), lambda: shadowed(3)),
    "hidden attribute": (lambda: Hiding(2), lambda: Hiding(3)),
    "text of another class": (lambda: Shouting("a"), lambda: Shouting("b")),
    **{
        f"{type(one).__name__} of Python's": (lambda one=one: scaling(one), lambda other=other: scaling(other))
        for one, other in (
            (range(2), range(3)),
            (array.array("i", [1]), array.array("i", [2])),
            (bytearray(b"a"), bytearray(b"b")),
            (collections.deque([1], 2), collections.deque([1], 3)),
            (collections.defaultdict(int, a=1), collections.defaultdict(list, a=1)),
            (datetime.timedelta(1), datetime.timedelta(2)),
            (pathlib.Path("/a"), pathlib.Path("/b")),
            (re.compile("a"), re.compile("a", re.IGNORECASE)),
        )
    },
    "literal": (lambda: typing.Literal["a"], lambda: typing.Literal["b"]),
    "member in a set": (lambda: {Colour.RED}, lambda: {Colour.BLUE}),
    "path in a set": (lambda: {pathlib.Path("/a")}, lambda: {pathlib.Path("/b")}),
    "operation": (lambda: of_text("def function(x): return x + 1"), lambda: of_text("def function(x): return x - 1")),
    "name called": (lambda: of_text("def function(x): return f(x)"), lambda: of_text("def function(x): return g(x)")),
}


def recursive():
    held = Slotted(None)
    held.held = [held]
    return held


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_the_same_content_has_the_same_digest(make):
    assert told(make()) == told(make())


@pytest.mark.parametrize("make", DIFFERENT.values(), ids=DIFFERENT)
def test_another_content_has_another_digest(make):
    first, second = make
    assert told(first()) != told(second())


def test_a_value_counts_the_same_whatever_was_met_before_it():
    before = told(jnp.add)
    # A copy is described by content, because its name leads to another object.
    assert told(copy.deepcopy(jnp.add)) != before
    assert told(jnp.add) == before


def test_a_place_does_not_count():
    moved = of_text("\n\n\ndef function(x): return x + 1")
    assert told(moved) == told(of_text("def function(x): return x + 1"))


def test_a_set_counts_in_the_order_in_which_the_program_meets_it():
    # Their hashes meet, so the first one stands first.
    one, other = {0, 8}, {8, 0}
    assert [*one] != [*other]
    for of in (lambda held: held, frozenset, lambda held: Options(0.1, held), lambda held: using(held)):
        assert told(of({0, 8})) == told(of({0, 8})) != told(of({8, 0}))


def test_what_a_dtype_carries_cannot_be_told():
    with pytest.raises(CannotSkipError):
        told(np.dtype("f4", metadata={"rate": 2}))


def local_class(number):
    return type("Local", (), {"number": number})


def pair(fields):
    return collections.namedtuple("Pair", fields)(1, 2)


@pytest.mark.parametrize(
    ("one", "again", "other"),
    [
        (local_class(1), local_class(1), local_class(2)),
        (local_class(1)(), local_class(1)(), local_class(2)()),
        (pair("x y"), pair("x y"), pair("y x")),
        (jax.tree.structure(pair("x y")), jax.tree.structure(pair("x y")), jax.tree.structure(pair("y x"))),
        (Rated(jnp.sin, 2), Rated(jnp.sin, 2), Rated(jnp.sin, 3)),
        (operator.itemgetter("a"), operator.itemgetter("a"), operator.itemgetter("b")),
        (memoryview(b"a"), memoryview(b"a"), memoryview(b"b")),
        (np.poly1d([1]), np.poly1d([1]), np.poly1d([2])),
    ],
)
def test_what_its_name_does_not_lead_to_counts_by_its_content(one, again, other):
    assert told(one) == told(again) != told(other)


@pytest.mark.parametrize(
    "value",
    [
        random.Random(1),
        np.frompyfunc(lambda x: x, 1, 1),
    ],
)
def test_what_c_code_holds_cannot_be_described(value):
    with pytest.raises(CannotSkipError):
        told(value)


@pytest.mark.parametrize(
    "value",
    [
        iter(()),
        (each for each in ()),
        np.random.default_rng(0),
        np.zeros(10_000_000, np.int8),
        jax.make_jaxpr(jnp.sin)(1.0),
        Slotted(jnp.zeros(10_000_000, np.int8)),
    ],
)
def test_what_cannot_be_told_is_not_told_by_its_class_in_a_closure_either(value):
    for held in (value, scaling(value), functools.partial(scaling, value), Slotted(value)):
        with pytest.raises(CannotSkipError):
            told(held)


def test_an_object_is_not_followed_for_ever():
    with pytest.raises(CannotSkipError):
        told([Slotted(number) for number in range(400_000)])
    with pytest.raises(CannotSkipError):
        told(np.zeros(10_000_000, np.int8))
    assert told(Path("a")) != told(Path("b"))
