"""The content of the program's own values: functions, static arguments, and what is in the nodes of trees.

Each value counts with all that it leads to. ``_PARTS`` says of which parts the values of a type consist, ``_BY_BASE``
has the functions that write the others. What is in neither is an object, which consists of its class and attributes, or
belongs to jax; what C code may keep elsewhere, or what leads out of the program, raises CannotSkipError.
"""

from __future__ import annotations

import array
import builtins
import collections
import contextlib
import contextvars
import copy
import dataclasses
import datetime
import enum
import functools
import logging
import operator
import os
import pathlib
import re
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import core, tree_util, util

from xcache.hook.calls import program_origins as origins
from xcache.hook.calls.program_code import Code, Import, code_of
from xcache.hook.calls.program_origins import JAX, LIBRARY, PROGRAM, PYTHON, is_named, namespace
from xcache.hook.structure import code, digest  # noqa: F401 - digest completes the table of types
from xcache.hook.structure.encoding import HANDLERS, CannotSkipError, Encoding, text, type_name
from xcache.hook.structure.values import content

_MOST_OBJECTS = 300_000
# The most bytes of one text or array.
_MOST_BYTES = 1024 * 1024
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Native classes whose instances are known by their items, and what these are; a class may say something else of itself.
_ITEMS: dict[type, Any] = {
    dict: lambda value: dict(dict.items(value)),
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    functools.partial: lambda value: (value.func, value.args, value.keywords),
}
# Native classes that add nothing to their instances' attributes.
_READABLE = {object, types.SimpleNamespace, threading.local, *_ITEMS}
# CPython's flag of a class that is not one of C's own static ones.
_HEAP_TYPE = 1 << 9
# Classes whose objects only tell others apart, by a number that counts up in each process.
_IDENTITIES = ("flax.ids.FlaxId",)
# Names of attributes in which objects remember their hash.
_REMEMBERED_HASH = re.compile(r"(_\w+)?_{1,2}(cached_?)?hash(_?(value|code|cache))?_*")
_ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]+(?=>)")
# What Python adds to a class or module: where it is, and what follows from the rest.
_OF_PYTHON = frozenset((
    "__module__", "__dict__", "__weakref__", "__file__", "__path__", "__cached__", "__loader__", "__spec__",
    "__package__", "__builtins__", "__warningregistry__", "__annotations__", "__annotate__", "__annotate_func__",
    "__annotations_cache__", "__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__",
    "__abstractmethods__", "_abc_impl", "__dataclass_params__", "__slotnames__", "__type_params__",
    "_value2member_map_",
))  # fmt: skip
# Attributes of a jitted function that say nothing of what it does.
_OF_A_FUNCTION = ("__annotations__", "__doc__", "__module__", "__name__", "__qualname__", "_fun", "fun_sourceinfo",
                  "fun_signature")  # fmt: skip


class ProgramEncoding(Encoding):
    """An encoding that also writes values of the program's own, whose packages may be ``own`` though installed."""

    def __init__(self, own: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.own = own
        self._objects = 0
        # Functions, classes and modules lead far: they are written after what names them, one after the other.
        self._later: list[tuple[Callable[[ProgramEncoding, Any], None], Any]] = []
        self._packages: set[str] = set()
        # Whether sets within the value being written have no order: it is a part of an object of jax's, say.
        self.is_unordered = False
        # Attributes that the code read so far names, and whether an object was met that reads by such a name.
        self.named: set[str] = set()
        self.has_path = False

    def encode(self, value: Any) -> None:
        """Write a value; raise CannotSkipError if its content cannot be read."""
        kind = type(value)
        if kind in _PLAIN:
            if kind in (str, bytes) and len(value) > _MOST_BYTES:
                raise CannotSkipError("large object")
            super().encode(value)
            return
        self._objects += 1
        if self._objects > _MOST_OBJECTS:
            raise CannotSkipError("large object")
        write = _writer(value, kind)
        with self.unordered(write is Encoding.encode or (self.is_unordered and kind in (tuple, set, frozenset))):
            write(self, value)

    @contextlib.contextmanager
    def unordered(self, is_unordered: bool = True) -> Iterator[None]:
        """Encode the values within as those that nobody goes through in order, such as parts of an object of jax's."""
        outer, self.is_unordered = self.is_unordered, is_unordered
        try:
            yield
        finally:
            self.is_unordered = outer

    def later(self, tag: bytes, value: Any, write: Callable[[ProgramEncoding, Any], None]) -> None:
        """Write the number of an object, and have its content written later if it was not met before."""
        if not self.met_before(tag, value):
            self._later.append((write, value))

    def library(self, value: Any) -> str:
        """Return whose a class or function is, by its module; note a library's, refuse what Python reads elsewhere."""
        module = value.__module__
        whose = origins.origin(module, self.own)
        if whose == PYTHON:
            origins.check_pure(module, getattr(value, "__qualname__", "?"))
        elif whose == LIBRARY:
            self._packages.add(origins.package_of(module))
            self.write(text(origins.file_digest(getattr(sys.modules[module], "__file__", None) or "")))
        return whose

    def digest(self) -> str:
        """Return the digest of all that was written, and of what this led to."""
        self._write_the_rest()
        if "numpy" in self._packages:
            self.encode((np.get_printoptions(), np.geterr()))
        for told in origins.of_libraries(self._packages, self.own):
            self.write(told)
        if self.has_path and (reading := self.named & _READING):
            raise CannotSkipError(f"outside the program: pathlib.Path.{min(reading)}")
        return super().digest()

    def apart(self, value: Any, handler: Callable[[Encoding, Any], None]) -> bytes:
        """Return the encoding of a value by itself, with numbers of its own."""

        def alone(_: Encoding, value: Any) -> None:
            outer = self._numbers, self._later
            self._numbers, self._later = {}, []
            try:
                handler(self, value)
                self._write_the_rest()
            finally:
                self._numbers, self._later = outer

        return super().apart(value, alone)

    def _write_the_rest(self) -> None:
        # It grows meanwhile.
        for write, value in self._later:
            with self.unordered(False):
                write(self, value)
        self._later.clear()


def _writer(value: Any, kind: type) -> Callable[[Any, Any], None]:
    """Return the function that writes a value of this type."""
    if kind in _PARTS:
        return _parts
    for base, write in _BY_BASE:
        if issubclass(kind, base):
            return write
    if value is core.no_axis_name or value is jax.config:
        # The configuration counts elsewhere.
        return _name
    if kind in HANDLERS or issubclass(kind, (np.generic, np.dtype)):
        return Encoding.encode
    if kind in _GENERIC or kind.__module__ == "typing":
        return _generic
    whose = origins.origin(kind.__module__)
    if whose in (JAX, LIBRARY) and callable(value) and _is_a_library_s(value, frozenset()):
        return _named
    if whose == JAX:
        return _wrapper if callable(getattr(value, "__wrapped__", None)) else Encoding.encode
    return _object


def _parts(encoding: ProgramEncoding, value: Any) -> None:
    kind = type(value)
    if kind in _WITH_IDENTITY and encoding.met_before(b"v", value):
        return
    encoding.write(text(type_name(kind)))
    if kind in (set, frozenset) and encoding.is_unordered:
        encoding.write_unordered(value)
    else:
        encoding.encode_all(_PARTS[kind](value))


def _function(encoding: ProgramEncoding, value: types.FunctionType) -> None:
    encoding.later(b"F", value, _function_content)


def _function_content(encoding: ProgramEncoding, value: types.FunctionType) -> None:
    whose, known = origins.origin_of_function(value, encoding.own), code_of(value.__code__)
    encoding.write(text(f"{value.__module__}.{value.__qualname__}"))
    encoding.write(known.digest)
    if whose != PROGRAM:
        module = sys.modules[value.__globals__["__name__"]]
        encoding.library(types.SimpleNamespace(__module__=module.__name__, __qualname__=value.__qualname__))
        if _is_a_library_s(value, encoding.own):
            return
    cells = []
    for cell in value.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:
            cells.append(_EmptyCell)
    held = [(name, each) for name, each in vars(value).items() if not _is_of_xcache(each)]
    encoding.encode_all((value.__name__, value.__doc__, value.__defaults__, value.__kwdefaults__, *cells, *held))
    annotations = getattr(value, "__annotations__", {})
    encoding.encode([(name, _annotation(each)) for name, each in annotations.items()])
    if whose == PROGRAM:
        _globals(encoding, value, known)


def _is_a_library_s(value: Any, own: frozenset[str]) -> bool:
    """Return whether a name in a module of a library's leads to this: its files say what it is."""
    return is_named(value) and origins.origin(value.__module__, own) != PROGRAM


class _EmptyCell:
    """Stands for what a closure's cell will hold later."""


def _globals(encoding: ProgramEncoding, function: types.FunctionType, known: Code) -> None:
    """Write what the names in a function's code lead to now."""
    encoding.named.update(function.__code__.co_names)
    makes_sets = known.makes_sets
    for name, *attributes in known.reads:
        found: Any = _MISSING
        if isinstance(name, Import):
            found = _imported(name, function.__globals__, attributes)
        else:
            for names in (function.__globals__, vars(builtins)):
                if found is _MISSING:
                    found = names.get(name, _MISSING)
        makes_sets |= found is set or found is frozenset
        while attributes and (inner := _attribute(found, attributes[0])) is not _MISSING:
            found = inner
            del attributes[0]
        encoding.write(b"G%d;" % len(attributes))
        if found is _MISSING:
            encoding.write(b"?")
        else:
            encoding.encode(found)
    if makes_sets and (sys.flags.hash_randomization and not os.environ.get("PYTHONHASHSEED", "random").isdecimal()):
        raise CannotSkipError("order of a set")
    if makes_sets:
        encoding.encode(hash("the order of a set"))


def _imported(wanted: Import, names: dict[str, Any], parts: list[str]) -> Any:
    """Return the module that an import in a function's body leads to, or the module that is a part of it."""
    name = wanted.name
    if wanted.level:
        above = str(names.get("__package__")).rsplit(".", wanted.level - 1)[0]
        name = f"{above}.{name}" if name else above
    found = sys.modules.get(name, _MISSING)
    if parts and isinstance(found, types.ModuleType) and parts[0] not in namespace(found):
        found = sys.modules.get(f"{name}.{parts.pop(0)}", _MISSING)
    if found is _MISSING:
        if origins.origin(name) != JAX:
            raise CannotSkipError(f"module imported by the function: {name}")
        # It comes with jax's files.
        return name
    return found


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute of a module or object if it is nothing but an entry of its dictionary, or _MISSING."""
    kind = type(value)
    plain = types.ModuleType.__getattribute__ if issubclass(kind, types.ModuleType) else object.__getattribute__
    if kind.__getattribute__ is not plain or any(name in vars(base) for base in kind.__mro__):
        return _MISSING
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return _MISSING
    if name in held or not issubclass(kind, types.ModuleType):
        return held.get(name, _MISSING)
    if "__getattr__" in held and origins.origin(held.get("__name__")) != JAX:
        raise CannotSkipError(f"attribute that a module computes: {held.get('__name__')}.{name}")
    return _MISSING


def _annotation(value: Any) -> Any:
    """Return what counts of an annotation: the name of a type, and any other value."""
    if isinstance(value, type) or typing.get_origin(value) is not None or type(value).__module__ == "typing":
        return repr(value)
    return value


def _is_of_xcache(value: Any) -> bool:
    """Return whether this is one of the functions that ``xcache.jit`` adds to those of ``jax.jit``."""
    return str(getattr(value, "__module__", None)).startswith("xcache.hook.calls.")


def _class(encoding: ProgramEncoding, value: type) -> None:
    encoding.later(b"T", value, _class_content)


def _class_content(encoding: ProgramEncoding, value: type) -> None:
    encoding.write(text(f"class {type_name(value)}"))
    is_native = value.__module__ == "builtins" and not value.__flags__ & _HEAP_TYPE
    if is_native or _is_a_library_s(value, encoding.own):
        encoding.library(value)
    else:
        encoding.encode_all((type(value), *value.__bases__))
        registered = getattr(value, "_abc_impl", None) is not None and abc_registry(value)
        if registered:
            raise CannotSkipError("class with registered subclasses")
        for name, held in vars(value).items():
            if name not in _OF_PYTHON:
                encoding.write(text(name))
                # A dataclass has there what Python shows of its defaults.
                is_shown = name == "__doc__" and type(held) is str
                encoding.encode(_ADDRESS.sub("", held) if is_shown else held)
    node = tree_util._registry.get(value)
    if node is not None and origins.origin(value.__module__) not in (JAX, PYTHON):
        encoding.encode_all(node)


def abc_registry(value: type) -> Any:
    """Return the classes that were registered as subclasses of an abstract one."""
    import _abc

    return _abc._get_dump(value)[0]


def _module(encoding: ProgramEncoding, value: types.ModuleType) -> None:
    encoding.later(b"M", value, _module_content)


def _module_content(encoding: ProgramEncoding, value: types.ModuleType) -> None:
    name = namespace(value).get("__name__")
    encoding.write(text(f"module {name}"))
    if sys.modules.get(str(name)) is value and origins.origin(name, encoding.own) != PROGRAM:
        encoding.library(types.SimpleNamespace(__module__=name))
        return
    if "__getattr__" in namespace(value):
        raise CannotSkipError(f"attribute that a module computes: {name}")
    for key, held in namespace(value).copy().items():
        if key not in _OF_PYTHON:
            encoding.write(text(key))
            encoding.encode(held)


def _native(encoding: ProgramEncoding, value: Any) -> None:
    """Write a function of C code by its name, and the object or class that it is bound to."""
    owner = getattr(value, "__self__", None) or getattr(value, "__objclass__", None)
    name = getattr(value, "__qualname__", value.__name__)
    encoding.write(text(f"native {getattr(value, '__module__', None)}.{name}"))
    if owner is not None and not isinstance(owner, types.ModuleType):
        encoding.encode(owner)
    elif isinstance(value, np.ufunc):
        # np.frompyfunc makes one of any function.
        if getattr(np, value.__name__, None) is not value:
            raise CannotSkipError("unknown type: numpy.ufunc")
    elif not isinstance(value.__module__, str) or encoding.library(value) == PROGRAM:
        raise CannotSkipError(f"native function: {name}")


def _name(encoding: ProgramEncoding, value: Any) -> None:
    encoding.write(text(f"the {type_name(type(value))}"))


def _named(encoding: ProgramEncoding, value: Any) -> None:
    """Write a function that a library has made an object of, and that its name leads to."""
    encoding.library(value)
    encoding.write(text(f"named {value.__module__}.{getattr(value, '__qualname__', value.__name__)}"))


def _generic(encoding: ProgramEncoding, value: Any) -> None:
    encoding.write(text(f"generic {type_name(type(value))}"))
    encoding.encode_all((typing.get_origin(value), *typing.get_args(value)))


def _cached(encoding: ProgramEncoding, value: Any) -> None:
    """Write a function that remembers its results, if it remembers none: they may be older than what it reads."""
    if value.cache_info().currsize:
        raise CannotSkipError(f"function that remembers results: {value.__wrapped__.__qualname__}")
    encoding.write(b"cached")
    encoding.encode_all((value.__wrapped__, list(value.cache_parameters().items())))


def _path(encoding: ProgramEncoding, value: pathlib.PurePath) -> None:
    encoding.write(text(f"{type_name(type(value))} {value}"))
    if type(value).__module__.partition(".")[0] != "pathlib":
        raise CannotSkipError(f"unknown type: {type_name(type(value))}")
    encoding.has_path |= isinstance(value, pathlib.Path)


def _environment(_: ProgramEncoding, value: Any) -> None:
    raise CannotSkipError("outside the program: os.environ")


def _unknown(_: ProgramEncoding, value: Any) -> None:
    raise CannotSkipError(f"unknown type: {type_name(type(value))}")


def _wrapper(encoding: ProgramEncoding, value: Any) -> None:
    """Write a function that jax has made of another: jitted, or with a derivative of its own."""
    if encoding.met_before(b"W", value):
        return
    encoding.write(text(type_name(type(value))))
    held = {key: each for key, each in vars(value).items() if key not in _OF_A_FUNCTION and not _is_of_xcache(each)}
    info = held.pop("_jit_info", None)
    if info is not None:
        held.update(zip(info._fields, info, strict=True))
    elif type(value).__module__.startswith("jaxlib"):
        raise CannotSkipError(f"unknown type: {type_name(type(value))}")
    encoding.encode_all(item for item in sorted(held.items()) if item[0] not in _OF_A_FUNCTION)


def _tree(encoding: ProgramEncoding, value: Any) -> None:
    node = value.node_data()
    encoding.write(b"leaf" if node is None else b"tree")
    if node is not None:
        encoding.encode_all((*node, *value.children()))


def _jax_array(encoding: ProgramEncoding, value: Any) -> None:
    if isinstance(value, core.Tracer):
        raise CannotSkipError("tracer")
    if encoding.met_before(b"A", value):
        return
    encoding.write(text(f"array {value.dtype} {value.shape} {getattr(value, 'weak_type', False)} {value.committed}"))
    encoding.encode(value.sharding)
    if value.is_deleted():
        encoding.write(b"deleted")
        return
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if not value.is_fully_addressable or value.nbytes > _MOST_BYTES:
        raise CannotSkipError("large array")
    content(encoding, np.asarray(value))


def _array(encoding: ProgramEncoding, value: np.ndarray[Any, Any]) -> None:
    if value.nbytes > _MOST_BYTES or type(value) is not np.ndarray:
        raise CannotSkipError("large array")
    if not encoding.met_before(b"A", value):
        encoding.write(text(f"{value.strides} {value.flags.writeable}"))
        content(encoding, value)


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
    if not is_readable or any(base not in _READABLE and _is_native(base) for base in kind.__mro__):
        raise CannotSkipError(f"unknown type: {type_name(kind)}")
    encoding.encode_all(item for item in attributes(value) if not is_hash(value, *item))
    for base, items in _ITEMS.items():
        if issubclass(kind, base):
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


def _reduced(value: Any) -> tuple[Any, ...]:
    """Return the arguments with which pickle would make an object of Python's anew."""
    arguments: tuple[Any, ...] = value.__reduce__()[1]
    return arguments


def _variable(value: contextvars.ContextVar[Any]) -> tuple[Any, ...]:
    try:
        return value.name, value.get()
    except LookupError:
        return (value.name,)


def _raw(value: Any) -> tuple[Any, ...]:
    if memoryview(value).nbytes > _MOST_BYTES:
        raise CannotSkipError("large object")
    return getattr(value, "typecode", None), memoryview(value).tobytes()


_MISSING: Any = object()
_GENERIC = (types.GenericAlias, types.UnionType)
_Parts = Callable[[Any], typing.Iterable[Any]]
# Types of Python's, and the parts that make up a value of each.
_PARTS: dict[type, _Parts] = {
    tuple: tuple,
    list: list,
    set: list,
    frozenset: list,
    dict: lambda value: (*value.keys(), *value.values()),
    types.MappingProxyType: lambda value: (*value.keys(), *value.values()),
    collections.OrderedDict: lambda value: (*value.keys(), *value.values(), vars(value)),
    collections.defaultdict: lambda value: (value.default_factory, *value.keys(), *value.values()),
    collections.deque: lambda value: (value.maxlen, *value),
    range: lambda value: (value.start, value.stop, value.step),
    bytearray: _raw,
    memoryview: lambda value: (value.format, value.shape, value.strides, *_raw(value)),
    array.array: _raw,
    re.Pattern: lambda value: (value.pattern, value.flags),
    datetime.date: _reduced,
    datetime.datetime: _reduced,
    datetime.time: _reduced,
    datetime.timedelta: _reduced,
    datetime.timezone: _reduced,
    types.MethodType: lambda value: (value.__func__, value.__self__),
    property: lambda value: (value.fget, value.fset, value.fdel, value.__doc__),
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    functools.cached_property: lambda value: (value.func, value.attrname),
    types.CodeType: lambda value: (code_of(value).digest,),
    types.MemberDescriptorType: lambda value: (value.__name__,),
    types.GetSetDescriptorType: lambda value: (value.__name__,),
    types.NotImplementedType: lambda _: (),
    type(collections.namedtuple("_", "a").a): _reduced,  # type: ignore[attr-defined] # noqa: PYI024
    operator.attrgetter: _reduced,
    operator.itemgetter: _reduced,
    operator.methodcaller: _reduced,
    dataclasses.Field: lambda value: (
        value.name, value.default, value.default_factory, value.init, value.repr, value.hash, value.compare,
        value.metadata, value.kw_only, repr(value._field_type),
    ),
    typing.TypeVar: lambda value: (value.__name__,),
    contextvars.ContextVar: _variable,
    logging.Logger: lambda value: (value.name, value.getEffectiveLevel(), value.disabled, value.manager.disable),
    util.HashablePartial: lambda value: (value.f, value.args, value.kwargs),
}  # fmt: skip
# Of these, those that the program can change or compare by identity.
_WITH_IDENTITY = (
    list, set, frozenset, dict, types.MappingProxyType, collections.OrderedDict, collections.defaultdict,
    collections.deque, bytearray, array.array, contextvars.ContextVar,
)  # fmt: skip
# The methods of paths that read files, as Python's own classes tell.
_READING = {name for name in vars(pathlib.Path) if not name.startswith("_")} - {*vars(pathlib.PurePath)}
_BY_BASE: tuple[tuple[Any, Callable[[Any, Any], None]], ...] = (
    (types.FunctionType, _function),
    (code.NATIVE, _native),
    (type, _class),
    (types.ModuleType, _module),
    (jax.tree_util.PyTreeDef, _tree),
    (jax.Array, _jax_array),
    (np.ndarray, _array),
    (type(functools.lru_cache(len)), _cached),
    (pathlib.PurePath, _path),
    (type(os.environ), _environment),
    (functools.partial, _object),
    ((core.Jaxpr, getattr(core, "ClosedJaxpr", core.Jaxpr)), _unknown),
)
