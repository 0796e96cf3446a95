"""The content of the program's own values: functions, static arguments, and what is in the nodes of trees.

A function is told by its name and its code, with what it closes over. The functions that it calls are not looked
into: the program's version says what they are.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from xcache.hook.structure import code, digest  # noqa: F401 - digest completes the table of types
from xcache.hook.structure.encoding import HANDLERS, Encoding, MustLowerError, text
from xcache.hook.structure.values import content

_MOST_BYTES = 1024 * 1024
_MOST_OBJECTS = 50_000
_MOST_ELEMENTS = 128
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Contents(Encoding):
    """An encoding that also writes values of the program's own classes, and its functions."""

    def __init__(self) -> None:
        super().__init__()
        # Whether a value that cannot be written is replaced by the name of its class.
        self.is_lenient = False
        self._objects = 0

    def encode(self, value: Any) -> None:
        """Write a value; raise MustLowerError if its content cannot be told."""
        handler = _handler(value)
        if handler is None:
            super().encode(value)
            return
        self._objects += 1
        if self._objects > _MOST_OBJECTS:
            raise MustLowerError("large object")
        if not self.is_lenient:
            handler(self, value)
            return
        length = len(self._parts)
        try:
            handler(self, value)
        except MustLowerError:
            del self._parts[length:]
            self.write(text(f"a {_name(type(value))}"))


def _handler(value: Any) -> Any:
    """Return the function that writes a value of the program's own; None for plain values and those of jax."""
    kind = type(value)
    if kind in _PLAIN:
        return None
    for known, handler in _HANDLERS:
        if isinstance(value, known):
            return handler
    if kind in HANDLERS or kind.__module__.split(".", 1)[0] == "numpy":
        return None
    if code.is_of_jax(kind.__module__):
        return _wrapper if callable(value) and callable(getattr(value, "__wrapped__", None)) else None
    return _object


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _function(contents: Contents, value: types.FunctionType) -> None:
    if code.is_own(value):
        contents.write(text(code.name(value)))
        return
    if contents.is_repeated(b"F", value):
        return
    contents.write(text(_name(value)))
    _code(contents, value.__code__)
    cells = []
    for cell in value.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # an empty cell
            cells.append(None)
    contents.encode_all((value.__defaults__, value.__kwdefaults__, *cells))
    named = {name: value.__globals__.get(name) for name in _names(value.__code__) if not name.startswith("__")}
    contents.encode_all(item for item in sorted(named.items()) if _is_plain(item[1]))


def _code(contents: Contents, value: types.CodeType) -> None:
    """Write what code does, and not where it stands."""
    if contents.is_repeated(b"code", value):
        return
    contents.encode_all((
        value.co_code, value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars, value.co_flags,
        value.co_argcount, value.co_kwonlyargcount, value.co_posonlyargcount, value.co_exceptiontable,
    ))  # fmt: skip
    contents.encode_all(value.co_consts)


def _names(value: types.CodeType) -> Iterator[str]:
    """Yield all names of globals and attributes that code uses, with the functions defined in it."""
    yield from value.co_names
    for each in value.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each)


def _is_plain(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.nbytes <= _MOST_BYTES and not value.dtype.hasobject
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def _method(contents: Contents, value: types.MethodType) -> None:
    contents.write(b"method")
    contents.encode_all((value.__func__, value.__self__))


def _partial(contents: Contents, value: functools.partial[Any]) -> None:
    contents.write(b"partial")
    contents.encode_all((value.func, value.args, sorted(value.keywords.items())))


def _native(contents: Contents, value: Any) -> None:
    contents.write(text(f"native {getattr(value, '__module__', None)}.{value.__qualname__}"))


def _wrapper(contents: Contents, value: Any) -> None:
    contents.write(text(_name(type(value))))
    contents.encode(value.__wrapped__)


def _class(contents: Contents, value: type) -> None:
    contents.write(text(f"class {_name(value)}"))


def _module(contents: Contents, value: types.ModuleType) -> None:
    contents.write(text(f"module {value.__name__}"))


def _tree(contents: Contents, value: Any) -> None:
    node = value.node_data()
    if node is None:
        contents.write(b"leaf")
        return
    contents.write(b"tree")
    _class(contents, node[0])
    contents.encode(node[1])
    contents.encode_all(value.children())


def _jax_array(contents: Contents, value: Any) -> None:
    contents.write(text(f"array {value.dtype} {value.shape}"))
    is_extended = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    if value.size <= _MOST_ELEMENTS and not is_extended and value.is_fully_addressable and not value.is_deleted():
        # Python may decide by a small one. A program that computes with any gets no record, as it is a constant.
        content(contents, np.asarray(value))


def _array(contents: Contents, value: np.ndarray[Any, Any]) -> None:
    if value.nbytes > _MOST_BYTES or type(value) is not np.ndarray:
        raise MustLowerError("large array")
    content(contents, value)


def _object(contents: Contents, value: Any) -> None:
    """Write an object by its class, its attributes, and its items if it is a list, tuple or dictionary."""
    kind = type(value)
    if contents.is_repeated(b"O", value):
        return
    contents.write(text(_name(kind)))
    attributes = dict(getattr(value, "__dict__", {}))
    slots = [name for base in kind.__mro__ for name in _slots(base)]
    attributes.update((name, getattr(value, name)) for name in slots if hasattr(value, name))
    native = {base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE and base.__module__ != "typing"}
    if not native <= _TRANSPARENT or not (slots or hasattr(value, "__dict__") or native & _ITEMS.keys()):
        raise MustLowerError(f"unknown type: {_name(kind)}")
    memos = {name for base in kind.__mro__ for name, held in vars(base).items() if _is_memo(held)}
    contents.encode_all(
        item for item in sorted(attributes.items()) if item[0] not in memos and "hash" not in item[0].lower()
    )
    for base, items in _ITEMS.items():
        if isinstance(value, base):
            contents.encode(items(value))


def _slots(kind: type) -> Iterator[str]:
    slots = vars(kind).get("__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        if name not in ("__dict__", "__weakref__"):
            is_private = name.startswith("__") and not name.endswith("__")
            yield f"_{kind.__name__.lstrip('_')}{name}" if is_private else name


def _is_memo(value: Any) -> bool:
    return isinstance(value, functools.cached_property)


# CPython's flag of a class that a class statement made. A class of C's may have it, too, but then has no attributes.
_HEAP_TYPE = 1 << 9
# Native classes whose instances are known by their items, and what these are.
_ITEMS: dict[type, Any] = {kind: kind for kind in (dict, list, tuple, str, int, float)}
_TRANSPARENT = {object, types.SimpleNamespace, *_ITEMS}
_HANDLERS: tuple[tuple[Any, Any], ...] = (
    (types.FunctionType, _function),
    (types.MethodType, _method),
    (functools.partial, _partial),
    ((types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType, np.ufunc), _native),
    (type, _class),
    (types.ModuleType, _module),
    (types.CodeType, _code),
    (jax.tree_util.PyTreeDef, _tree),
    (jax.Array, _jax_array),
    (np.ndarray, _array),
)
