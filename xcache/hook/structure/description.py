"""Describe jax's code as it is in this process: what a function, class or object does, by its content.

A function of jax's is described by its code and by all that it was made with. A program's is refused, because it may
read anything. What the code of a function reads beside that, and what a class has, ``reach`` adds.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
import marshal
import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.interpreters import mlir

from xcache.hook.structure.encoding import CannotSkipError, attributes_of, check_honest, type_name
from xcache.hook.structure.libraries import (
    is_from_its_file,
    is_known_module,
    is_of_a_library,
    is_of_jax,
    named,
    namespace,
    original_of,
)

PLAIN = frozenset((str, bool, int, float, complex, bytes, type(None)))
JITTED = type(jax.jit(lambda: None))
NATIVE = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType, np.ufunc,
)  # fmt: skip
# The types that Python makes of functions, and the attributes in which they hold these.
MADE_OF_FUNCTIONS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"), staticmethod: ("__func__",), classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"), functools.cached_property: ("func",),
}  # fmt: skip
# CPython's flag of a class that is not one of C's own static ones.
HEAP_TYPE = 1 << 9
_MAX_ARRAY_BYTES = 64 * 1024
# No text and no number of code is one of these.
_OPENS, _CLOSES = (..., ...), (..., None, None)
_code_of = operator.attrgetter("__code__")
_file_of = operator.attrgetter("co_filename")
_made_of = operator.attrgetter("__globals__", "__code__", "__defaults__", "__kwdefaults__", "__closure__")


class Description:
    """A list of plain values that tells what was written from anything else.

    A complete one refuses an object whose state it cannot tell. Otherwise an object counts by its class and the
    functions in it, and a container by its type: jax's modules hold caches and counters, too.
    """

    def __init__(self, *, is_complete: bool) -> None:
        self.parts: list[Any] = []
        # The functions whose code is a part of this, and the classes, primitives and decorated functions that it names.
        self.functions: list[types.FunctionType] = []
        self.named: list[Any] = []
        # The same holds as long as these do not change: dictionaries, cells of closures and partials, and of objects
        # what the function beside them tells.
        self.fixed: list[Any] = []
        self.objects: list[tuple[Any, Callable[[Any], dict[str, Any]]]] = []
        self.is_complete = is_complete
        # The file of each module of jax's that was met, by the id of its names.
        self._files: dict[int, str] = {}
        # Where each object was written first, by its id, which is in use as long as the object is kept.
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []
        # The same of a description to which this one is added.
        self.known: dict[int, int] = {}

    def write(self, value: Any) -> None:
        """Write a value; raise CannotSkipError if it is, or holds, code that is not jax's."""
        kind = type(value)
        check_honest(kind)
        if kind in PLAIN:
            self.parts.append(value)
        elif (number := self._numbers.get(id(value))) is not None:
            self.parts += (..., number)
        elif not self.is_complete and (number := self.known.get(id(value))) is not None:
            self.parts += (..., None, number)
        else:
            self._numbers[id(value)] = len(self.parts)
            self._kept.append(value)
            (_WRITERS.get(kind) or _writer_for(value))(self, value)

    def write_all(self, values: Iterable[Any]) -> None:
        """Write values in their order."""
        self.parts += _OPENS
        for value in values:
            if type(value) in PLAIN:
                self.parts.append(value)
            else:
                self.write(value)
        self.parts += _CLOSES

    def write_items(self, items: Mapping[Any, Any]) -> None:
        """Write a mapping, sorted by its keys."""
        self.write_all(each for key in sorted(items, key=_sorting) for each in (key, items[key]))

    def write_function(self, function: types.FunctionType) -> None:
        """Write a function: its name if it is a library's and that leads to it, or else all that it was made with."""
        names, code, defaults, keywords, closure = _made_of(function)
        if self._files.get(id(names)) != code.co_filename:
            original, module = original_of(function), names.get("__name__") or ""
            if original is not function:
                self.write(original)
                return
            if not is_from_its_file(function, module):
                # So that it is noticed if it becomes jax's own again.
                self.functions.append(function)
                raise CannotSkipError(f"function outside jax: {module}.{function.__qualname__}")
            if not is_of_jax(module) and named(module, function.__qualname__) is function:
                self.parts += module, function.__qualname__
                return
            if is_of_jax(module) and not code.co_filename.startswith("<"):
                self._files[id(names)] = code.co_filename
        self.parts += names["__name__"], function.__qualname__
        self.functions.append(function)
        if defaults:
            self.write_all(defaults)
        if keywords:
            self.fixed.append(keywords)
            self.write_items(keywords)
        if closure:
            self.fixed += closure
            self.write_all(map(_content_of, closure))
        if hasattr(function, "__wrapped__"):
            self.write_all(("wraps", function.__wrapped__))

    def digest(self) -> bytes:
        """Return a digest of all that was written."""
        made = hashlib.sha256(marshal.dumps(self.parts, 2))
        codes = sorted(map(_code_of, self.functions), key=_file_of)
        for file, held in itertools.groupby(codes, _file_of):
            try:
                content = marshal.dumps(tuple(held), 2)
            except ValueError:
                raise CannotSkipError("constant of an unknown type") from None
            # The same jax may be installed in several places.
            made.update(content.replace(marshal.dumps(file, 2), b""))
        return made.digest()

    def write_class(self, kind: type) -> None:
        """Write a class by its name."""
        module, name = kind.__module__, kind.__qualname__
        if not (is_of_jax(module) or is_of_a_library(module)):
            raise CannotSkipError(f"class outside jax: {type_name(kind)}")
        # A class in C may have its first module in its name.
        self.parts += module, name
        if is_of_jax(module):
            self.named.append(kind)
        elif kind not in (named(module, name), named(module, name.rpartition(".")[2])):
            self.parts.append("elsewhere")

    def write_module(self, module: types.ModuleType) -> None:
        """Write a module by its name."""
        module = original_of(module)
        kind = type(module)
        is_plain = kind is types.ModuleType or is_of_jax(kind.__module__) or is_of_a_library(kind.__module__)
        if not (is_plain and is_known_module(module)):
            # So that it is noticed if it becomes jax's own again.
            self.objects.append((module, code_in))
            raise CannotSkipError(f"module outside jax: {module.__name__}")
        self.parts.append(module.__name__)

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
        if (original := original_of(value)) is not value:
            self.write(original)
            return
        if not (is_of_jax(kind.__module__) or (is_of_a_library(kind.__module__) and not _is_called_in_python(value))):
            raise CannotSkipError(f"object outside jax: {type_name(kind)}")
        # A decorated function has a name, too.
        module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if qualified and module and is_of_jax(module) and named(module, qualified) is value:
            self.parts += module, qualified
            self.named.append(value)
        else:
            self.write_attributes(value)

    def write_attributes(self, value: Any) -> None:
        """Write an object of jax's or a library's, whether its name leads to it or not."""
        kind = type(value)
        self.write(kind)
        read = code_in
        if isinstance(value, tuple):
            self.write_all(tuple.__iter__(value))
        elif self.is_complete:
            read = all_in
        attributes = read(value) if self.is_complete or is_of_jax(kind.__module__) else {}
        if attributes:
            self.objects.append((value, read))
        elif read is all_in and not (is_of_jax(kind.__module__) and hasattr(value, "__dict__")):
            raise CannotSkipError(f"rule that holds an object: {type_name(kind)}")
        self.write_items(attributes)
        if getattr(value, "__wrapped__", None) is not None:
            self.write_all(("wraps", value.__wrapped__))

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
        if isinstance(value, dict):
            self.named.append(value)
        if self.is_complete and isinstance(value, dict):
            self.write_items(value)
        elif self.is_complete:
            self.write_all(value if isinstance(value, list) else sorted(value, key=_sorting))


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "an empty cell"


def _is_called_in_python(value: Any) -> bool:
    """Return whether a call of an object runs code that was written in Python, such as a mock's."""
    kind = type(value)
    is_called = isinstance(getattr(kind, "__call__", None), types.FunctionType)  # noqa: B004 - its type counts
    return is_called and kind.__module__ not in ("typing", "typing_extensions", "collections.abc")


def is_native(base: type) -> bool:
    """Return whether a class is written in C, so that its instances may have state that nobody sees."""
    module = sys.modules.get(base.__module__)
    file = None if module is None else namespace(module).get("__file__")
    is_in_python = file.endswith((".py", ".pyc")) if file else base.__module__ not in sys.builtin_module_names
    is_made_in_c = any(type(vars(base).get(name)) in NATIVE for name in ("__new__", "__init__"))
    return is_made_in_c or not base.__flags__ & HEAP_TYPE or module is None or not is_in_python


def _sorting(value: Any) -> str:
    """Return a text to sort by; raise CannotSkipError if it may differ in another process."""
    if type(value) in PLAIN or isinstance(value, (np.dtype, np.generic)):
        return f"{type(value).__name__} {value}"
    if isinstance(value, type):
        return type_name(value)
    raise CannotSkipError(f"rule that holds an object: {type_name(type(value))}")


def all_in(value: Any) -> dict[Any, Any]:
    """Return the attributes of an object of a class that is written in Python."""
    return dict(attributes_of(value))


def code_in(value: Any) -> dict[Any, Any]:
    """Return the functions and classes among an object's attributes."""
    return {name: held for name, held in attributes_of(value) if type(held) in CODE}


def _parts(*names: str) -> Any:
    """Return a writer of objects that these of their attributes tell."""

    def write(description: Description, value: Any) -> None:
        description.parts.append(type(value).__name__)
        description.write_all(getattr(value, name) for name in names)

    return write


def _partial(description: Description, value: functools.partial[Any] | functools.partialmethod[Any]) -> None:
    description.write_all((type(value).__name__, value.func, value.args))
    description.write_items(value.keywords)
    description.fixed += value.keywords, value


def lowering_tables() -> list[dict[Any, Any]]:
    """Return jax's tables of lowering rules for all platforms: another's rule may be part of a platform's program."""
    return [mlir._lowerings, *mlir._platform_specific_lowerings.copy().values()]


def _primitive(description: Description, value: Any) -> None:
    description.write_all(("primitive", value.name, type(value)))
    description.named.append(value)


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
    **{kind: _parts(*names) for kind, names in MADE_OF_FUNCTIONS.items()},
    functools.partialmethod: _partial,
    functools.partial: _partial,
    JITTED: Description.write_object,
}
CODE = frozenset(_WRITERS) - {tuple, type(Ellipsis)} | {type}
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
