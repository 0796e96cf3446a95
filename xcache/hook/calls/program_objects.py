"""Write what an object consists of: class, attributes and items, or what pickle would store of one of Python's."""

from __future__ import annotations

import array
import collections.abc
import contextlib
import contextvars
import copy
import copyreg
import datetime
import decimal
import functools
import logging
import os
import re
import struct
import sys
import threading
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from xcache.hook.structure import code
from xcache.hook.structure.encoding import CannotSkipError, text, type_name

if TYPE_CHECKING:
    from xcache.hook.calls.program_values import ProgramEncoding

# Native classes whose instances are known by their items, and what these are.
_ITEMS: dict[type, Any] = {
    # A class of the program's may say something else of itself.
    dict: lambda value: dict(dict.items(value)),
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
}
# Classes of Python's whose objects are all that pickle would store of them.
STANDARD = (
    range, bytearray, array.array, collections.deque, collections.defaultdict, datetime.date, datetime.datetime,
    datetime.time, datetime.timedelta, datetime.timezone, decimal.Decimal, re.Pattern, type(typing.Literal),
)  # fmt: skip
# The most bytes of one text or array.
MOST_BYTES = 1024 * 1024
# Where Python's own modules are.
_PYTHON = f"{Path(os.__file__).parent}/"
# Modules of Python's classes whose objects are no data: locks, files, connections.
_WITHOUT_DATA = ("_thread", "_io", "multiprocessing.synchronize", "socket", "ssl", "weakref")
# Classes whose objects only tell others apart, by a number that counts up in each process.
_IDENTITIES = ("flax.ids.FlaxId",)
NAMED = (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)
# Names of attributes in which objects remember their hash.
_REMEMBERED_HASH = re.compile(r"(_\w+)?_{1,2}(cached_?)?hash(_?(value|code|cache))?_*")
# CPython's flag of a class that is not one of C's own static ones.
_HEAP_TYPE = 1 << 9
_READABLE = {object, types.SimpleNamespace, *_ITEMS}


def write_object(encoding: ProgramEncoding, value: Any) -> None:
    """Write an object by its class, its attributes, and its items if it is a list, tuple or dictionary."""
    kind = type(value)
    if encoding.met_before(b"O", value):
        return
    encoding.encode(kind)
    if type_name(kind) in _IDENTITIES:
        encoding.write(b"identity %d" % encoding.number_of(value))
        return
    # Python's own classes have a dictionary or slots, be they empty; C's may have neither.
    is_readable = "__slots__" in vars(kind) or hasattr(value, "__dict__") or isinstance(value, tuple(_ITEMS))
    if not is_readable or any(base not in _READABLE and _is_native(base) for base in kind.__mro__):
        raise CannotSkipError(f"unknown type: {type_name(kind)}")
    encoding.encode_all(item for item in attributes(value) if not is_hash(value, *item))
    for base, items in _ITEMS.items():
        if isinstance(value, base):
            encoding.encode(items(value))


def _is_native(base: type) -> bool:
    """Return whether a class is written in C, so that its instances may have state that nobody sees."""
    own, module = vars(base), sys.modules.get(base.__module__)
    is_made_in_c = any(type(own.get(name)) in code.NATIVE for name in ("__new__", "__init__"))
    file = getattr(module, "__file__", None)
    return (
        is_made_in_c
        or module is None
        or not (file is None or file.endswith((".py", ".pyc")))
        or (file is None and base.__module__ in sys.builtin_module_names)
    )


def is_hash(value: Any, name: str, held: Any) -> bool:
    """Return whether an attribute only remembers the object's hash, which differs in each process."""
    if not _REMEMBERED_HASH.fullmatch(name) or type(held) not in (int, type(None)):
        return False
    try:
        other = copy.copy(value)
        # The hash must come from all else: an object may be nothing but a number of this name.
        object.__setattr__(other, name, None)
        return hash(other) == hash(value) and held in (None, hash(value))
    except Exception:  # noqa: BLE001 - it is the program's own code; what remembers no hash counts
        return False


def attributes(value: Any) -> list[tuple[str, Any]]:
    """Return an object's attributes, in the order in which they were set; a class may hide some of them."""
    if issubclass(type(value), threading.local):
        return list(vars(value).items())
    try:
        found = list(object.__getattribute__(value, "__dict__").items())
    except AttributeError:
        found = []
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if type(slot) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):
                    found.append((name, slot.__get__(value)))
    return found


def write_standard(encoding: ProgramEncoding, value: Any) -> None:
    """Write an object of Python's by what pickle would store of it."""
    if not encoding.met_again(b"v", value):
        encoding.write(text(type_name(type(value))))
        encoding.encode_all(reduced(value))


def reduced(value: Any) -> list[Any]:
    """Return what pickle would store of an object of Python's or numpy's; its name if it holds no data."""
    if isinstance(value, (bytearray, memoryview, array.array)) and memoryview(value).nbytes > MOST_BYTES:
        raise CannotSkipError("large object")
    if isinstance(value, memoryview):
        return [bytes(value)]
    if isinstance(value, (collections.abc.KeysView, collections.abc.ValuesView, collections.abc.ItemsView)):
        return [*value]
    if isinstance(value, re.Match):
        return [value.re, value.string, value.span(), value.pos, value.endpos]
    if isinstance(value, struct.Struct):
        return [value.format]
    if isinstance(value, property):
        return [*(each and label(each) for each in (value.fget, value.fset, value.fdel)), value.__doc__]
    if isinstance(value, (staticmethod, classmethod)):
        return [label(value.__func__)]
    if isinstance(value, contextvars.ContextVar):
        try:
            return [value.name, value.get()]
        except LookupError:
            return [value.name]
    if isinstance(value, logging.Logger):
        return [value.name, value.getEffectiveLevel(), value.disabled, value.manager.disable]
    if type(value).__module__ == "itertools":
        # Pickling these is deprecated.
        raise CannotSkipError(f"unknown type: {type_name(type(value))}")
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        stored = reduce(value) if reduce else value.__reduce_ex__(2)
    except Exception:  # noqa: BLE001 - it is not for pickling
        if not isinstance(value, code.NATIVE) and type(value).__module__ not in _WITHOUT_DATA:
            raise CannotSkipError(f"unknown type: {type_name(type(value))}") from None
        return [label(value)]
    if isinstance(stored, str):
        return [stored]
    made_by, arguments, *more = stored
    state, items, pairs = (*more, None, None, None)[:3]
    return [label(made_by), arguments, state, *(items or ()), *(pairs or ())]


def label(value: Any) -> str:
    """Return the name of a function, class or module, and the type of anything else."""
    kind = type(value)
    if not issubclass(kind, NAMED) and not is_standard(kind.__module__) and not code.is_of_jax(kind.__module__):
        return type_name(kind)
    if issubclass(kind, types.ModuleType):
        return f"module {namespace(value).get('__name__')}"
    name = getattr(value, "__qualname__", None) if callable(value) else getattr(value, "__name__", None)
    named = f" {getattr(value, '__module__', None)}.{name}" if isinstance(name, str) else ""
    return f"{type_name(kind)}{named}"


def is_named(value: Any) -> bool:
    """Return whether the name of a class or function leads to it."""
    if (
        getattr(value, "__module__", None) == "builtins"
        and isinstance(value, type)
        and not value.__flags__ & _HEAP_TYPE
    ):
        # Not all of them have names there, as the class of None.
        return True
    if value is jax.Array:
        # Its name in jaxlib leads nowhere.
        return True
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for part in name_of(value).split("."):
        found = getattr(found, part, None)
    return found is value


def name_of(value: Any) -> str:
    """Return the name of a function or class within its module."""
    # Universal functions of jax.numpy have a plain name only.
    return str(getattr(value, "__qualname__", getattr(value, "__name__", "?")))


def namespace(module: types.ModuleType) -> dict[str, Any]:
    """Return a module's names without asking the module, which may import something for that."""
    found: dict[str, Any] = types.ModuleType.__getattribute__(module, "__dict__")
    return found


@functools.cache
def is_installed(module: str | None) -> bool:
    """Return whether a module is one of an installed library, rather than of the user's own files."""
    depth = str(module).count(".")
    file = getattr(sys.modules.get(str(module)), "__file__", None)
    if file is None:
        return False
    path = Path(file)
    place = path.parents[depth + (path.name == "__init__.py")] if len(path.parents) > depth + 1 else path.parent
    return next(place.glob("*.dist-info"), None) is not None


@functools.cache
def is_standard(module: str | None) -> bool:
    """Return whether a module is Python's or numpy's, and not a program's of that name."""
    package = str(module).split(".", 1)[0]
    found = sys.modules.get(package)
    file = None if found is None else namespace(found).get("__file__")
    is_python_s = package in sys.stdlib_module_names and (file is None or file.startswith(_PYTHON))
    return is_python_s or package in ("numpy", "ml_dtypes")
