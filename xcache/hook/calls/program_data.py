"""The data among the names of a module, a class, or a function's globals, which a program can change as it runs.

Numbers, texts, dtypes, enum members and arrays are data, and containers count with all data in them. Of anything else
only the name counts, or the type.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import numbers
import types
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xcache.hook.structure import code
from xcache.hook.structure.encoding import text, type_name

if TYPE_CHECKING:
    from xcache.hook.calls.program_values import ProgramEncoding

_SCALARS = (numbers.Number, str, bytes, np.generic, np.dtype, enum.Enum, np.ndarray, jax.Array, range, slice)
_MAPPINGS = (dict, types.MappingProxyType)
_SEQUENCES = (tuple, list, set, frozenset, collections.deque)
# Names that Python gives to modules and classes, and that say where they are or what they are called.
_OF_PYTHON = frozenset((
    "__name__", "__qualname__", "__module__", "__file__", "__path__", "__cached__", "__doc__", "__loader__", "__spec__",
    "__package__", "__builtins__", "__warningregistry__", "__annotations__", "__dict__", "__weakref__", "__all__",
    "__version__", "__slots__", "__match_args__", "__firstlineno__", "__static_attributes__", "__parameters__",
    "__orig_bases__", "__abstractmethods__", "__dataclass_fields__", "__dataclass_params__",
))  # fmt: skip


def write_data(encoding: ProgramEncoding, names: Mapping[str, Any]) -> None:
    """Write all names that lead to data, in alphabetical order, and the data."""
    found = [(name, names[name]) for name in sorted(names) if name not in _OF_PYTHON and _has_data(names[name], 0)]
    encoding.write(b"D%d" % len(found))
    for name, value in found:
        encoding.write(text(name))
        _write(encoding, value)


def _has_data(value: Any, depth: int) -> bool:
    if isinstance(value, _SCALARS):
        return True
    if isinstance(value, type):
        # ``jnp.bfloat16`` and ``np.float32`` are settings more than code.
        return issubclass(value, np.generic) or hasattr(value, "dtype")
    # No program's data are so deep; a list that holds itself is.
    return depth < 10 and any(_has_data(each, depth + 1) for each in _parts(value) or ())


def _parts(value: Any) -> Iterable[Any] | None:
    """Return all that a container holds; None for anything else."""
    kind = type(value)
    if isinstance(value, _MAPPINGS):
        return (*value.keys(), *value.values())
    if isinstance(value, _SEQUENCES):
        return tuple(value)
    if kind is types.SimpleNamespace:
        return (*vars(value).keys(), *vars(value).values())
    if dataclasses.is_dataclass(kind) and not code.is_of_jax(kind.__module__):
        return [getattr(value, field.name, None) for field in dataclasses.fields(kind)]
    return None


def _write(encoding: ProgramEncoding, value: Any) -> None:
    parts = None if isinstance(value, _SCALARS) else _parts(value)
    if parts is not None:
        if encoding.met_again(b"d", value):
            return
        parts = tuple(parts)
        encoding.write(text(f"{type_name(type(value))} {len(parts)}"))
        if isinstance(value, (set, frozenset)):
            encoding.encode(frozenset(each for each in parts if isinstance(each, _SCALARS)))
            return
        for each in parts:
            _write(encoding, each)
    elif not _has_data(value, 0):
        encoding.write(text(f"a {label(value)}"))
    elif isinstance(value, range) or type(value).__module__ == "decimal":
        encoding.write(text(f"{type_name(type(value))} {value!r}"))
    else:
        encoding.encode(value)


def label(value: Any) -> str:
    """Return the name of a function, class or module, and the type of anything else."""
    name = getattr(value, "__qualname__", None) if callable(value) else getattr(value, "__name__", None)
    named = f" {getattr(value, '__module__', None)}.{name}" if isinstance(name, str) else ""
    return f"{type_name(type(value))}{named}"
