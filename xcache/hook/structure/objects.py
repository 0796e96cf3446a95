"""Objects of jax's own classes, by their attributes, and the trees and effects among them."""

from __future__ import annotations

import abc
import collections.abc
import contextlib
import functools
import types
import typing
from typing import Any

import jax
from jax._src import core, linear_util
from jax._src.lib import xla_client

from xcache.hook.structure import code, locations
from xcache.hook.structure.encoding import (
    CannotSkipError,
    Encoding,
    by_content,
    encodes,
    slots_of,
    tagged,
    text,
    type_name,
)
from xcache.hook.structure.libraries import is_of_jax
from xcache.hook.structure.pristine import pristine

try:
    from jax._src.random import prng
except ImportError:  # before jax 0.10
    from jax._src import prng

# Base classes without attributes that matter.
_BASES = {
    object, tuple, dict, int, str, float, abc.ABC, typing.Generic, typing.Protocol, contextlib.ContextDecorator,
    collections.abc.Mapping, collections.abc.Sequence, collections.abc.Hashable, collections.abc.Collection,
    collections.abc.Sized, collections.abc.Iterable, collections.abc.Container, collections.abc.Reversible,
    collections.abc.Callable,
}  # fmt: skip
# Metaclasses of classes that are written in Python; an instance of a native class has state that nobody sees.
_METACLASSES = ("type", "ABCMeta", "EnumType", "EnumMeta", "_ProtocolMeta", "StrictABCMeta", "StrictABC",
                "_TypedDictMeta", "NamedTupleMeta")  # fmt: skip
_MEMOS = frozenset(("_hash", "_cached_hash", "_hash_value"))
_MISSING = object()


@functools.lru_cache(None)
def _slots(kind: Any) -> tuple[tuple[str, ...], frozenset[str]] | str:
    """Return the slots that make up an instance and the names of its memos, or why that cannot be told."""
    memos = set(_MEMOS)
    for base in kind.__mro__:
        if base in _BASES:
            continue
        if not is_of_jax(base.__module__):
            return f"unknown type: base class {type_name(base)}"
        if type(base).__name__ not in _METACLASSES:
            return f"unknown type: native class {type_name(base)}"
        memos.update(name for name, value in vars(base).items() if isinstance(value, functools.cached_property))
    if issubclass(kind, core.AbstractValue):
        memos.update(name for name in slots_of(kind) if name.startswith("_"))
    return tuple(name for name in slots_of(kind) if name not in memos), frozenset(memos)


def attributes(encoding: Encoding, value: Any) -> None:
    """Write an object of a class of jax's: the class and all attributes but memos."""
    kind = type(value)
    known = _slots(kind)  # type: ignore[arg-type] # a type is hashable
    if isinstance(known, str):
        raise CannotSkipError(known)
    slots, memos = known
    code.class_(encoding, kind)
    for slot in slots:
        content = getattr(value, slot, _MISSING)
        if content is _MISSING:
            encoding.write(b"?")
        else:
            encoding.encode(content)
    others = {key: held for key, held in getattr(value, "__dict__", {}).items() if key not in memos}
    encoding.write(b"d%d" % len(others))
    for key in sorted(others):
        encoding.write(text(key))
        encoding.encode(others[key])


@encodes(core.ShapedArray)
@by_content
def _shaped_array(encoding: Encoding, value: Any) -> None:
    if type(value.shape) is not tuple or not all(type(size) is int for size in value.shape):
        raise CannotSkipError("symbolic shape")
    attributes(encoding, value)


@encodes(jax.tree_util.PyTreeDef)
def _tree(encoding: Encoding, value: Any) -> None:
    node = value.node_data()
    if node is None:
        encoding.write(b"leaf" if value.num_leaves == 1 and value.num_nodes == 1 else b"none")
        return
    encoding.write(b"tree")
    code.class_(encoding, node[0])
    encoding.encode(node[1])
    encoding.encode_all(value.children())


@encodes(prng.PRNGImpl)
def _random_implementation(encoding: Encoding, value: Any) -> None:
    encoding.write(tagged(b"prng", pristine.describe(*value)))


def _debug_info(encoding: Encoding, value: Any) -> None:
    if encoding.kernels:
        locations.function(encoding, value)


def _named_tuple(encoding: Encoding, value: Any) -> None:
    code.class_(encoding, type(value))
    encoding.encode_all(tuple.__iter__(value))


def _tuple_with_attributes(encoding: Encoding, value: Any) -> None:
    encoding.write(b"ot")
    encoding.encode_all(tuple.__iter__(value))
    attributes(encoding, value)


def _temporary_axis(encoding: Encoding, value: Any) -> None:
    encoding.met_before(b"axis", value)


def _acts_as_function(kind: type, value: Any) -> bool:
    """Return whether an object is there to be called, so that its attributes do not tell what it does."""
    return (
        callable(value)
        and not isinstance(value, (core.AbstractValue, *_EFFECT))
        and not hasattr(kind, "__dataclass_fields__")
    )


_EFFECT = (core.Effect,) if hasattr(core, "Effect") else ()


def encoder_for(value: Any) -> Any:
    """Return the function for values of a type that is not in the table, or None."""
    kind = type(value)
    if isinstance(value, linear_util.WrappedFun):
        raise CannotSkipError("wrapped function")
    if isinstance(value, linear_util.DebugInfo):
        return _debug_info
    if not is_of_jax(kind.__module__) or isinstance(value, (xla_client.Device, dict, int, str, float)):
        return None
    if _acts_as_function(kind, value):
        return code.function
    if kind.__name__ == "_TempAxisName":
        return _temporary_axis
    if isinstance(value, tuple):
        return _named_tuple if hasattr(kind, "_fields") else _tuple_with_attributes
    if isinstance(value, types.ModuleType):
        return None
    return attributes
