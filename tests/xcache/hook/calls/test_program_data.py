"""The data in classes and modules, and the attributes that a function names, count for the digest of a call."""

from __future__ import annotations

import builtins
import collections
import collections.abc
import contextvars
import dataclasses
import enum
import functools
import logging
import sys
import threading
import types

import jax
import numpy as np
import pytest
from support.describing import Plain, of_text, reading, told, using

import xcache
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

    assert told(using_rate(make(1))) == told(using_rate(make(1))) != told(using_rate(make(2)))


def rated(rate):
    """Return an instance of a class, made anew, that has this as its data."""
    return type("Rated", (), {"__module__": __name__, "rate": rate})()


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
    for text in ("USED.rate", "USED"):
        with pytest.raises(CannotSkipError, match="attribute that a module computes"):
            told(reading(text, USED=module))
    told(reading("USED", USED=type("Made", (), {"__module__": module.__name__})()))
    assert asked == []


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
