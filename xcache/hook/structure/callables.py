"""The description of a jax callable: a text that tells it from any other.

jax's own files are in the digest of a structure, so a place in them says what the code there does. The rest is what a
callable was made with: a closure's cells, a partial's arguments, an object's attributes.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import sys
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax._src import core

from xcache.hook.structure.code import NATIVE, attributes_of
from xcache.hook.structure.encoding import CannotSkipError, type_name
from xcache.hook.structure.rules import rules_of

_PLAIN = frozenset((str, bool, int, float, complex, bytes, type(None), type(Ellipsis)))
# By id. The code object is kept so that its id is not used again.
_fingerprints: dict[int, tuple[types.CodeType, str]] = {}


def describe_callable(function: Any) -> str:
    """Return a text that tells this callable of jax's from any other, by its code and all it was made with.

    Raise CannotSkipError if it holds something that this cannot describe.
    """
    return _Description().of(function)


class _Description:
    """The text for one callable. An object that comes up again is written as a number."""

    def __init__(self) -> None:
        self._seen: list[Any] = []

    def of(self, value: Any) -> str:
        if type(value) in _PLAIN:
            return repr(value)
        if isinstance(value, tuple):
            items = f"({', '.join(map(self.of, value))})"
            return items if type(value) is tuple else f"{self.of(type(value))} {items}"
        if isinstance(value, (np.dtype, np.generic)):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, (type, types.ModuleType)):
            return f"{type(value).__name__} {_importable_name(value)}"
        for number, other in enumerate(self._seen):
            if other is value:
                return f"^{number}"
        self._seen.append(value)
        return self._of_object(value)

    def _of_object(self, value: Any) -> str:
        if type(value) is list:
            return f"[{', '.join(map(self.of, value))}]"
        if type(value) in (set, frozenset):
            return f"{type(value).__name__} {sorted(map(self.of, value))}"
        if type(value) is dict:
            return f"dict {sorted((self.of(key), self.of(held)) for key, held in value.items())}"
        if isinstance(value, functools.partial):
            return f"partial({self.of(value.func)}, {self.of(value.args)}, {self._items(value.keywords)})"
        if isinstance(value, types.MethodType):
            return f"{self.of(value.__self__)}.{self.of(value.__func__)}"
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, core.Primitive):
            rules = [getattr(rule, "rule", rule) for rule in rules_of(value)]
            return f"primitive {value.name} {type(value).__qualname__} {self.of(tuple(rules))}"
        if isinstance(value, enum.Enum):
            return f"{self.of(type(value))}.{value.name}"
        owner = getattr(value, "__self__", None)
        if isinstance(value, types.BuiltinMethodType) and not isinstance(owner, (types.ModuleType, type(None))):
            return f"{self.of(owner)}.{value.__name__}"
        if isinstance(value, NATIVE) or hasattr(value, "__qualname__"):
            return f"native {_importable_name(value)}"
        attributes = attributes_of(value)
        if not attributes and not (type(value).__module__.startswith("jax.") and hasattr(value, "__dict__")):
            raise CannotSkipError(f"rule that holds an object: {type_name(type(value))}")
        return f"{self.of(type(value))} {self._items(attributes)}"

    def _of_function(self, value: types.FunctionType) -> str:
        cells = []
        for cell in value.__closure__ or ():
            try:
                cells.append(self.of(cell.cell_contents))
            except ValueError:
                cells.append("an empty cell")
        bound = f"{self.of(value.__defaults__)} {self._items(value.__kwdefaults__ or {})} ({', '.join(cells)})"
        return f"{value.__globals__.get('__name__')}.{value.__qualname__}:{_code_fingerprint(value.__code__)}<{bound}>"

    def _items(self, items: Mapping[str, Any]) -> str:
        return f"{{{', '.join(f'{key}={self.of(items[key])}' for key in sorted(items))}}}"


def _code_fingerprint(code: types.CodeType) -> str:
    """Return the line and a hash of the bytecode: they tell functions of one name apart."""
    known = _fingerprints.get(id(code))
    if known is None:
        constants = [value for value in code.co_consts if type(value) in _PLAIN]
        behaviour = repr((code.co_code, code.co_names, code.co_varnames, constants)).encode()
        fingerprint = f"{code.co_firstlineno}:{hashlib.blake2b(behaviour, digest_size=8).hexdigest()}"
        known = _fingerprints[id(code)] = code, fingerprint
    return known[1]


def _importable_name(value: Any) -> str:
    """Return the name under which an object is found in its module; raise CannotSkipError if it is not."""
    is_module = isinstance(value, types.ModuleType)
    module: str = value.__name__ if is_module else getattr(value, "__module__", None) or "builtins"
    qualified: str = "" if is_module else getattr(value, "__qualname__", type(value).__qualname__)
    found: Any = sys.modules.get(module)
    for part in qualified.split(".") if qualified else ():
        found = getattr(found, part, None)
    if found is not value:
        raise CannotSkipError(f"rule that holds an object: {module}.{qualified}")
    return f"{module}.{qualified}"
