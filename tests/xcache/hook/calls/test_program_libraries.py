"""Functions of libraries and of Python's modules count as their files say, unless the program has changed something."""

from __future__ import annotations

import abc
import builtins
import collections
import copy
import copyreg
import fractions
import functools
import gc
import json
import numbers
import sys
import textwrap

import click
import pytest
from support.describing import Plain, reading, told, using

from xcache.hook.structure.encoding import CannotSkipError


def echo(*_: object) -> None:
    """Take the place of a function of the library's."""


def test_what_the_program_sets_in_a_library_counts(monkeypatch):
    before = told(using(click.style))
    settings = {"rates": [1]}
    monkeypatch.setattr(click.utils, "RATE_OF_A_TEST", 1, raising=False)
    monkeypatch.setattr(click.utils, "SETTINGS_OF_A_TEST", settings, raising=False)
    seen = {before, told(using(click.style))}
    settings["rates"].append(2)
    seen.add(told(using(click.style)))
    monkeypatch.setattr(click.utils, "RATE_OF_A_TEST", 2)
    seen.add(told(using(click.style)))
    monkeypatch.setattr(click.Context, "rate_of_a_test", 1, raising=False)
    seen.add(told(using(click.style)))
    assert len(seen) == 5
    monkeypatch.undo()
    assert told(using(click.style)) == before


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (click.utils, "echo", echo), (click.Context, "exit", echo), (click.Context, "exit", property(echo)),
        (click.utils, "echo", functools.partial(echo)), (click.style, "__code__", echo.__code__),
    ],
    ids=["in a module", "in a class", "property", "partial", "code"],
)  # fmt: skip
def test_a_library_with_a_function_of_the_program_s_is_refused(owner, name, value, monkeypatch):
    told(using(click.style))
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(CannotSkipError, match="function of a library replaced"):
        told(using(click.style))


@pytest.mark.parametrize(
    ("named", "replace"),
    [
        (copy.copy, lambda patch: patch.setitem(copyreg.dispatch_table, Plain, echo)),
        (copy.deepcopy, lambda patch: patch.setitem(copy._deepcopy_dispatch, Plain, echo)),
        (json.dumps, lambda patch: patch.setattr(json.JSONEncoder, "default", echo)),
        (json.loads, lambda patch: patch.setattr(json, "_default_decoder", json.JSONDecoder(object_hook=echo))),
        (fractions.Fraction, lambda patch: patch.setattr(fractions.Fraction, "__float__", echo)),
        (textwrap.wrap, lambda patch: patch.setattr(textwrap.TextWrapper, "wrap", echo)),
        (collections.Counter, lambda patch: patch.setattr(collections.Counter, "__missing__", echo)),
        (functools.wraps, lambda patch: patch.setattr(functools, "update_wrapper", echo)),
        (len, lambda patch: patch.setattr(builtins, "sum", echo)),
    ],
    ids=["copyreg", "deepcopy", "encoder", "decoder", "fraction", "textwrap", "counter", "functools", "builtins"],
)
def test_a_function_of_the_program_s_in_one_of_python_s_modules_is_refused(named, replace, monkeypatch):
    before = told(using(named))
    with monkeypatch.context() as patch:
        replace(patch)
        with pytest.raises(CannotSkipError, match="function of a library replaced"):
            told(using(named))
    assert told(using(named)) == before


class Abstract(metaclass=abc.ABCMeta):
    """A class of the program's with which others are registered."""

    @abc.abstractmethod
    def apply(self): ...


class DerivedAbstract(Abstract):
    """One that somebody may ask through its base."""


@pytest.mark.parametrize("kind", [Abstract, DerivedAbstract])
def test_a_class_that_is_registered_with_one_of_the_program_s_counts(kind):
    before = told(using(Abstract))
    # Nothing takes it out again, but the registry does not keep it.
    registered = type("Registered", (), {"__module__": __name__})
    kind.register(registered)
    assert told(using(Abstract)) != before
    del registered
    gc.collect()
    assert told(using(Abstract)) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setitem(json.dumps.__kwdefaults__, "separators", (",", ":")),
        lambda patch: patch.setattr(textwrap.indent, "__defaults__", (len,)),
        lambda patch: patch.setattr(json._default_encoder, "item_separator", "; "),
        lambda patch: patch.setitem(json.decoder.BACKSLASH, "n", "m"),
        lambda patch: patch.setattr(fractions.Fraction, "__add__", fractions.Fraction.__mul__),
    ],
    ids=["keyword's default", "default", "object", "dictionary", "method"],
)
def test_what_a_module_of_python_s_holds_counts(change, monkeypatch):
    function = reading("a, b, c", a=json.dumps, b=textwrap.indent, c=fractions.Fraction)
    before = told(function)
    with monkeypatch.context() as patch:
        change(patch)
        assert told(function) != before
    assert told(function) == before


def test_an_object_among_the_modules_that_is_none_is_passed_over(monkeypatch):
    before = told(using(click.style))
    monkeypatch.setitem(sys.modules, "held_by_a_test", object())
    assert told(using(click.style)) == before


def test_a_class_that_the_program_has_registered_with_an_abstract_one_of_python_s_is_refused():
    told(using(numbers.Real))
    # Nothing takes a class out again, but the registry does not keep it.
    registered = type("Registered", (), {"__module__": __name__})
    numbers.Real.register(registered)
    with pytest.raises(CannotSkipError, match=r"class with registered subclasses: numbers\."):
        told(using(numbers.Real))


@pytest.mark.parametrize(
    "register",
    [
        lambda held: setattr(click.utils, "HELD_BY_A_TEST", {"a": [(held,)]}),
        lambda held: setattr(click.utils, "HELD_BY_A_TEST", click.Option(["--held"], callback=held)),
        lambda held: setattr(click.Context, "held_by_a_test", [held]),
    ],
    ids=["dictionary", "object", "list of a class"],
)
def test_a_library_with_which_the_program_has_registered_something_is_refused(register, monkeypatch):
    monkeypatch.setattr(click.utils, "HELD_BY_A_TEST", {}, raising=False)
    monkeypatch.setattr(click.Context, "held_by_a_test", [], raising=False)
    for held in (len, click.echo, int, click.Option):
        register(held)
        told(using(click.style))
    for held in (echo, Plain):
        register(held)
        with pytest.raises(CannotSkipError, match="function of a library replaced"):
            told(using(click.style))
