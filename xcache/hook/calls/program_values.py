"""The content of the program's own values: functions, static arguments, and what is in the nodes of trees.

A function counts by its name, code, defaults and closure, and by the globals that it names; a class or module by its
name and the data in it. The functions that a function calls do not count: the program's version stands
for them. A value that cannot be read to the last bit raises CannotSkipError.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import enum
import functools
import hashlib
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import core, util

from xcache.hook.calls import sources
from xcache.hook.calls.program_code import iterated_sets, modules_of, names_in
from xcache.hook.calls.program_data import attributes_of_class, data_of_module, write_data, write_data_of_class
from xcache.hook.calls.program_objects import (
    MOST_BYTES,
    STANDARD,
    attributes,
    is_named,
    is_standard,
    label,
    name_of,
    write_object,
    write_standard,
)
from xcache.hook.structure import code, digest  # noqa: F401 - digest completes the table of types
from xcache.hook.structure.callables import describe_callable
from xcache.hook.structure.encoding import HANDLERS, CannotSkipError, Encoding, text, type_name
from xcache.hook.structure.values import content

_MOST_OBJECTS = 300_000
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class ProgramEncoding(Encoding):
    """An encoding that also writes values of the program's own classes, and its functions."""

    def __init__(self) -> None:
        super().__init__()
        self._objects = 0
        # How deep this is in objects of jax's that count by their content, and what was met in the innermost.
        self._apart = 0
        self._singletons: dict[int, int] = {}
        # Data that were met, with the names of the attributes that counted.
        self._data: dict[tuple[int, frozenset[str]], int] = {}
        # Classes and modules that were met, by id, and how many of them have been written with their data.
        self._holders: dict[int, Any] = {}
        self._written_holders = 0
        # The attributes that the functions met so far name.
        self._named = frozenset[str]()
        self._identities: dict[Any, int] = {}
        # Whether sets within the value being written have no order: it is a part of an object of jax's, say.
        self.is_unordered = False

    def encode(self, value: Any) -> None:
        """Write a value; raise CannotSkipError if its content cannot be read."""
        kind = type(value)
        if kind in _PLAIN:
            if kind in (str, bytes) and len(value) > MOST_BYTES:
                raise CannotSkipError("large object")
            super().encode(value)
            return
        self.count()
        handler = _handler(value)
        is_unordered = self.is_unordered if kind is tuple or handler is _container else handler is None
        with self.unordered(is_unordered):
            (handler or Encoding.encode)(self, value)

    @contextlib.contextmanager
    def unordered(self, is_unordered: bool = True) -> Iterator[None]:
        """Encode the values within as those that nobody goes through in order, such as parts of an object of jax's."""
        outer, self.is_unordered = self.is_unordered, is_unordered
        try:
            yield
        finally:
            self.is_unordered = outer

    def digest(self) -> str:
        """Return the digest of all that was written, with the data of the classes and modules that were met."""
        while self._written_holders < len(self._holders):
            waiting = list(self._holders.values())[self._written_holders :]
            self._written_holders = len(self._holders)
            # Sets of jax's may have been met in any order.
            for holder in sorted(waiting, key=label):
                _write_holder(self, holder, self._named)
        return super().digest()

    def add_holder(self, value: Any) -> None:
        """Have the data of a class or module written at the end, when all functions that may name them are known."""
        self._holders.setdefault(id(value), value)

    def add_named(self, names: frozenset[str]) -> None:
        """Note the attributes that a function names."""
        self._named |= names

    def count(self) -> None:
        """Count an object; raise CannotSkipError if there are too many."""
        self._objects += 1
        if self._objects > _MOST_OBJECTS:
            raise CannotSkipError("large object")

    def apart(self, value: Any, handler: Callable[[Encoding, Any], None]) -> bytes:
        """Return the encoding of a value by itself."""
        outer, self._singletons = self._singletons, {}
        self._apart += 1
        try:
            return super().apart(value, handler)
        finally:
            self._apart -= 1
            self._singletons = outer

    def number_of(self, value: Any) -> int:
        """Return the number of a value that only tells objects apart; equal ones have the same."""
        return self._identities.setdefault(value, len(self._identities))

    def met_again(self, tag: bytes, value: Any) -> bool:
        """Write an object's number, and return whether it was met before; within an object of jax's, content counts."""
        return self._apart == 0 and self.met_before(tag, value)

    def met_singleton(self, tag: bytes, value: Any) -> bool:
        """Write the number of a class or a member of an enumeration, and return whether it was met before.

        They lead to each other, so they have numbers within an object of jax's, too.
        """
        if self._apart == 0:
            return self.met_before(tag, value)
        is_met = id(value) in self._singletons
        self.write(b"%b%d;" % (tag, self._singletons.setdefault(id(value), len(self._singletons))))
        return is_met

    def met_data(self, value: Any, named: frozenset[str]) -> bool:
        """Write the number of a value that counts with these attributes; return whether it was met with them before.

        Elsewhere it may count with others, so these numbers are apart from those of values that count in full.
        """
        if self._apart:
            return False
        key = id(value), named
        is_met = key in self._data
        self.write(b"d%d;" % self._data.setdefault(key, len(self._data)))
        self._kept.append(value)
        return is_met


def _handler(value: Any) -> Any:
    """Return the function that writes a value of the program's own; None for plain values and those of jax."""
    kind = type(value)
    if kind in _PLAIN:
        return None
    if kind in STANDARD or (issubclass(kind, pathlib.PurePath) and is_standard(kind.__module__)):
        return write_standard
    if typing.get_origin(value) is not None:
        return _generic
    if value is core.no_axis_name:
        return _no_axis_name
    if kind in _CONTAINERS:
        return _container
    for known, handler in _HANDLERS_BY_BASE:
        if isinstance(value, known):
            return handler
    if kind in HANDLERS or kind.__module__.split(".", 1)[0] in ("numpy", "ml_dtypes"):
        return None
    if code.is_of_jax(kind.__module__):
        return _wrapper if callable(getattr(value, "__wrapped__", None)) or is_named(value) else None
    return write_object


def _function(encoding: ProgramEncoding, value: types.FunctionType) -> None:
    if code.is_own(value):
        encoding.write(text(describe_callable(value)))
        return
    if encoding.met_before(b"F", value):
        return
    encoding.write(text(type_name(value)))
    names = value.__globals__
    encoding.write(text(_file_digest(names.get("__file__") or "")))
    _code(encoding, value.__code__)
    cells = []
    for cell in value.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:
            cells.append(_EmptyCell)
    encoding.encode_all((value.__defaults__, value.__kwdefaults__, *cells))
    held = [item for item in vars(value).items() if not _is_of_xcache(item[1])]
    encoding.encode((value.__name__, value.__doc__, held))
    annotations = getattr(value, "__annotations__", {})
    encoding.encode([(name, each if type(each) in _PLAIN else label(each)) for name, each in annotations.items()])
    used, named, imported = names_in(value.__code__)
    encoding.add_named(named)
    found = {name: held[name] for held in (vars(builtins), names) for name in used if name in held}
    write_data(encoding, modules_of(imported, names.get("__package__")) | found, named)


class _EmptyCell:
    """Stands for what a closure's cell will hold later."""


@functools.cache
def _file_digest(file: str) -> str:
    """Return the digest of a source file; empty where there is none, as in a notebook.

    Two scripts of one version may each have a function of one name and code, which calls others of theirs.
    """
    try:
        content, has_changed = sources.read(pathlib.Path(file))
    except OSError:
        return ""
    if has_changed:
        raise CannotSkipError(f"changed source file: {file}")
    return hashlib.sha256(content).hexdigest()


def _container(encoding: ProgramEncoding, value: Any) -> None:
    """Write what a container holds, in the order in which the program would find it."""
    kind = type(value)
    if encoding.met_again(b"c", value):
        return
    encoding.write(text(type_name(kind)))
    if kind in (set, frozenset) and encoding.is_unordered:
        encoding.write_unordered(value)
    elif kind in (set, frozenset, list):
        encoding.encode_all(value)
    else:
        encoding.encode_all(value.keys())
        encoding.encode_all(value.values())
    if kind is collections.OrderedDict and vars(value):
        encoding.encode(vars(value))


def _code(encoding: ProgramEncoding, value: types.CodeType) -> None:
    """Write what code does, and not where it stands."""
    if encoding.met_before(b"code", value):
        return
    encoding.encode_all((
        value.co_code, value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars, value.co_flags,
        value.co_argcount, value.co_kwonlyargcount, value.co_posonlyargcount, value.co_exceptiontable,
    ))  # fmt: skip
    with_order = iterated_sets(value)
    for constant in value.co_consts:
        if type(constant) is frozenset and constant not in with_order:
            encoding.write_unordered(constant)
        else:
            encoding.encode(constant)


def _method(encoding: ProgramEncoding, value: types.MethodType) -> None:
    encoding.write(b"method")
    encoding.encode_all((value.__func__, value.__self__))


def _partial(encoding: ProgramEncoding, value: functools.partial[Any]) -> None:
    if type(value) not in (functools.partial, jax.tree_util.Partial):
        raise CannotSkipError(f"unknown type: {type_name(type(value))}")
    encoding.write(text(type_name(type(value))))
    encoding.encode_all((value.func, value.args, value.keywords, list(vars(value).items())))


def _hashable_partial(encoding: ProgramEncoding, value: util.HashablePartial) -> None:
    """Write a function of jax's with some of its arguments, as ``ravel_pytree`` returns."""
    encoding.write(b"hashable partial")
    encoding.encode_all((value.f, value.args, value.kwargs))


def _native(encoding: ProgramEncoding, value: Any) -> None:
    owner = getattr(value, "__self__", getattr(value, "__objclass__", None))
    if isinstance(value, np.ufunc) and getattr(np, value.__name__, None) is not value:
        # np.frompyfunc makes one of any function.
        raise CannotSkipError("unknown type: numpy.ufunc")
    encoding.write(
        text(f"native {getattr(value, '__module__', None)}.{getattr(value, '__qualname__', value.__name__)}")
    )
    if owner is not None and not isinstance(owner, types.ModuleType):
        encoding.encode(owner)


def _wrapper(encoding: ProgramEncoding, value: Any) -> None:
    """Write a function that jax has made of another: jitted, or with a derivative of its own."""
    if code.is_own(value) and is_named(value):
        encoding.write(text(f"jax {value.__module__}.{name_of(value)}"))
        return
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


def _is_of_xcache(value: Any) -> bool:
    """Return whether this is one of the functions that ``xcache.jit`` adds to those of ``jax.jit``."""
    return str(getattr(value, "__module__", None)).startswith("xcache.hook.calls.")


def _class(encoding: ProgramEncoding, value: type) -> None:
    """Write a class by its name, if that leads to it, with the data among its attributes."""
    if not is_named(value):
        raise CannotSkipError(f"class that its name does not lead to: {type_name(value)}")
    if encoding.met_singleton(b"T", value):
        return
    encoding.write(text(f"class {type_name(value)}"))
    if code.is_of_jax(value.__module__) or is_standard(value.__module__):
        return
    encoding.write(text(_file_digest(getattr(sys.modules[value.__module__], "__file__", None) or "")))
    encoding.add_holder(value)
    _class(encoding, type(value))


def _write_holder(encoding: ProgramEncoding, holder: Any, named: frozenset[str]) -> None:
    """Write the data in a class or module, with those attributes of its objects that the functions name."""
    encoding.write(text(label(holder)))
    if isinstance(holder, types.ModuleType):
        write_data(encoding, data_of_module(holder, named), named)
        return
    held = attributes_of_class(holder)
    write_data_of_class(encoding, holder, named)
    for name, field in held.get("__dataclass_fields__", {}).items():
        write_data(encoding, {name: (field.default, field.metadata)}, named)
    for each in held.values():
        if isinstance(each, type) and name_of(each).startswith(f"{holder.__qualname__}."):
            _class(encoding, each)


def _member(encoding: ProgramEncoding, value: enum.Enum) -> None:
    """Write a member of an enumeration, which is one object wherever it is met."""
    if not encoding.met_singleton(b"m", value):
        _class(encoding, type(value))
        encoding.encode_all(attributes(value))


def _no_axis_name(encoding: ProgramEncoding, _: Any) -> None:
    """Write what stands for no name in the closure of a function that ``jax.vmap`` has made."""
    encoding.write(b"no axis name")


def _generic(encoding: ProgramEncoding, value: Any) -> None:
    encoding.write(text(f"generic {type_name(type(value))}"))
    encoding.encode_all((typing.get_origin(value), *typing.get_args(value)))


def _module(encoding: ProgramEncoding, value: types.ModuleType) -> None:
    if sys.modules.get(value.__name__) is not value:
        raise CannotSkipError("module that its name does not lead to")
    encoding.write(text(f"module {value.__name__}"))
    if not code.is_of_jax(value.__name__) and not is_standard(value.__name__):
        encoding.add_holder(value)


def _tree(encoding: ProgramEncoding, value: Any) -> None:
    node = value.node_data()
    if node is None:
        encoding.write(b"leaf")
        return
    encoding.write(b"tree")
    _class(encoding, node[0])
    encoding.encode(node[1])
    encoding.encode_all(value.children())


def _jax_array(encoding: ProgramEncoding, value: Any) -> None:
    if isinstance(value, core.Tracer):
        raise CannotSkipError("tracer")
    if encoding.met_again(b"A", value):
        return
    encoding.write(text(f"array {value.dtype} {value.shape} {getattr(value, 'weak_type', False)} {value.committed}"))
    encoding.encode(value.sharding)
    if value.is_deleted():
        encoding.write(b"deleted")
        return
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if not value.is_fully_addressable or value.nbytes > MOST_BYTES:
        raise CannotSkipError("large array")
    content(encoding, np.asarray(value))


def _array(encoding: ProgramEncoding, value: np.ndarray[Any, Any]) -> None:
    if value.nbytes > MOST_BYTES or type(value) is not np.ndarray:
        raise CannotSkipError("large array")
    if not encoding.met_again(b"A", value):
        encoding.write(text(f"{value.strides} {value.flags.writeable}"))
        content(encoding, value)


def _jaxpr(_: ProgramEncoding, value: Any) -> None:
    """Refuse a jaxpr: its encoder leaves out what lowering does not read, and tracing may."""
    raise CannotSkipError(f"unknown type: {type_name(type(value))}")


_CONTAINERS = (dict, collections.OrderedDict, types.MappingProxyType, set, frozenset, list)
# Attributes of a function that say nothing of what it does.
_OF_A_FUNCTION = ("__annotations__", "__doc__", "__module__", "__name__", "__qualname__", "_fun", "fun_sourceinfo",
                  "fun_signature")  # fmt: skip
_HANDLERS_BY_BASE: tuple[tuple[Any, Any], ...] = (
    (types.FunctionType, _function),
    (types.MethodType, _method),
    (functools.partial, _partial),
    (util.HashablePartial, _hashable_partial),
    ((types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType, np.ufunc), _native),
    (type, _class),
    (enum.Enum, _member),
    (types.ModuleType, _module),
    (types.CodeType, _code),
    ((core.Jaxpr, getattr(core, "ClosedJaxpr", core.Jaxpr)), _jaxpr),
    (jax.tree_util.PyTreeDef, _tree),
    (jax.Array, _jax_array),
    (np.ndarray, _array),
)
