"""Objects of jax's own classes, by their attributes, and the trees and effects among them."""

from __future__ import annotations

import abc
import functools
import operator
import types
import weakref
from typing import Any

import jax
from jax._src import core, linear_util

# The functions of all other modules are asked before the one for any object.
from xcache.hook.structure import code, locations, placement, values  # noqa: F401
from xcache.hook.structure.description import is_native
from xcache.hook.structure.encoding import (
    CannotSkipError,
    Encoding,
    are_same,
    attributes_of,
    attributes_of_class,
    encodes,
    encodes_kinds_of,
    tagged,
    text,
    type_name,
)
from xcache.hook.structure.libraries import is_of_a_library, is_of_jax
from xcache.hook.structure.pristine import pristine

try:
    from jax._src.random import prng
except ImportError:  # before jax 0.10
    from jax._src import prng

_MEMOS = frozenset(("_hash", "_cached_hash", "_hash_value"))


@functools.cache
def _memos_of(kind: Any) -> frozenset[str]:
    """Return the names of the attributes that count nothing; raise CannotSkipError if the others do not tell all."""
    for base in (each for each in kind.__mro__ if each not in (object, tuple)):
        if not (is_of_jax(base.__module__) or is_of_a_library(base.__module__)):
            raise CannotSkipError(f"unknown type: base class {type_name(base)}")
        if is_native(base) or not (type(base) is type or issubclass(type(base), abc.ABCMeta)):
            raise CannotSkipError(f"unknown type: native class {type_name(base)}")
    slots, memos = attributes_of_class(kind)
    of_aval = {name for name in slots if name.startswith("_")} if issubclass(kind, core.AbstractValue) else ()
    return memos.union(_MEMOS, of_aval)


def attributes(encoding: Encoding, value: Any) -> None:
    """Write an object of a class of jax's: the class and all attributes but memos."""
    kind = type(value)
    memos = _memos_of(kind)  # type: ignore[arg-type] # a type is hashable
    code.class_(encoding, kind)
    held = {name: each for name, each in attributes_of(value) if name not in memos}
    encoding.write(b"d%d" % len(held))
    for name in sorted(held):
        encoding.write(text(name))
        encoding.encode(held[name])


@encodes(core.ShapedArray)
def _shaped_array(encoding: Encoding, value: Any) -> None:
    encoding.write_token(value, _of_shaped_array)


_parts_of_shaped_array = operator.attrgetter(
    *(name for name in attributes_of_class(core.ShapedArray)[0] if not name.startswith("_"))
)


def _of_shaped_array(encoding: Encoding, value: Any) -> None:
    if type(value.shape) is not tuple or not all(type(size) is int for size in value.shape):
        raise CannotSkipError("symbolic shape")
    if not encoding.has_tokens or not core.ShapedArray.__weakrefoffset__:
        attributes(encoding, value)
        return
    # A jax that refers to them weakly (0.10 and newer) uses the same objects in all programs.
    key, parts = (id(value), encoding.kernels > 0), _parts_of_shaped_array(value)
    known, before, content = pristine.avals.get(key, (None, (), b""))
    if known is None or known() is not value or not are_same(parts, before):
        content, kept = encoding.apart(value, attributes), pristine.avals
        kept[key] = weakref.ref(value, lambda _: kept.pop(key, None)), parts, content
    encoding.write(content)


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


@encodes_kinds_of(linear_util.WrappedFun)
def _wrapped_function(_: Encoding, __: Any) -> None:
    raise CannotSkipError("wrapped function")


@encodes_kinds_of(linear_util.DebugInfo)
def _debug_info(encoding: Encoding, value: Any) -> None:
    if encoding.kernels:
        locations.function(encoding, value)


@encodes_kinds_of(object)
def _object(encoding: Encoding, value: Any) -> None:
    kind = type(value)
    if not is_of_jax(kind.__module__) or isinstance(value, (dict, int, str, float, types.ModuleType)):
        raise CannotSkipError(f"unknown type: {type_name(kind)}")
    if callable(value) and not isinstance(value, _DATA) and not hasattr(kind, "__dataclass_fields__"):
        # It is there to be called, so its attributes do not tell what it does.
        code.function(encoding, value)
    elif kind.__name__ == "_TempAxisName":
        encoding.met_before(b"axis", value)
    else:
        if isinstance(value, tuple):
            encoding.write(b"t")
            encoding.encode_all(tuple.__iter__(value))
        attributes(encoding, value)


_DATA = (core.AbstractValue, core.Effect) if hasattr(core, "Effect") else core.AbstractValue
