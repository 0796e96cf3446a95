"""The data among the names of a module, a class, or a function's globals, which a program can change as it runs.

Plain values, arrays, containers, and objects of Python's, numpy's and jax's classes count with all that they hold, and
so do dataclasses and mappings. A function, class or module counts by its name, and any other object of the program's by
its type, with those of their attributes that the function names. A function also counts with its closure and defaults.
"""

from __future__ import annotations

import collections.abc
import contextlib
import enum
import functools
import os
import threading
import types
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xcache.hook.calls.program_code import names_in
from xcache.hook.calls.program_objects import (
    NAMED,
    attributes,
    is_hash,
    is_installed,
    is_named,
    is_standard,
    label,
    namespace,
    reduced,
)
from xcache.hook.structure import code
from xcache.hook.structure.encoding import text, type_name

if TYPE_CHECKING:
    from xcache.hook.calls.program_values import ProgramEncoding

# Tested with ``issubclass``: ``isinstance`` asks the object itself, which may import what it stands for.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, np.dtype, enum.Enum, np.ndarray, jax.Array,
          types.CodeType)  # fmt: skip
_BUILTIN: tuple[Any, ...] = (dict, list, tuple, set, frozenset, types.MappingProxyType)
# Attributes in which Python keeps the members of an enumeration and the fields of a named tuple.
_OF_MADE_CLASSES = frozenset(("_member_map_", "_fields", "_field_defaults"))
# Descriptors in the classes of C code, which compute an attribute from the object.
_FIELDS_OF_C = ("getset_descriptor", "member_descriptor", "CField")
# Names that Python gives to modules and classes, and that say where they are or what they are called.
_OF_PYTHON = frozenset((
    "__name__", "__qualname__", "__module__", "__file__", "__path__", "__cached__", "__doc__", "__loader__", "__spec__",
    "__package__", "__builtins__", "__warningregistry__", "__annotations__", "__dict__", "__weakref__", "__all__",
    "__version__", "__slots__", "__match_args__", "__firstlineno__", "__static_attributes__", "__parameters__",
    "__orig_bases__", "__abstractmethods__", "_abc_impl", "__dataclass_fields__", "__dataclass_params__",
    "__slotnames__",
))  # fmt: skip


def write_data(encoding: ProgramEncoding, names: Mapping[str, Any], named: frozenset[str] = frozenset()) -> None:
    """Write names in alphabetical order, and what is known of their values.

    ``named`` are the attributes that a function names, if these are its globals: it reads no others.
    """
    encoding.write(b"D%d" % len(names))
    for name in sorted(names):
        encoding.write(text(name))
        _write(encoding, names[name], named)


def data_of_module(module: types.ModuleType, named: frozenset[str]) -> dict[str, Any]:
    """Return the names of a module that lead to data, or that are ``named``: others come and go with imports."""
    held = {name: value for name, value in namespace(module).copy().items() if name not in _OF_PYTHON}
    return {name: value for name, value in held.items() if name in named or not issubclass(type(value), NAMED)}


def write_data_of_class(encoding: ProgramEncoding, kind: type, named: frozenset[str]) -> None:
    """Write the attributes that a class has from itself and its bases, except those that Python gives it.

    Sets have no order in those of an installed library, unless the function names them.
    """
    held = {name: value for name, value in attributes_of_class(kind).items() if name not in _OF_PYTHON}
    is_own = not is_installed(kind.__module__)
    ordered = {name: value for name, value in held.items() if is_own or name in named}
    write_data(encoding, ordered, named)
    with encoding.unordered():
        write_data(encoding, {name: value for name, value in held.items() if name not in ordered}, named)


def _write(encoding: ProgramEncoding, value: Any, named: frozenset[str]) -> None:
    kind = type(value)
    encoding.count()
    if issubclass(kind, _PLAIN):
        encoding.encode(value)
    elif issubclass(kind, NAMED):
        encoding.write(b"N" + text(label(value)))
        if kind is types.BuiltinMethodType and not isinstance(value.__self__, types.ModuleType):
            _write(encoding, value.__self__, named)
        if kind is types.FunctionType:
            _write_made_with(encoding, value)
        if (named or issubclass(kind, type)) and not encoding.met_data(value, named):
            _write_named(encoding, value, named)
    elif encoding.met_data(value, named):
        return
    elif kind in _BUILTIN:
        _write_container(encoding, value, named)
    elif value is os.environ:
        # Each shell has another one, and a program reads little of it.
        encoding.write(text(label(value)))
    elif is_standard(kind.__module__):
        _write_parts(encoding, kind, reduced(value), named)
        if issubclass(kind, threading.local):
            _write_named(encoding, value, named)
    elif issubclass(kind, _BUILTIN):
        _write_container(encoding, value, named)
        _write_instance(encoding, value, named)
    elif issubclass(kind, functools.partial):
        _write_parts(encoding, kind, (value.func, value.args, value.keywords), named)
        _write_instance(encoding, value, named)
    elif code.is_of_jax(kind.__module__) and _is_data_of_jax(value):
        encoding.encode(value)
    elif any("__dataclass_fields__" in vars(base) for base in kind.__mro__):
        _write_instance(encoding, value, named)
    elif issubclass(kind, collections.abc.Mapping):
        # Its items come from its attributes.
        _write_instance(encoding, value, named)
    else:
        encoding.write(text(f"a {label(value)}"))
        wrapped = vars(value).get("__wrapped__") if code.is_of_jax(kind.__module__) else None
        if type(wrapped) is types.FunctionType:
            _write_made_with(encoding, wrapped)
        _write_named(encoding, value, named)


def _write_made_with(encoding: ProgramEncoding, value: types.FunctionType) -> None:
    """Write what a function was made with, beside its code: its closure and its defaults."""
    if (code.is_of_jax(value.__module__) or is_standard(value.__module__)) and is_named(value):
        return
    made_with = [each.cell_contents for each in value.__closure__ or () if not _is_empty(each)]
    made_with += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    _, named, _ = names_in(value.__code__)
    if made_with and not encoding.met_data(value, named | {"__closure__"}):
        _write_parts(encoding, tuple, made_with, named)


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - it raises if there is nothing
    except ValueError:
        return True
    return False


def _write_instance(encoding: ProgramEncoding, value: Any, named: frozenset[str]) -> None:
    """Write an object's attributes, and those of its class."""
    kind = type(value)
    _write_parts(encoding, kind, [item for item in attributes(value) if not is_hash(value, *item)], named)
    if not encoding.met_data(kind, named):
        write_data_of_class(encoding, kind, named)


def _write_named(encoding: ProgramEncoding, value: Any, named: frozenset[str]) -> None:
    """Write those attributes of a module, class, function or object that the code names."""
    kind = type(value)
    own: Iterable[str] = named
    if issubclass(kind, types.ModuleType):
        held = namespace(value)
        home = held.get("__name__")
    elif issubclass(kind, type):
        home, held = value.__module__, attributes_of_class(value)
        if issubclass(kind, enum.EnumMeta):
            held["_member_map_"] = {name: vars(each) for name, each in held["_member_map_"].items()}
        named |= _OF_MADE_CLASSES
        own = named
    elif issubclass(kind, types.FunctionType):
        home, held = None, {**vars(value), "__defaults__": value.__defaults__, "__kwdefaults__": value.__kwdefaults__}
        own = list(held)
    else:
        home, held = None, dict(attributes(value))
        own = list(held)
        if not is_standard(kind.__module__) and not code.is_of_jax(kind.__module__):
            held = attributes_of_class(kind) | held
            # C code computes these from the object, without a call into Python.
            fields = [name for name in named if name in held and type(held[name]).__name__ in _FIELDS_OF_C]
            for name in fields:
                with contextlib.suppress(AttributeError, ValueError):
                    held[name] = held[name].__get__(value, kind)
    # A function that asks for the dictionary may read all of it.
    found = {name: held[name] for name in (own if "__dict__" in named else named) if name in held}
    if found and not code.is_of_jax(home) and not is_standard(home):
        write_data(encoding, found, named)


def _is_data_of_jax(value: Any) -> bool:
    """Return whether an object of jax's is data, not a function with a name; the configuration counts elsewhere."""
    is_function = callable(value) and isinstance(getattr(value, "__qualname__", None), str)
    return isinstance(value, jax.sharding.Mesh) or not (is_function or value is jax.config)


def _write_container(encoding: ProgramEncoding, value: Any, named: frozenset[str]) -> None:
    kind = type(value)
    base = next(each for each in _BUILTIN if issubclass(kind, each))
    # A class of the program's may say something else of itself.
    is_mapping = base in (dict, types.MappingProxyType)
    if base in (set, frozenset) and encoding.is_unordered:
        encoding.write(text(type_name(kind)))
        encoding.write_unordered(value, lambda inner, each: _write(inner, each, named))
        return
    parts = [*base.keys(value), *base.values(value)] if is_mapping else base.__iter__(value)
    _write_parts(encoding, kind, parts, named)


def _write_parts(encoding: ProgramEncoding, kind: type, parts: Iterable[Any], named: frozenset[str]) -> None:
    parts = tuple(parts)
    encoding.write(text(f"{type_name(kind)} {len(parts)}"))
    for each in parts:
        _write(encoding, each, named)


def attributes_of_class(kind: type) -> dict[str, Any]:
    """Return the attributes that a class has from itself and its bases."""
    return {name: value for base in reversed(kind.__mro__[:-1]) for name, value in vars(base).items()}
