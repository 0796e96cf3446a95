"""The content of the program's own values: functions, static arguments, and what is in the nodes of trees.

Each value counts with all that it leads to. ``_PARTS`` says of which parts the values of a type consist, ``_BY_BASE``
has the functions that write others. What is in neither is jax's, or an object: its class, its attributes and its items.
What C code may keep elsewhere, and what leads out of the program, raises CannotSkipError.
"""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import datetime
import functools
import gc
import logging
import operator
import os
import pathlib
import re
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import core, tree_util, util

from xcache.hook.calls import program_origins as origins
from xcache.hook.calls.program_code import Code, code_of
from xcache.hook.calls.program_origins import is_a_library_s
from xcache.hook.calls.program_reads import value_of
from xcache.hook.structure import ambient, digest  # noqa: F401 - digest completes the table of types
from xcache.hook.structure.description import HEAP_TYPE, NATIVE, PLAIN, is_native
from xcache.hook.structure.encoding import (
    HANDLERS,
    CannotSkipError,
    Encoding,
    attributes_of,
    check_honest,
    slots_of,
    text,
    type_name,
)
from xcache.hook.structure.libraries import JAX, LIBRARY, PROGRAM, PYTHON, namespace, origin, package_of
from xcache.hook.structure.values import content

_MOST_OBJECTS = 300_000
# The most bytes of one text or array.
_MOST_BYTES = 1024 * 1024
# Classes whose objects only tell others apart, by a number that counts up in each process.
_IDENTITIES = ("flax.ids.FlaxId",)
# What Python adds to a class or module: where it is, and what follows from the rest.
_OF_PYTHON = frozenset((
    "__module__", "__dict__", "__weakref__", "__file__", "__path__", "__cached__", "__loader__", "__spec__",
    "__package__", "__builtins__", "__warningregistry__", "__annotate__", "__annotate_func__", "__annotations_cache__",
    "__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl",
    "__dataclass_params__", "__slotnames__", "__type_params__", "_value2member_map_",
))  # fmt: skip
# Attributes of a function that jax has made of another which say nothing of what it does.
_OF_A_FUNCTION = ("__annotations__", "__doc__", "__module__", "__name__", "__qualname__", "_fun", "fun_sourceinfo",
                  "fun_signature")  # fmt: skip
_COPIED_NAMES = frozenset((*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "__isabstractmethod__", "__annotate__"))
# Names in code that reads attributes by names which are not in the code.
_COMPUTING = frozenset(("getattr", "vars", "dir", "attrgetter", "methodcaller", "__dict__", "__getattribute__"))
# Texts show objects, such as a dataclass's defaults in its documentation, with their addresses.
_ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]+(?=>)")
# Types of Python's whose values are what ``copy`` makes them of.
_COPIED = (
    collections.deque, range, bytearray, array.array, datetime.date, datetime.datetime, datetime.time,
    datetime.timedelta, datetime.timezone, operator.attrgetter, operator.itemgetter,
    type(vars(collections.namedtuple("_", "a"))["a"]),
)  # fmt: skip
# Native classes whose instances are known by their items, and what these are; a class may say something else of itself.
_ITEMS: dict[type, Callable[[Any], Any]] = {
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
_READABLE = {object, types.SimpleNamespace, threading.local, *_ITEMS}
_Write = Callable[["ProgramEncoding", Any], Any]


class ProgramEncoding(Encoding):
    """An encoding that also writes values of the program's own, whose packages may be ``own`` though installed."""

    # An object of jax's may hold objects of the program's, which have numbers.
    has_tokens = False

    def __init__(self, own: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.own = own
        self._objects = 0
        # Functions, classes and modules lead far: they are written after what names them, one after the other.
        self.later: list[tuple[_Write, Any]] = []
        self._packages: set[str] = set()
        # All names in the code that was met, and whether a path was, which can read files, or another's module.
        self.named: set[str] = set()
        self.has_path = self.has_modules = False
        # The contents of others' modules, classes and functions: their files do not tell what the program put there.
        self.others: list[tuple[str, dict[str, Any]]] = []

    def encode(self, value: Any) -> None:
        """Write a value; raise CannotSkipError if its content cannot be read."""
        kind = type(value)
        check_honest(kind)
        self._objects += 1
        if self._objects > _MOST_OBJECTS or (kind in (str, bytes) and len(value) > _MOST_BYTES):
            raise CannotSkipError("large object")
        (Encoding.encode if kind in PLAIN else _writer(value, kind))(self, value)

    def library(self, module: Any, name: str) -> str:
        """Return whose a class or function is; note a library's, refuse what reads outside of the program."""
        whose, full = origin(module, self.own), f"{module}.{name}"
        if full in origins.IMPURE or (whose == PYTHON and origins.PURE.isdisjoint((module, full))):
            raise CannotSkipError(f"outside the program: {full}")
        if whose in (LIBRARY, PYTHON):
            self._packages.add(package_of(module))
        return whose

    def digest(self) -> str:
        """Return the digest of all that was written, and of what this led to."""
        self._follow()
        self.encode(sys.get_int_max_str_digits())
        if "numpy" in self._packages:
            self.encode((np.get_printoptions(), np.geterr()))
        self.write(origins.of_libraries(frozenset(self._packages), self.own))
        if self.has_path and (reading := self.named & _READING):
            raise CannotSkipError(f"outside the program: pathlib.Path.{min(reading)}")
        if self.has_modules and (computing := self.named & _COMPUTING):
            raise CannotSkipError(f"attribute of a module by a computed name: {min(computing)}")
        return super().digest()

    def _follow(self) -> None:
        """Write all that waits, and what others hold under names that are in the code."""
        written = set[tuple[int, str]]()
        while True:
            # It grows meanwhile.
            for write, value in self.later:
                write(self, value)
            self.later.clear()
            found = [
                (place, held, name)
                for place, held in self.others
                for name in sorted(self.named & held.keys() - _OF_PYTHON)
            ]
            new = [each for each in found if (id(each[1]), each[2]) not in written]
            if not new:
                return
            for place, held, name in new:
                written.add((id(held), name))
                self.encode((place, name, held[name]))

    def write_token(self, value: Any, handler: Callable[[Encoding, Any], None]) -> None:
        """Write an object of jax's in place."""
        handler(self, value)


def _writer(value: Any, kind: type) -> Callable[[Any, Any], None]:
    """Return the function that writes a value of this type."""
    if kind in _PARTS:
        return _parts
    for base, write in _BY_BASE:
        if issubclass(kind, base):
            return write
    if value is core.no_axis_name:
        return lambda encoding, _: encoding.write(b"no axis name")
    if kind in HANDLERS or (issubclass(kind, (np.generic, np.dtype)) and origin(kind.__module__) == LIBRARY):
        return Encoding.encode
    if kind.__module__ == "typing":
        return _type_form
    whose = origin(kind.__module__)
    if whose in (JAX, LIBRARY) and callable(value) and is_a_library_s(value):
        return _named
    if whose == JAX:
        return _wrapper if callable(getattr(value, "__wrapped__", None)) else Encoding.encode
    return _object


def _later(write: _Write) -> _Write:
    return lambda encoding, value: None if encoding.met_before(b"L", value) else encoding.later.append((write, value))


def _parts(encoding: ProgramEncoding, value: Any) -> None:
    kind = type(value)
    if kind in _WITH_IDENTITY and encoding.met_before(b"v", value):
        return
    encoding.write(text(type_name(kind)))
    encoding.encode_all(_PARTS[kind](value))


def _function(encoding: ProgramEncoding, value: types.FunctionType) -> None:
    whose, known = origins.origin_of_function(value, encoding.own), code_of(value.__code__)
    encoding.write(text(f"{value.__module__}.{value.__qualname__}") + known.digest)
    if whose != PROGRAM:
        encoding.library(value.__globals__["__name__"], value.__qualname__)
        if is_a_library_s(value, encoding.own):
            encoding.others.append((type_name(value), _data_in(vars(value))))
            return
    held = [item for item in vars(value).items() if not _is_of_xcache(item[1])]
    encoding.encode_all((value.__name__, value.__doc__, value.__defaults__, value.__kwdefaults__, *held))
    _annotations(encoding, getattr(value, "__annotations__", None) or {})
    for cell in value.__closure__ or ():
        try:
            encoding.encode(cell.cell_contents)
        except ValueError:
            encoding.write(b"empty")
    if whose == PROGRAM:
        _globals(encoding, value, known)


def _globals(encoding: ProgramEncoding, function: types.FunctionType, known: Code) -> None:
    """Write what the names in a function's code lead to now."""
    encoding.named |= known.names
    makes_sets = known.makes_sets
    for read in known.reads:
        found, following = value_of(read, function)
        makes_sets |= found is set or found is frozenset
        encoding.write(b"G%d;" % len(following))
        encoding.encode(found)
    if makes_sets:
        if sys.flags.hash_randomization and not os.environ.get("PYTHONHASHSEED", "").isdecimal():
            raise CannotSkipError("order of a set")
        encoding.encode(hash("the order of a set"))


def _is_of_xcache(value: Any) -> bool:
    """Return whether this is one of the functions that ``xcache.jit`` adds to those of ``jax.jit``."""
    return str(getattr(value, "__module__", None)).startswith("xcache.hook.calls.")


def _class(encoding: ProgramEncoding, value: type) -> None:
    encoding.write(text(f"class {type_name(value)}"))
    is_static = value.__module__ == "builtins" and not value.__flags__ & HEAP_TYPE
    if is_static or is_a_library_s(value, encoding.own):
        encoding.library(value.__module__, value.__qualname__)
        encoding.others.append((type_name(value), _data_in(namespace(value))))
    else:
        encoding.encode_all((type(value), *value.__bases__))
        encoding.encode_all(origins.registered_with(value))
        _names(encoding, vars(value))
    node = tree_util._registry.get(value)
    if node is not None and origin(value.__module__) not in (JAX, PYTHON):
        encoding.encode_all(node)


def _names(encoding: ProgramEncoding, names: Mapping[str, Any]) -> None:
    for name, held in names.items():
        if name == "__annotations__" and type(held) is dict:
            _annotations(encoding, held)
        elif name not in _OF_PYTHON:
            # Python shows a dataclass's defaults in its documentation.
            encoding.encode((name, _without_addresses(held) if name == "__doc__" and type(held) is str else held))


def _annotations(encoding: ProgramEncoding, named: dict[str, Any]) -> None:
    """Write annotations, which may hold values; a class of a library's only names a type."""
    encoding.encode_all(
        (name, type_name(held) if isinstance(held, type) and is_a_library_s(held, encoding.own) else held)
        for name, held in named.items()
    )


def _configuration(encoding: ProgramEncoding, _: Any) -> None:
    """Write the settings that count for no lowering: the function may read them."""
    holders = jax.config._value_holders
    encoding.encode_all((name, holders[name].value) for name in sorted(ambient.HARMLESS & holders.keys()))


def _data_in(names: dict[str, Any]) -> dict[str, Any]:
    """Return what is neither a function nor a class, nor computes an attribute."""
    found = names.copy().items()
    return {name: held for name, held in found if not callable(held) and not hasattr(type(held), "__get__")}


def _module(encoding: ProgramEncoding, value: types.ModuleType) -> None:
    names = namespace(value).copy()
    name = str(names.get("__name__"))
    encoding.write(text(f"module {name}"))
    if sys.modules.get(name) is value and origin(name, encoding.own) != PROGRAM:
        if encoding.library(name, "") != JAX:
            encoding.has_modules = True
        encoding.others.append((name, names))
    elif "__getattr__" in names:
        raise CannotSkipError(f"attribute that a module computes: {name}")
    else:
        _names(encoding, names)


def _native(encoding: ProgramEncoding, value: Any) -> None:
    """Write a function of C code by its name, and the object or class that it is bound to."""
    owner = getattr(value, "__self__", None)
    owner = getattr(value, "__objclass__", None) if owner is None else owner
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", value.__name__)
    encoding.write(text(f"native {module}.{name}"))
    if owner is not None and not issubclass(type(owner), types.ModuleType):
        encoding.encode(owner)
    elif isinstance(value, np.ufunc):
        # np.frompyfunc makes one of any function.
        if getattr(np, value.__name__, None) is not value:
            raise CannotSkipError("unknown type: numpy.ufunc")
    elif not isinstance(module, str) or encoding.library(module, name) == PROGRAM:
        raise CannotSkipError(f"native function: {name}")


def _named(encoding: ProgramEncoding, value: Any) -> None:
    """Write a function that a library has made an object of, and that its name leads to."""
    name = getattr(value, "__qualname__", None) or value.__name__
    encoding.library(value.__module__, name)
    encoding.write(text(f"named {value.__module__}.{name}"))


def _type_form(encoding: ProgramEncoding, value: Any) -> None:
    origin_of, arguments = typing.get_origin(value), typing.get_args(value)
    encoding.write(text(f"generic {type_name(type(value))} {repr(value) if origin_of is None else ''}"))
    encoding.encode_all((origin_of, getattr(value, "__supertype__", None), *arguments))


def _cached(encoding: ProgramEncoding, value: Any) -> None:
    """Write a function that remembers its results, if it remembers none: they may be older than what it reads."""
    if value.cache_info().currsize:
        raise CannotSkipError(f"function that remembers results: {value.__wrapped__.__qualname__}")
    encoding.write(b"cached")
    encoding.encode_all((value.__wrapped__, list(value.cache_parameters().items()), _added_to(value)))


def _path(encoding: ProgramEncoding, value: pathlib.PurePath) -> None:
    if package_of(type(value).__module__) != "pathlib":
        _refuse(encoding, value)
    encoding.write(text(f"{type_name(type(value))} {value}"))
    encoding.has_path |= isinstance(value, pathlib.Path)


def _refuse(_: ProgramEncoding, value: Any) -> None:
    raise CannotSkipError(f"unknown type: {type_name(type(value))}")


def _wrapper(encoding: ProgramEncoding, value: Any) -> None:
    """Write a function that jax has made of another: jitted, or with a derivative of its own."""
    if encoding.met_before(b"W", value):
        return
    encoding.write(text(type_name(type(value))))
    held = {name: each for name, each in vars(value).items() if not _is_of_xcache(each)}
    info = held.pop("_jit_info", None)
    if info is not None:
        held.update(zip(info._fields, info, strict=True))
    elif type(value).__module__.startswith("jaxlib"):
        _refuse(encoding, value)
    encoding.encode_all(item for item in sorted(held.items()) if item[0] not in _OF_A_FUNCTION)


def _array(encoding: ProgramEncoding, value: Any) -> None:
    if isinstance(value, core.Tracer):
        raise CannotSkipError("tracer")
    if encoding.met_before(b"A", value):
        return
    if isinstance(value, jax.Array):
        encoding.write(text(f"{value.dtype} {value.shape} {getattr(value, 'weak_type', False)} {value.committed}"))
        encoding.encode(value.sharding)
        if value.is_deleted() or not value.is_fully_addressable:
            raise CannotSkipError("array without content")
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
    elif type(value) is np.ndarray:
        encoding.write(text(f"{value.strides} {value.flags.writeable}"))
    else:
        _refuse(encoding, value)
    if value.nbytes > _MOST_BYTES:
        raise CannotSkipError("large array")
    content(encoding, np.asarray(value))


def _object(encoding: ProgramEncoding, value: Any) -> None:
    """Write an object by its class, its attributes, and its items if it is a list, tuple or dictionary."""
    kind = type(value)
    if encoding.met_before(b"O", value):
        return
    encoding.encode(kind)
    if type_name(kind) in _IDENTITIES:
        return
    # Python's own classes have a dictionary or slots, be they empty; C's may have neither.
    is_readable = kind in _READABLE or "__slots__" in vars(kind) or kind.__dictoffset__
    if not is_readable or any(base not in _READABLE and is_native(base) for base in kind.__mro__):
        _refuse(encoding, value)
    encoding.encode_all(_attributes(value))
    encoding.encode_all(items(value) for base, items in _ITEMS.items() if issubclass(kind, base))


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return an object's attributes, in the order in which they were set, with those of this thread."""
    of_thread = vars(value).items() if issubclass(type(value), threading.local) else ()
    # Classes of the program's may say that they are equal, so nothing is remembered of them.
    return [*of_thread, *attributes_of(value, slots_of.__wrapped__)]


def _without_addresses(value: Any) -> str:
    """Return a value as text, which is the same in another process."""
    return _ADDRESS.sub("", str(value))


def _what_makes_a_copy(value: Any) -> list[Any]:
    _, arguments, *more = value.__reduce_ex__(3)
    return [arguments, *(list(each) if isinstance(each, Iterator) else each for each in more)]


def _added_to(value: Any) -> dict[str, Any]:
    """Return the attributes of a wrapper that it has not copied from the function in it."""
    return {name: held for name, held in vars(value).items() if name not in _COPIED_NAMES}


def _variable(value: contextvars.ContextVar[Any]) -> tuple[Any, ...]:
    try:
        return value.name, value.get()
    except LookupError:
        return (value.name,)


# Types of Python's, and the parts that make up a value of each.
_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    tuple: tuple,
    list: list,
    set: list,
    frozenset: list,
    dict: lambda value: (*value.keys(), *value.values()),
    # The mapping behind it may have more than its items.
    types.MappingProxyType: lambda value: gc.get_referents(value),
    memoryview: lambda value: (value.format, value.shape, value.strides, value.tobytes()),
    **dict.fromkeys(_COPIED, _what_makes_a_copy),
    re.Pattern: lambda value: (value.pattern, value.flags),
    operator.methodcaller: lambda value: value.__reduce__()[:2],
    types.MethodType: lambda value: (value.__func__, value.__self__),
    property: lambda value: (value.fget, value.fset, value.fdel, value.__doc__),
    staticmethod: lambda value: (value.__func__, _added_to(value)),
    classmethod: lambda value: (value.__func__, _added_to(value)),
    functools.cached_property: lambda value: (value.func, value.attrname),
    types.CodeType: lambda value: (code_of(value).digest,),
    **dict.fromkeys((types.MemberDescriptorType, types.GetSetDescriptorType), lambda value: (value.__name__,)),
    types.NotImplementedType: lambda _: (),
    typing.TypeVar: lambda value: (value.__name__, value.__bound__, value.__constraints__),
    dataclasses.Field: lambda value: [
        str(each) if name == "_field_type" else each for name, each in _attributes(value)
    ],
    contextvars.ContextVar: _variable,
    logging.Logger: lambda value: (value.name, value.getEffectiveLevel(), value.disabled, value.manager.disable),
    util.HashablePartial: lambda value: (value.f, value.args, value.kwargs),
    jax.tree_util.PyTreeDef: lambda value: (value.num_leaves, value.node_data(), *value.children()),
}
# The program can change these of them, or compare them by identity.
_WITH_IDENTITY = (
    list, set, frozenset, dict, types.MappingProxyType, collections.deque, bytearray, array.array,
    contextvars.ContextVar,
)  # fmt: skip
# The methods of paths that read files, as Python's own classes tell.
_READING = {name for name in vars(pathlib.Path) if not name.startswith("_")} - {*vars(pathlib.PurePath)}
_BY_BASE: tuple[tuple[Any, Callable[[Any, Any], None]], ...] = (
    (types.FunctionType, _later(_function)),
    (type, _later(_class)),
    (types.ModuleType, _later(_module)),
    (NATIVE, _native),
    ((types.GenericAlias, types.UnionType), _type_form),
    ((jax.Array, np.ndarray), _array),
    (type(jax.config), _configuration),
    (type(functools.lru_cache(len)), _cached),
    (pathlib.PurePath, _path),
    ((functools.partial, collections.OrderedDict, collections.defaultdict), _object),
    ((type(os.environ), core.Jaxpr, getattr(core, "ClosedJaxpr", core.Jaxpr)), _refuse),
)
