"""What values consist of: the parts of Python's own, attributes and items of others, and what names lead to."""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import dataclasses
import datetime
import functools
import logging
import operator
import re
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jax._src import util

from xcache.hook.calls.program_code import Import, code_of
from xcache.hook.calls.program_origins import JAX, namespace, origin
from xcache.hook.structure.description import NATIVE
from xcache.hook.structure.encoding import CannotSkipError

MISSING: Any = object()
# Texts show objects, such as a dataclass's defaults in its documentation, with their addresses.
_ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]+(?=>)")
_FIELD_OF_NAMED_TUPLE = type(collections.namedtuple("_", "a").__dict__["a"])
# Native classes whose instances are known by their items, and what these are; a class may say something else of itself.
ITEMS: dict[type, Callable[[Any], Any]] = {
    dict: lambda value: list(dict.items(value)),
    collections.OrderedDict: lambda value: list(collections.OrderedDict.__iter__(value)),
    collections.defaultdict: lambda value: value.default_factory,
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    functools.partial: lambda value: (value.func, value.args, value.keywords),
}
# Native classes that add nothing to their instances' attributes.
READABLE = {object, types.SimpleNamespace, threading.local, *ITEMS}


def imported(wanted: Import, names: dict[str, Any], parts: list[str]) -> Any:
    """Return the module that an import in a function's body leads to, or the module that is a part of it."""
    name = wanted.name
    if wanted.level:
        above = str(names.get("__package__")).rsplit(".", wanted.level - 1)[0]
        name = f"{above}.{name}" if name else above
    found = sys.modules.get(name)
    if parts and found is not None and parts[0] not in namespace(found):
        found = sys.modules.get(f"{name}.{parts.pop(0)}")
    if found is None and origin(name) != JAX:
        raise CannotSkipError(f"module imported by the function: {name}")
    # What comes with jax's files is known by its name.
    return name if found is None else found


def attribute(value: Any, name: str) -> Any:
    """Return an attribute of a module or object if it is nothing but an entry of its dictionary, or MISSING."""
    kind = type(value)
    is_module = issubclass(kind, types.ModuleType)
    plain: Any = types.ModuleType.__getattribute__ if is_module else object.__getattribute__
    if kind.__getattribute__ is not plain or any(name in vars(base) for base in kind.__mro__):
        return MISSING
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return MISSING
    if is_module and name not in held and "__getattr__" in held and origin(held.get("__name__")) != JAX:
        raise CannotSkipError(f"attribute that a module computes: {held.get('__name__')}.{name}")
    return held.get(name, MISSING)


def is_native(base: type) -> bool:
    """Return whether a class is written in C, so that its instances may have state that nobody sees."""
    module = sys.modules.get(base.__module__)
    file = None if module is None else namespace(module).get("__file__")
    is_in_python = file.endswith((".py", ".pyc")) if file else base.__module__ not in sys.builtin_module_names
    is_made_in_c = any(type(vars(base).get(name)) in NATIVE for name in ("__new__", "__init__"))
    return is_made_in_c or module is None or not is_in_python


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes, in the order in which they were set; a class may hide some of them."""
    with contextlib.suppress(AttributeError):
        is_local = issubclass(type(value), threading.local)
        yield from (vars(value) if is_local else object.__getattribute__(value, "__dict__")).items()
    for base in type(value).__mro__:
        # A class of C's without slots has members of which its items tell, or which are addresses.
        for name, slot in vars(base).items() if "__slots__" in vars(base) else ():
            if type(slot) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):
                    yield name, slot.__get__(value)


def without_addresses(value: Any) -> str:
    """Return a value as text, which is the same in another process."""
    return _ADDRESS.sub("", str(value))


def _variable(value: contextvars.ContextVar[Any]) -> tuple[Any, ...]:
    try:
        return value.name, value.get()
    except LookupError:
        return (value.name,)


# Types of Python's, and the parts that make up a value of each.
PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    tuple: tuple,
    list: list,
    set: list,
    frozenset: list,
    dict: lambda value: (*value.keys(), *value.values()),
    types.MappingProxyType: lambda value: (*value.keys(), *value.values()),
    collections.deque: lambda value: (value.maxlen, *value),
    range: lambda value: (value.start, value.stop, value.step),
    bytearray: lambda value: (bytes(value),),
    memoryview: lambda value: (value.format, value.shape, value.strides, value.tobytes()),
    array.array: lambda value: (value.typecode, value.tobytes()),
    re.Pattern: lambda value: (value.pattern, value.flags),
    **dict.fromkeys(
        (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, _FIELD_OF_NAMED_TUPLE),
        lambda value: value.__reduce__()[1],
    ),
    datetime.timezone: lambda value: (repr(value),),
    **dict.fromkeys(
        (operator.attrgetter, operator.itemgetter, operator.methodcaller), lambda value: value.__reduce__()[:2]
    ),
    types.MethodType: lambda value: (value.__func__, value.__self__),
    property: lambda value: (value.fget, value.fset, value.fdel, value.__doc__),
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    functools.cached_property: lambda value: (value.func, value.attrname),
    types.CodeType: lambda value: (code_of(value).digest,),
    **dict.fromkeys((types.MemberDescriptorType, types.GetSetDescriptorType), lambda value: (value.__name__,)),
    types.NotImplementedType: lambda _: (),
    typing.TypeVar: lambda value: (value.__name__,),
    dataclasses.Field: lambda value: [
        without_addresses(each) if name in ("type", "_field_type") else each for name, each in attributes(value)
    ],
    contextvars.ContextVar: _variable,
    logging.Logger: lambda value: (value.name, value.getEffectiveLevel(), value.disabled, value.manager.disable),
    util.HashablePartial: lambda value: (value.f, value.args, value.kwargs),
}
# Of these, those that the program can change or compare by identity.
WITH_IDENTITY = (
    list, set, frozenset, dict, types.MappingProxyType, collections.deque, bytearray, array.array,
    contextvars.ContextVar,
)  # fmt: skip
