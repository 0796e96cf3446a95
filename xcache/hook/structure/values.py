"""Plain values of Python and numpy, and arrays."""

from __future__ import annotations

import collections
import enum
import hashlib
import marshal
import types
from typing import Any

import jax
import numpy as np
from jax._src import core

from xcache.hook.structure.encoding import (
    CannotSkipError,
    Encoding,
    encodes,
    encodes_kinds_of,
    tagged,
    text,
    type_name,
)

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
_NUMBERS = ("Int", "Float", "Complex")
TYPED_ARRAY = getattr(literals, "TypedNdArray", None)
# Constants up to this size are written as they are; larger ones as a digest.
_PLAIN_BYTES = 4096


@encodes(type(None), bool, int, str, bytes, float, complex)
def _plain(encoding: Encoding, value: Any) -> None:
    if value != value:
        # jax compares parameters to lower equal ones once, and no two NaN objects are equal: their identity counts.
        encoding.met_before(b"nan", value)
    # This format has no references, whose number differs between processes.
    encoding.write(b"m" + marshal.dumps(value, 2))


encodes(tuple)(Encoding.encode_all)
encodes(set, frozenset)(Encoding.write_unordered)


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


@encodes_kinds_of(core.Tracer)
def _tracer(_: Encoding, __: Any) -> None:
    raise CannotSkipError("tracer")


@encodes(np.dtype)
@encodes_kinds_of(np.dtype)
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


@encodes_kinds_of(np.ndarray)
def _subclass(_: Encoding, value: Any) -> None:
    raise CannotSkipError(f"array subclass: {type_name(type(value))}")


@encodes_kinds_of(jax.Array)
def _jax_array(encoding: Encoding, value: Any) -> None:
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


@encodes_kinds_of(np.generic)
def _scalar(encoding: Encoding, value: np.generic) -> None:
    encoding.write(b"G")
    dtype(encoding, value.dtype)
    encoding.write(tagged(b"g", value.tobytes()))


@encodes_kinds_of(enum.Enum)
def _enum(encoding: Encoding, value: enum.Enum) -> None:
    encoding.encode(type(value))
    encoding.write(text(str(value.name if value.name is not None else value.value)))


@encodes(*(getattr(literals, kind + number, None) for kind in ("Typed", "Literal") for number in _NUMBERS))
def _typed_scalar(encoding: Encoding, value: Any) -> None:
    """Write a Python number that carries a dtype."""
    base = type(value).__mro__[1]
    encoding.write(text(type(value).__name__))
    encoding.encode(base(value))
    dtype(encoding, value.dtype)
