"""Describe jax's code as it is in this process: what a function, class or object does, by its content.

A function of jax's is described by its bytecode, constants and names, and by all that it was made with. A program's is
refused, because it may read anything. The description of an object that stands where its name says is that name; the
description of the module there (``pristine``) says the rest, and ``uses`` tells which modules those are.
"""

from __future__ import annotations

import dis
import enum
import functools
import gc
import hashlib
import inspect
import marshal
import operator
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.interpreters import mlir

from xcache.hook.structure.encoding import CannotSkipError, type_name
from xcache.hook.structure.libraries import (
    is_from_its_file,
    is_known_module,
    is_of_a_library,
    is_of_jax,
    is_xcaches,
)

PLAIN = frozenset((str, bool, int, float, complex, bytes, type(None)))
JITTED = type(jax.jit(lambda: None))
NATIVE = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType, np.ufunc,
)  # fmt: skip
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_MAX_ARRAY_BYTES = 64 * 1024
# What of a code object decides what it does. Lines and the names of local variables do not.
_behaviour_of = operator.attrgetter(
    "co_code",
    "co_qualname",
    "co_names",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_flags",
    "co_exceptiontable",
)
_names_of = operator.attrgetter("co_names")
_made_of = operator.attrgetter("__code__", "__globals__", "__defaults__", "__kwdefaults__", "__closure__")
# xcache's own replacements of functions of jax, by id, each with what it stands for.
replaced: dict[int, tuple[Any, Any]] = {}


class Description:
    """A list of plain values that tells what was written from anything else.

    A complete one refuses an object whose state it cannot tell. Otherwise an object counts by its class and the
    functions in it, and a container by its type: jax's modules hold caches and counters, too.
    """

    def __init__(self, *, is_complete: bool, home: types.ModuleType | None = None) -> None:
        """``home`` is the module whose functions and classes are written with all that they are."""
        self.parts: list[Any] = []
        # The modules of jax that this names.
        self.uses: set[str] = set()
        # The description holds as long as these do not change.
        self.functions: list[types.FunctionType] = []
        self.dictionaries: list[dict[Any, Any]] = []
        self.is_complete = is_complete
        self._home: str | None = None if home is None else home.__name__
        self._file: str | None = getattr(home, "__file__", None)
        self._names = None if home is None else vars(home)
        self._codes: list[types.CodeType] = []
        # Where each object was written first, by its id, which is in use as long as the object is kept.
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []

    def write(self, value: Any) -> None:
        """Write a value; raise CannotSkipError if it is, or holds, code that is not jax's."""
        kind = type(value)
        if kind in PLAIN:
            self.parts.append(value)
        elif (number := self._numbers.get(id(value))) is not None:
            self.parts += (..., number)
        else:
            self._numbers[id(value)] = len(self.parts)
            self._kept.append(value)
            (_WRITERS.get(kind) or _writer_for(value))(self, value)

    def write_all(self, values: Iterable[Any]) -> None:
        """Write values in their order."""
        self.parts.append("(")
        for value in values:
            self.write(value)
        self.parts.append(")")

    def write_items(self, items: Mapping[Any, Any]) -> None:
        """Write a mapping, sorted by its keys."""
        self.write_all(each for key in sorted(items, key=_sorting) for each in (key, items[key]))

    def write_function(self, function: types.FunctionType) -> None:
        """Write a function: its name if that leads to it, or else its code and all that it was made with."""
        code, names, defaults, keywords, closure = _made_of(function)
        if names is not self._names:
            if is_xcaches(function):
                self.write(function.__wrapped__)  # type: ignore[attr-defined] # as functools.wraps leaves it
                return
            module = names.get("__name__", "")
            # The description of a module of jax's says whether the functions there are of its file.
            if is_of_jax(module) and self._write_name(module, function.__qualname__, function):
                return
            if not is_from_its_file(function, module):
                raise CannotSkipError(f"function outside jax: {module}.{function.__qualname__}")
            if self._write_name(module, function.__qualname__, function):
                return
            self._use(module)
            self.parts.append(module)
        elif code.co_filename != self._file and not is_from_its_file(function, self._home or ""):
            raise CannotSkipError(f"function outside jax: {self._home}.{function.__qualname__}")
        self.functions.append(function)
        self._codes.append(code)
        self.parts.append("function")
        if defaults:
            self.write_all(defaults)
        if keywords:
            self.write_items(keywords)
        if closure:
            for cell in closure:
                try:
                    self.write(cell.cell_contents)
                except ValueError:
                    self.parts.append("an empty cell")
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self.write(wrapped)

    def digest(self) -> bytes:
        """Return a digest of all that was written."""
        made = hashlib.blake2b(marshal.dumps(self.parts, 2), digest_size=16)
        # The list grows by the code within each code. One after the other, because many containers at once would make
        # Python's garbage collector look at all objects of the program.
        for code in self._codes:
            held = code.co_consts
            if types.CodeType in map(type, held):
                self._codes.extend(each for each in held if type(each) is types.CodeType)
                held = tuple(None if type(each) is types.CodeType else each for each in held)
            made.update(marshal.dumps((_behaviour_of(code), held), 2))
        return made.digest()

    def apart(self, value: Any) -> bytes:
        """Return a digest of a value that is no part of this, though this depends on the same objects."""
        other = Description(is_complete=self.is_complete)
        other.uses, other.functions, other.dictionaries = self.uses, self.functions, self.dictionaries
        other.write(value)
        return other.digest()

    def names(self) -> frozenset[str]:
        """Return the names of globals, attributes and modules in the code that was written."""
        return frozenset().union(*map(_names_of, self._codes))

    def write_class(self, kind: type) -> None:
        """Write a class: its name if that leads to it, or else all that it has."""
        module = kind.__module__
        if not (is_of_jax(module) or is_of_a_library(module)):
            raise CannotSkipError(f"class outside jax: {type_name(kind)}")
        name = kind.__qualname__
        # A class in C may have its first module in its name.
        is_named = self._write_name(module, name, kind) or self._write_name(module, name.rpartition(".")[2], kind)
        if module == self._home or not is_named:
            self.parts.append(type_name(kind))
            self._use(module)
            if is_of_jax(module):
                self._write_class_content(kind)

    def _write_class_content(self, kind: type) -> None:
        self.write_all((type(kind), *kind.__bases__))
        names = namespace_of(kind)
        self.dictionaries.append(names)
        for name, held in names.copy().items():
            if isinstance(held, type) and type(kind).__module__ == "nanobind":
                # jaxlib makes the class of an iterator when the first one is needed.
                continue
            if type(held) in _NO_CONTENT or (name.startswith("__") and type(held) not in _CODE):
                continue
            self.parts.append(name)
            if type(held) is kind and not callable(held):
                # A member of an enumeration, or an instance that the class holds.
                self.write(getattr(held, "_value_", None))
            else:
                self.write(held)

    def _write_name(self, module: str, qualified: str, value: Any) -> bool:
        """Write the name of an object if it leads to it; return whether it does."""
        found: Any = sys.modules.get(module)
        for part in qualified.split("."):
            found = getattr(found, part, None)
        if found is not value and not (is_xcaches(found) and found.__wrapped__ is value):
            return False
        self.parts.append(f"{module}.{qualified}")
        self._use(module)
        return True

    def write_module(self, module: types.ModuleType) -> None:
        """Write a module by its name."""
        if is_xcaches(module):
            module = module.__wrapped__
        if not is_known_module(module):
            raise CannotSkipError(f"module outside jax: {module.__name__}")
        self.parts.append(module.__name__)
        self._use(module.__name__)

    def _use(self, module: str) -> None:
        if is_of_jax(module):
            self.uses.add(module)

    def write_native(self, value: Any) -> None:
        """Write a function in C by its name and the object that it belongs to."""
        owner = getattr(value, "__self__", None)
        module = getattr(value, "__module__", None) or type_name(getattr(value, "__objclass__", type(value)))
        self.parts.append(f"{module} {value.__name__}")
        if not isinstance(owner, (types.ModuleType, type(None))):
            self.write(owner)

    def write_object(self, value: Any) -> None:
        """Write an object: its class, and its attributes, of which only functions count if this is not complete."""
        kind = type(value)
        if is_xcaches(value):
            self.write(value.__wrapped__)
            return
        if not (is_of_jax(kind.__module__) or (is_of_a_library(kind.__module__) and not _is_called_in_python(value))):
            raise CannotSkipError(f"object outside jax: {type_name(kind)}")
        # A decorated function has a name, too.
        module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if (
            qualified
            and module
            and is_of_jax(module)
            and module != self._home
            and self._write_name(module, qualified, value)
        ):
            return
        self.write(kind)
        must_tell = self.is_complete or is_of_jax(kind.__module__)
        attributes = attributes_of(value) if must_tell else {}
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:
            attributes["__wrapped__"] = wrapped
        if not self.is_complete:
            attributes = {name: held for name, held in attributes.items() if type(held) in _CODE}
        elif not attributes and not (is_of_jax(kind.__module__) and hasattr(value, "__dict__")):
            raise CannotSkipError(f"rule that holds an object: {type_name(kind)}")
        self.write_items(attributes)

    def write_tuple(self, value: tuple[Any, ...]) -> None:
        """Write a tuple. jax makes some of a set of classes, in an order that differs between processes."""
        if not self.is_complete and len(value) > 1 and all(isinstance(each, type) for each in value):
            value = tuple(sorted(value, key=type_name))
        self.write_all(value)

    def write_array(self, value: np.ndarray[Any, Any]) -> None:
        """Write an array's content."""
        if value.dtype.hasobject or value.nbytes > _MAX_ARRAY_BYTES:
            raise CannotSkipError("large constant")
        self.parts.append((value.dtype.str, value.shape, value.tobytes()))

    def write_container(self, value: Any) -> None:
        """Write a list, set or dictionary, of which the content counts only where the description is complete."""
        self.parts.append(type(value).__name__)
        if self.is_complete and isinstance(value, dict):
            self.write_items(value)
        elif self.is_complete:
            self.write_all(value if isinstance(value, list) else sorted(value, key=_sorting))


def _is_called_in_python(value: Any) -> bool:
    """Return whether a call of an object runs code that was written in Python, such as a mock's."""
    kind = type(value)
    is_called = isinstance(inspect.getattr_static(kind, "__call__", None), types.FunctionType)
    return is_called and kind.__module__ not in ("typing", "typing_extensions", "collections.abc")


def _sorting(value: Any) -> str:
    """Return a text to sort by; raise CannotSkipError if it may differ in another process."""
    if type(value) in PLAIN or isinstance(value, (np.dtype, np.generic)):
        return f"{type(value).__name__} {value}"
    if isinstance(value, type):
        return type_name(value)
    raise CannotSkipError(f"rule that holds an object: {type_name(type(value))}")


def assigned_globals(code: types.CodeType) -> set[str]:
    """Return the globals that this code assigns: they are state, and differ from moment to moment."""
    found = set[str]()
    if _STORE_GLOBAL in code.co_code[::2]:
        found.update(each.argval for each in dis.get_instructions(code) if each.opcode == _STORE_GLOBAL)
    return found.union(*(assigned_globals(each) for each in code.co_consts if type(each) is types.CodeType))


def namespace_of(kind: type) -> dict[str, Any]:
    """Return the dictionary behind a class."""
    return gc.get_referents(kind.__dict__)[0]  # type: ignore[no-any-return]


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of a class that is written in Python."""
    try:
        # A generic alias would give its class's.
        found = dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        found = {}
    kind: Any = type(value)
    found.update((slot, getattr(value, slot)) for slot in _slots_of(kind) if hasattr(value, slot))
    return found


@functools.cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    slots = (base.__dict__.get("__slots__", ()) for base in kind.__mro__)
    each = (slot for some in slots for slot in ((some,) if isinstance(some, str) else some))
    return tuple(slot for slot in each if slot not in ("__dict__", "__weakref__"))


def _parts(*names: str) -> Any:
    """Return a writer of objects that these of their attributes tell."""

    def write(description: Description, value: Any) -> None:
        description.parts.append(type(value).__name__)
        description.write_all(getattr(value, name) for name in names)

    return write


def _partial(description: Description, value: functools.partial[Any]) -> None:
    description.write_all(("partial", value.func, value.args))
    description.write_items(value.keywords)


def rules_of(primitive: Any) -> list[Any]:
    """Return a primitive's lowering rules for all platforms: another platform's may be part of this one's program."""
    tables = mlir._lowerings, *mlir._platform_specific_lowerings.copy().values()
    return [table.get(primitive) for table in tables]


def functions_of(primitive: Any) -> dict[str, Any]:
    """Return the functions that tracing a primitive calls; a lowering rule may trace."""
    held = vars(primitive)
    return {name: held[name] for name in ("abstract_eval", "bind", "bind_with_trace") if name in held}


def _primitive(description: Description, value: Any) -> None:
    description.write_all(("primitive", value.name, type(value)))
    if description.is_complete:
        description.write_all((*rules_of(value), *functions_of(value).values()))


def _namespace(description: Description, value: types.SimpleNamespace) -> None:
    description.parts.append("namespace")
    description.write_items(vars(value))


def _text(description: Description, value: Any) -> None:
    description.parts.append(f"{type_name(type(value))} {value!r}")


_WRITERS: dict[type, Any] = {
    type(Ellipsis): _text,
    types.SimpleNamespace: _namespace,
    tuple: Description.write_tuple,
    types.FunctionType: Description.write_function,
    types.MethodType: _parts("__func__", "__self__"),
    staticmethod: _parts("__func__"),
    classmethod: _parts("__func__"),
    property: _parts("fget", "fset", "fdel"),
    functools.cached_property: _parts("func"),
    functools.partialmethod: _parts("func", "args"),
    functools.partial: _partial,
    JITTED: Description.write_object,
}
_CODE = frozenset(_WRITERS) - {tuple, type(Ellipsis)} | {type}
_NO_CONTENT = frozenset((
    types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType, dict, list
))  # fmt: skip
# In this order, for types that the table lacks.
_FAMILIES: tuple[tuple[Any, Any], ...] = (
    (type, Description.write_class),
    (types.ModuleType, Description.write_module),
    (NATIVE, Description.write_native),
    (functools.partial, _partial),
    (core.Primitive, _primitive),
    ((np.dtype, np.generic, enum.Enum), _text),
    ((dict, list, set, frozenset), Description.write_container),
    (object, Description.write_object),
)


def _writer_for(value: Any) -> Any:
    """Return the writer for a type that the table lacks, and add it there."""
    writer = next(writer for family, writer in _FAMILIES if isinstance(value, family))
    return _WRITERS.setdefault(type(value), writer)
