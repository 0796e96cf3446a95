"""Find out whether a callable is jax's own code, with everything it reaches; its name then says what it does.

jax's files are part of the digest, so code of theirs is known. A program's code is not: it can do anything.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax._src import core

from xcache.hook.structure.encoding import CannotSkipError, Encoding, encodes, tagged, text, type_name

ROOTS = tuple(f"{Path(package.__file__).resolve().parent}/" for package in (jax, jaxlib))
_PACKAGES = ("jax", "jaxlib")
# Modules whose functions jax builds its own from, as decorators and the like.
_BUILDING = ("contextlib", "functools", "operator", "builtins")
# Modules whose classes run no code of the program.
_HARMLESS = (
    *_BUILDING,
    "numpy",
    "ml_dtypes",
    "collections",
    "enum",
    "types",
    "nanobind",
    "inspect",
    "weakref",
    "_thread",
)
_PLAIN = (str, bool, int, float)
NATIVE = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType, np.ufunc,
)  # fmt: skip


def is_of_jaxs_files(function: types.FunctionType) -> bool:
    """Return whether jax's own files define a function, as its globals tell; a decorator can lend it any name."""
    module, file = function.__globals__.get("__name__", ""), function.__code__.co_filename
    # namedtuple and dataclass generate code that has no file; namedtuple's has globals of its own.
    return module.startswith("namedtuple_") or (is_of_jax(module) and file.startswith((*ROOTS, "<")))


@functools.cache
def is_of_jax(module: str | None) -> bool:
    """Return whether a module belongs to jax or jaxlib, by its name."""
    return module is not None and module.split(".", 1)[0] in _PACKAGES


# Objects that were found to be jax's own, or are being examined, by id; this keeps the ids in use.
Seen = dict[int, Any]


def is_own(function: Any, seen: Seen | None = None) -> bool:
    """Return whether a callable, with all it closes over, is jax's own code.

    ``seen`` spares what earlier calls have found to be so; after one that returned False it must not be used again.
    """
    return _is_own(function, {} if seen is None else seen)


def is_own_primitive(primitive: Any, seen: Seen | None = None) -> bool:
    """Return whether a primitive and its abstract evaluation are jax's own."""
    return _is_own_primitive(primitive, {} if seen is None else seen)


def _is_own(value: Any, seen: Seen) -> bool:
    if value is None or type(value) in _PLAIN or id(value) in seen:
        return True
    seen[id(value)] = value
    if isinstance(value, functools.partial):
        return _are_own((value.func, *value.args, *value.keywords.values()), seen)
    if isinstance(value, types.MethodType):
        return _are_own((value.__func__, value.__self__), seen)
    if isinstance(value, types.FunctionType):
        return _is_own_function(value, seen)
    if isinstance(value, NATIVE):
        return True
    if isinstance(value, type):
        return is_of_jax(value.__module__) or _is_harmless(value.__module__)
    if isinstance(value, core.Primitive):
        return _is_own_primitive(value, seen)
    if isinstance(value, (tuple, list, set, frozenset)):
        return _are_own(value, seen)
    if isinstance(value, dict):
        return _are_own((*value.keys(), *value.values()), seen)
    kind = type(value)
    if not (is_of_jax(kind.__module__) or _is_harmless(kind.__module__)):
        return False
    return _are_own((getattr(value, "__wrapped__", None), *attributes_of(value).values()), seen)


def _is_own_function(function: types.FunctionType, seen: Seen) -> bool:
    if not is_of_jaxs_files(function) and function.__globals__.get("__name__") not in _BUILDING:
        return False
    held: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    return _are_own((*held, getattr(function, "__wrapped__", None)), seen)


def _is_own_primitive(primitive: Any, seen: Seen) -> bool:
    attributes = primitive.__dict__
    return is_of_jax(type(primitive).__module__) and _are_own(
        [attributes.get(name) for name in ("abstract_eval", "bind", "bind_with_trace")], seen
    )


def _are_own(values: Iterable[Any], seen: Seen) -> bool:
    return all(_is_own(value, seen) for value in values)


@functools.cache
def _is_harmless(module: str) -> bool:
    return module.split(".", 1)[0] in _HARMLESS


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of a class that is written in Python."""
    found = dict(getattr(value, "__dict__", {}))
    slots = _slots_of(type(value))  # type: ignore[arg-type] # a type is hashable
    found.update((slot, getattr(value, slot)) for slot in slots if hasattr(value, slot))
    return found


@functools.cache
def _slots_of(kind: type) -> tuple[str, ...]:
    slots = (base.__dict__.get("__slots__", ()) for base in kind.__mro__)
    each = (slot for one in slots for slot in ((one,) if isinstance(one, str) else one))
    return tuple(slot for slot in each if slot not in ("__dict__", "__weakref__"))


def function(encoding: Encoding, value: Any) -> None:
    """Write a function by its name, if it is jax's own and that name leads to it."""
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    found: Any = sys.modules.get(module) if is_of_jax(module) and module else None
    for part in (qualified or "").split("."):
        found = getattr(found, part, None)
    if found is None or found is not value or not is_own(value):
        raise CannotSkipError(f"callable outside jax: {module}.{qualified or type(value).__qualname__}")
    encoding.write(tagged(b"fn", f"{module}.{qualified}".encode()))


@encodes(functools.partial)
def _partial(encoding: Encoding, value: functools.partial[Any]) -> None:
    encoding.write(b"partial")
    encoding.encode_all((value.func, value.args, value.keywords))


_STANDARD = ("builtins", "numpy", "ml_dtypes", "enum", "typing", "abc", "collections", "dataclasses", "functools",
             "contextlib", "types")  # fmt: skip


@encodes(type)
def class_(encoding: Encoding, value: type) -> None:
    """Write a class by its name, if it is jax's or the standard library's."""
    if not (is_of_jax(value.__module__) or value.__module__.split(".", 1)[0] in _STANDARD):
        raise CannotSkipError(f"class outside jax: {type_name(value)}")
    encoding.write(b"t" + text(type_name(value)))


def encoder_for(value: Any) -> Any:
    """Return the function for values of a type that is not in the table, or None."""
    if isinstance(value, type):
        return class_
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return function
    return None
