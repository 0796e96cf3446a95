"""The data in classes, modules and among a function's globals count for the digest of a call."""

from __future__ import annotations

import dataclasses
import sys
import types

import numpy as np
import pytest
from support.describing import of_text, told


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
