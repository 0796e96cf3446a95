"""The data in classes, modules and among a function's globals count for the digest of a call."""

from __future__ import annotations

import argparse
import array
import builtins
import collections
import collections.abc
import contextvars
import copy
import ctypes
import dataclasses
import datetime
import enum
import functools
import importlib
import logging
import pathlib
import queue
import random
import re
import struct
import sys
import threading
import types
import typing
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from support.describing import of_text, told, using

import xcache
from xcache.hook.calls import program_objects, program_values
from xcache.hook.structure.encoding import CannotSkipError


@dataclasses.dataclass
class Options:
    rate: float
    layers: tuple[int, ...] = (1, 2)


class Counted:
    factor = 1

    @classmethod
    def scale(cls, x):
        return x * cls.factor


def counted(factor):
    Counted.factor = factor
    return told(Counted.scale), told(Counted)


class Held:
    """Holds what is not plain, as an attribute of the class."""


def holding(value):
    Held.value = value
    return told(Held), told(Held())


def class_of(kind, value):
    """Return a class of this module that has the value as its metaclass's, its nested class's or its fields' data."""
    made = {
        "nested": lambda: type(
            "Made", (), {"Inner": type("Inner", (), {"value": value, "__qualname__": "Made.Inner"})}
        ),
        "default": lambda: dataclasses.make_dataclass("Made", [("value", int, value)], slots=True),
        "metadata": lambda: dataclasses.make_dataclass(
            "Made", [("value", int, dataclasses.field(default=0, metadata={"rate": value}))]
        ),
    }
    if kind == "metaclass":
        meta = type("Meta", (type,), {"value": value, "__module__": __name__})
        globals()["Meta"] = meta
        found = meta("Made", (), {"__module__": __name__})
    else:
        found = made[kind]()
        found.__module__ = __name__
        if kind == "nested":
            found.Inner.__module__ = __name__
    globals()["Made"] = found
    return told(found)


def test_a_class_counts_with_its_plain_attributes():
    assert counted(1) == counted(1)
    assert not set(counted(1)) & set(counted(2))


@pytest.mark.parametrize(
    ("one", "other"), [(np.arange(3), np.arange(4)), (Options(1.0), Options(2.0))], ids=["array", "dataclass"]
)
def test_a_class_and_its_instances_count_with_the_data_of_the_class(one, other):
    assert holding(one) == holding(one)
    assert not set(holding(one)) & set(holding(other))


@pytest.mark.parametrize("kind", ["metaclass", "nested", "default", "metadata"])
def test_a_class_counts_with_the_data_in_its_parts(kind):
    assert class_of(kind, 1) == class_of(kind, 1) != class_of(kind, 2)


class Configured:
    """Has an object of another class, as many configured classes do."""

    def step(self, x):
        return x * self.config.rate + self.configs[0].rate + self.inner.rate


@pytest.mark.parametrize("name", ["config", "configs", "inner"])
@pytest.mark.parametrize(
    "called", [lambda: Configured().step, lambda: reading_closure(Configured), lambda: reading_closure(Configured())]
)
def test_an_object_in_a_class_counts_with_the_attributes_that_a_function_names(name, called, monkeypatch):
    def told_with(rate):
        held = {"config": Deep(rate), "configs": [Deep(rate)], "inner": class_with(rate=rate)}[name]
        monkeypatch.setattr(Configured, name, held, raising=False)
        return told(called())

    assert told_with(1) == told_with(1) != told_with(2)


def reading_closure(held):
    return lambda x: x * held.config.rate + held.configs[0].rate + held.inner.rate


def test_an_object_in_a_module_counts_with_the_attributes_that_a_function_names(monkeypatch):
    def told_with(rate, name):
        part = types.ModuleType("package_of_a_test.part")
        part.rate = rate
        module = types.ModuleType("package_of_a_test")
        vars(module).update({"config": Deep(rate), "part": part, "unused": part})
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return told({"config": lambda x: x * module.config.rate, "part": lambda x: x * module.part.rate}[name])

    for name in ("config", "part"):
        assert told_with(1, name) == told_with(1, name) != told_with(2, name)


@pytest.mark.parametrize("base", [dict, list, tuple, collections.OrderedDict, functools.partial])
def test_the_data_of_a_class_that_extends_a_builtin_one_count(base):
    def told_with(rate):
        kind = type("Extended", (base,), {"__module__": __name__, "rate": rate})
        return told(reading("USED.rate", USED=kind(max) if base is functools.partial else kind()))

    assert told_with(1) == told_with(1) != told_with(2)


def test_the_fields_of_a_named_tuple_and_the_members_of_an_enumeration_count():
    def rows(fields, defaults):
        kind = collections.namedtuple("Row", fields, defaults=defaults, module=__name__)
        return told(reading("USED(x, x)", USED=kind))

    def modes(*names):
        return told(reading("x * [*USED][0].value", USED=enum.Enum("Mode", names, module=__name__)))

    assert rows("low high", (1,)) == rows("low high", (1,))
    assert len({rows("low high", (1,)), rows("high low", (1,)), rows("low high", (2,))}) == 3
    assert modes("A", "B") == modes("A", "B") != modes("B", "A")


def test_the_defaults_of_a_function_count_where_they_are_named():
    def helper(rate):
        return of_text("def function(x, rate=RATE): return x * rate", RATE=rate)

    one, other = (told(reading("x * USED.__defaults__[0]", USED=helper(rate))) for rate in (1, 2))
    assert one == told(reading("x * USED.__defaults__[0]", USED=helper(1))) != other


def test_a_name_among_the_builtins_counts(monkeypatch):
    def told_with(rate):
        monkeypatch.setattr(builtins, "RATE_OF_A_TEST", rate, raising=False)
        return told(of_text("def function(x): return x * RATE_OF_A_TEST"))

    assert told_with(1) == told_with(1) != told_with(2)


def test_a_function_of_xcache_jit_counts_as_one_of_jax_does():
    inner = xcache.jit(of_text("def function(x): return x + 1"), version="1")
    other = xcache.jit(of_text("def function(x): return x + 2"), version="1")
    for outer in (lambda f: functools.partial(f, 1), jax.vmap, lambda f: lambda x: f(x)):
        assert told(outer(inner)) == told(outer(inner)) != told(outer(other))


def test_a_name_with_underscores_is_data_too():
    one, other = (of_text("def function(x): return x * __rate__", __rate__=rate) for rate in (1, 2))
    assert told(one) != told(other)


def test_a_module_counts_with_its_data(monkeypatch):
    module = types.ModuleType("settings_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    digests = []
    for module.rate in (1, 2, 1):
        digests.append(told(module))
    assert digests[0] == digests[2] != digests[1]


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


class Plain:
    """An object of the program's: only its class counts among globals."""

    def __init__(self, rate):
        self.rate = rate


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
    "view of a dictionary": ({"a": 1}.values(), {"a": 2}.values()),
    "chain": (collections.ChainMap({"a": 1}), collections.ChainMap({"a": 2})),
    "dictionary of the library": (collections.UserDict(a=1), collections.UserDict(a=2)),
    "longest deque": (collections.deque([1], 2), collections.deque([1], 3)),
    "time": (datetime.timedelta(1), datetime.timedelta(2)),
    "path": (pathlib.Path("/a"), pathlib.Path("/b")),
    "pattern": (re.compile("a"), re.compile("b")),
    "arguments": (argparse.Namespace(rate=1), argparse.Namespace(rate=2)),
    "argument of a partial": (functools.partial(max, 1), functools.partial(max, 2)),
    "object of a bound method": ([1].count, [2].count),
    "generator of numbers": (random.Random(1), random.Random(2)),
    "tree": (jax.tree.structure([1]), jax.tree.structure((1,))),
    "mesh": (mesh("a"), mesh("b")),
    "partitions": (jax.sharding.PartitionSpec("a"), jax.sharding.PartitionSpec("b")),
    "universal function": (jax.numpy.add, jax.numpy.multiply),
    "function with arguments": (ravel_pytree([1.0])[1], ravel_pytree((1.0,))[1]),
    "match": (re.match("a", "ab"), re.match("a", "ac")),
    "format": (struct.Struct("f"), struct.Struct("ff")),
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


def test_an_object_of_another_class_among_the_globals_counts_by_its_type():
    assert told(using(Plain(1))) == told(using(Plain(2))) != told(using(derived(2)))
    assert told(using(threading.Lock())) == told(using(threading.Lock()))


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


class Deep:
    """An object whose attributes the function reads."""

    def __init__(self, rate, inner=None):
        self.rate, self.inner, self.unused = rate, inner, object()


def module_of(**names):
    made = types.ModuleType("configuration_of_a_test")
    vars(made).update(names)
    return made


def function_of(**names):
    def made():
        """Stand for a function with attributes."""

    vars(made).update(names)
    return made


def class_with(**names):
    return type("Made", (), {"__module__": "configuration_of_a_test", **names})


@pytest.mark.parametrize(
    "make",
    [
        lambda rate: module_of(rate=rate),
        lambda rate: class_with(rate=rate),
        lambda rate: type("Derived", (class_with(rate=rate),), {"__module__": "configuration_of_a_test"}),
        Deep,
        lambda rate: Deep(0, Deep(rate)),
        lambda rate: module_of(inner=Deep(rate)),
        lambda rate: {"a": Deep(rate)},
        lambda rate: function_of(rate=rate),
        lambda rate: jax.jit(function_of(rate=rate)),
    ],
)
def test_the_attributes_that_a_function_names_count(make):
    def using_rate(value):
        return of_text("def function(x): return x * USED.rate + USED.inner.rate", USED=value)

    def using_none(value):
        return of_text("def function(x): return x * USED.other", USED=value)

    assert told(using_rate(make(1))) == told(using_rate(make(1))) != told(using_rate(make(2)))
    assert told(using_none(make(1))) == told(using_none(make(2)))


class InC(ctypes.Structure):
    _fields_ = (("rate", ctypes.c_int),)


class GivenError(ValueError):
    """An exception keeps its arguments where only C code sees them."""


def test_what_c_code_keeps_in_an_object_counts_where_a_function_names_it():
    for name, make in {"rate": InC, "args[0]": GivenError}.items():
        assert told(reading(f"USED.{name}", USED=make(1))) == told(reading(f"USED.{name}", USED=make(1)))
        assert told(reading(f"USED.{name}", USED=make(1))) != told(reading(f"USED.{name}", USED=make(2)))


@pytest.mark.parametrize("value", [queue.SimpleQueue(), (number for number in range(3))])
def test_an_object_of_python_s_that_nobody_can_read_is_refused(value):
    with pytest.raises(CannotSkipError, match="unknown type"):
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


def rated(rate):
    """Return an instance of a class, made anew, that has this as its data."""
    return type("Rated", (), {"__module__": __name__, "rate": rate})()


def reading(text, **names):
    return of_text(f"def function(x): return {text}", **names)


@pytest.mark.parametrize(
    "make",
    [
        lambda rate: lambda: told(reading("USED.rate", USED=rated(rate))),
        lambda rate: lambda: told(reading("USED.rate", USED=local_with(rate))),
        lambda rate: lambda: told(reading("USED.get()", USED=variable_with(rate))),
        lambda rate: lambda: told(using(jax.tree_util.Partial(max, rate))),
    ],
    ids=["attribute of the class", "attribute of a thread", "variable of a context", "partial of jax's"],
)
def test_what_an_object_has_from_elsewhere_counts(make):
    assert make(1)() == make(1)() != make(2)()


def local_with(rate):
    made = threading.local()
    made.rate = rate
    return made


def variable_with(rate):
    made = contextvars.ContextVar("variable")
    made.set(rate)
    return made


@pytest.mark.parametrize("make", [Plain, lambda rate: function_of(rate=rate)])
def test_what_counted_in_part_for_one_function_counts_in_full_elsewhere(make):
    def both(rate):
        held = make(rate)
        first, second = reading("USED.other", USED=held), reading("USED.rate", USED=held)
        return told([first, second]), told([first, held])

    one, other = both(1), both(2)
    assert one[0] != other[0]
    assert one[1] != other[1]


READERS = {
    "pattern": """
def function(x):
    match USED:
        case Kind(rate=rate):
            return x * rate
""",
    "vars": "def function(x): return x * vars(USED)['rate']",
    "dictionary": "def function(x): return x * USED.__dict__['rate']",
    "import": """
def function(x):
    import configuration_of_a_test
    return x * configuration_of_a_test.rate
""",
    "import of a name": """
def function(x):
    from configuration_of_a_test import rate
    return x * rate
""",
}


@pytest.mark.parametrize("text", READERS.values(), ids=READERS)
def test_an_attribute_counts_however_a_function_reads_it(text, monkeypatch):
    def told_with(rate):
        monkeypatch.setitem(sys.modules, "configuration_of_a_test", module_of(rate=rate))
        return told(of_text(text, USED=Plain(rate), Kind=Plain))

    assert told_with(1) == told_with(1) != told_with(2)


def test_the_level_of_a_logger_counts():
    logger = logging.getLogger("logger_of_a_test")
    before = told(using(logger))
    logger.setLevel("ERROR")
    assert told(using(logger)) != before
    logger.setLevel("NOTSET")
    assert told(using(logger)) == before


def test_the_default_of_a_context_variable_counts():
    one, other = (contextvars.ContextVar("v", default=value) for value in (1, 2))
    assert told(using(one)) != told(using(other))
    assert told(using(contextvars.ContextVar("v"))) != told(using(one))


def test_a_function_and_its_name_differ():
    assert told(using(max)) != told(using("builtins.builtin_function_or_method builtins.max"))


def test_a_name_of_an_attribute_is_no_global():
    assert told(reading("x.rate", rate=1)) == told(reading("x.rate", rate=2))
    assert told(reading("rate", rate=1)) != told(reading("rate", rate=2))


def test_a_module_is_not_asked_for_anything_either(monkeypatch):
    module = types.ModuleType("lazy_module_of_a_test")
    asked = []

    def answer(name):
        asked.append(name)
        raise AttributeError(name)

    module.__getattr__ = answer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    told(reading("USED.rate", USED=module))
    told(reading("USED", USED=type("Made", (), {"__module__": module.__name__})()))
    assert asked == []
    assert not hasattr(module, "rate")
    assert asked == ["rate"]


def test_members_that_lead_to_each_other_can_be_told():
    class Side(enum.Enum):
        LEFT = 1
        RIGHT = 2

    Side.__qualname__, Side.LEFT.other, Side.RIGHT.other = "Side", Side.RIGHT, Side.LEFT
    globals()["Side"] = Side
    for held in (Side.LEFT, {Side.LEFT}, [Side.LEFT, Side.RIGHT]):
        assert told(held) == told(held)
        assert told(using(held)) == told(using(held))
    assert told({Side.LEFT}) != told({Side.RIGHT})


def test_a_version_that_a_function_names_counts():
    one, other = (of_text("def function(x): return __version__", __version__=value) for value in "12")
    assert told(one) != told(other)


def library_class(folder, values):
    """Return the class of a library in a folder, whose data are a set of these values."""
    (folder / "library_of_a_test.py").write_text(f"class Of:\n    values = {values}\n")
    sys.modules.pop("library_of_a_test", None)
    return importlib.import_module("library_of_a_test").Of


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_set_in_a_class_of_an_installed_library_has_no_order_unless_it_is_named(tmp_path, monkeypatch, is_installed):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def told_of(text, values):
        folder = tmp_path / str(values)
        folder.mkdir(exist_ok=True)
        if is_installed:
            (folder / "library.dist-info").mkdir(exist_ok=True)
        program_objects.is_installed.cache_clear()
        with monkeypatch.context() as context:
            context.syspath_prepend(str(folder))
            held = library_class(folder, values)
        made = functools.partial(of_text(f"def function(held, x): return {text}"), held)
        monkeypatch.setattr(program_values, "_file_digest", lambda file: "")
        return told(made)

    assert (told_of("x", "{0, 8}") == told_of("x", "{8, 0}")) == is_installed
    assert told_of("[*held.values]", "{0, 8}") != told_of("[*held.values]", "{8, 0}")
    assert told_of("x", "{0, 8}") != told_of("x", "{0, 9}")
