"""Plain values of Python and numpy, and arrays."""

from __future__ import annotations

import collections
import enum
import hashlib
import types
from typing import Any

import jax
import numpy as np
from jax._src import core

from xcache.hook.structure.encoding import CannotSkipError, Encoding, encodes, tagged, text, type_name

try:
    # jax wraps literals in types of its own since 0.7.
    from jax._src import literals
except ImportError:
    literals = None
try:
    from jax._src.random import prng
except ImportError:  # before jax 0.10
    from jax._src import prng

_MAX_CONSTANT_BYTES = 256 * 1024 * 1024
# Constants up to this size are written as they are; larger ones as a digest.
_PLAIN_BYTES = 4096


@encodes(type(None))
def _none(encoding: Encoding, _: None) -> None:
    encoding.write(b"N")


@encodes(bool)
def _bool(encoding: Encoding, value: bool) -> None:
    encoding.write(b"T" if value else b"F")


@encodes(int)
def _int(encoding: Encoding, value: int) -> None:
    encoding.write(b"i%d;" % value)


@encodes(str)
def _str(encoding: Encoding, value: str) -> None:
    encoding.write(text(value))


@encodes(bytes)
def _bytes(encoding: Encoding, value: bytes) -> None:
    encoding.write(tagged(b"b", value))


@encodes(float)
def _float(encoding: Encoding, value: float) -> None:
    if value != value:
        # jax compares parameters to lower equal ones once, and no two NaN objects are equal: their identity counts.
        encoding.met_before(b"nan", value)
    encoding.write(tagged(b"f", np.float64(value).tobytes()))


@encodes(complex)
def _complex(encoding: Encoding, value: complex) -> None:
    if value != value:
        encoding.met_before(b"nan", value)
    encoding.write(tagged(b"z", np.complex128(value).tobytes()))


@encodes(tuple)
def _tuple(encoding: Encoding, value: tuple[Any, ...]) -> None:
    encoding.encode_all(value)


@encodes(list)
def _list(encoding: Encoding, value: list[Any]) -> None:
    encoding.write(b"l")
    encoding.encode_all(value)


@encodes(slice)
def _slice(encoding: Encoding, value: slice) -> None:
    encoding.write(b"slice")
    encoding.encode_all((value.start, value.stop, value.step))


@encodes(type(Ellipsis))
def _ellipsis(encoding: Encoding, _: Any) -> None:
    encoding.write(b"...")


@encodes(dict, types.MappingProxyType, collections.OrderedDict)
def _dict(encoding: Encoding, value: dict[Any, Any]) -> None:
    # The order of insertion counts: a lowering rule may iterate in it.
    encoding.write(b"{")
    encoding.encode_all(value.keys())
    encoding.encode_all(value.values())


@encodes(set, frozenset)
def _set(encoding: Encoding, value: frozenset[Any]) -> None:
    encoding.write_unordered(value)


@encodes(np.dtype)
def dtype(encoding: Encoding, value: np.dtype[Any]) -> None:
    """Write a dtype: its name, byte order and the module of its scalar type."""
    if value.fields is not None or value.subdtype is not None or value.metadata is not None:
        raise CannotSkipError("structured dtype")
    encoding.write(text(f"dtype {value.name} {value.str} {value.type.__module__}"))


@encodes(np.ndarray)
def _array(encoding: Encoding, value: np.ndarray[Any, Any]) -> None:
    if value.flags.writeable:
        raise CannotSkipError("array that is no constant")
    content(encoding, value)


def constant(encoding: Encoding, value: Any) -> None:
    """Write a constant or literal. An array of the program's own may change later; its content now is written."""
    kind = type(value)
    if kind is TYPED_ARRAY:
        encoding.write(b"TN" + (b"w" if value.weak_type else b"s"))
    elif kind is not np.ndarray:
        encoding.encode(value)
        return
    array = np.asarray(value).view(np.ndarray)
    if array.flags.writeable or array.base is not None:
        encoding.changeable.append(value)
    content(encoding, array)


def content(encoding: Encoding, value: np.ndarray[Any, Any]) -> None:
    """Write an array's dtype, shape and elements, and its axes of stride zero, which jax lowers as a broadcast.

    An axis of one element has that stride, too, where numpy has added it to the array.
    """
    if value.dtype.hasobject:
        raise CannotSkipError("object array")
    if value.nbytes > _MAX_CONSTANT_BYTES:
        raise CannotSkipError("large constant")
    encoding.write(b"A")
    dtype(encoding, value.dtype)
    encoding.encode_all(value.shape)
    encoding.encode_all(axis for axis, stride in enumerate(value.strides) if stride == 0)
    elements = value.tobytes()
    large = len(elements) > _PLAIN_BYTES
    encoding.write(tagged(b"H", hashlib.sha256(elements).digest()) if large else tagged(b"h", elements))


def _jax_array(encoding: Encoding, value: Any) -> None:
    if isinstance(value, core.Tracer):
        raise CannotSkipError("tracer")
    if isinstance(value, prng.PRNGKeyArray):
        encoding.write(b"key")
        encoding.encode(value.dtype)
        value = value._base_array
    if not value.is_fully_addressable:
        raise CannotSkipError("constant of several processes")
    # The program can delete it.
    encoding.changeable.append(value)
    encoding.write(b"R")
    content(encoding, np.asarray(value))


def _scalar(encoding: Encoding, value: np.generic) -> None:
    encoding.write(b"G")
    dtype(encoding, value.dtype)
    encoding.write(tagged(b"g", value.tobytes()))


def _enum(encoding: Encoding, value: enum.Enum) -> None:
    encoding.encode(type(value))
    encoding.write(text(str(value.name if value.name is not None else value.value)))


def _typed_scalar(encoding: Encoding, value: Any) -> None:
    """Write a Python number that carries a dtype."""
    base = type(value).__mro__[1]
    encoding.write(text(type(value).__name__))
    encoding.encode(base(value))
    dtype(encoding, value.dtype)


for _name in ("TypedInt", "TypedFloat", "TypedComplex", "LiteralInt", "LiteralFloat", "LiteralComplex"):
    if hasattr(literals, _name):
        encodes(getattr(literals, _name))(_typed_scalar)
TYPED_ARRAY = getattr(literals, "TypedNdArray", None)


def encoder_for(value: Any) -> Any:
    """Return the function for values of a type that is not in the table, or None."""
    if isinstance(value, core.Tracer):
        raise CannotSkipError("tracer")
    if isinstance(value, np.ndarray):
        raise CannotSkipError(f"array subclass: {type_name(type(value))}")
    for base, handler in ((np.generic, _scalar), (np.dtype, dtype), (jax.Array, _jax_array), (enum.Enum, _enum)):
        if isinstance(value, base):
            return handler
    return None
