"""Find the values to which the names and imports in a function's code lead now."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

from xcache.hook.calls.program_code import Import
from xcache.hook.structure.encoding import CannotSkipError, dictionary_of
from xcache.hook.structure.libraries import JAX, namespace, origin

# In the place of a value that a name does not have.
MISSING: Any = object()


def value_of(read: tuple[Any, ...], function: Any) -> tuple[Any, list[str]]:
    """Return the value to which a read in a function's code leads, and the attributes that lead on from it."""
    names = function.__globals__
    name, *following = read
    if isinstance(name, Import):
        found = _imported(name, names, following)
    else:
        found = names.get(name, function.__builtins__.get(name, MISSING))
    while following and (inner := _attribute(found, following[0])) is not MISSING:
        found = inner
        del following[0]
    return found, following


def _imported(wanted: Import, names: dict[str, Any], parts: list[str]) -> Any:
    """Return the module that an import in a function's body leads to, or the module that is a part of it."""
    name = importlib.util.resolve_name("." * wanted.level + wanted.name, names.get("__package__"))
    found = sys.modules.get(name)
    if parts and found is not None and parts[0] not in namespace(found):
        found = sys.modules.get(f"{name}.{parts.pop(0)}")
    if found is None and origin(name) != JAX:
        raise CannotSkipError(f"module imported by the function: {name}")
    # Objects that come with jax's files are known by their names.
    return name if found is None else found


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute of a module or object if it is nothing but an entry of its dictionary, or MISSING."""
    kind = type(value)
    is_module = issubclass(kind, types.ModuleType)
    plain: Any = types.ModuleType.__getattribute__ if is_module else object.__getattribute__
    if kind.__getattribute__ is not plain or any(name in vars(base) for base in kind.__mro__):
        return MISSING
    held = dictionary_of(value) or {}
    if is_module and name not in held and "__getattr__" in held and origin(held.get("__name__")) != JAX:
        raise CannotSkipError(f"attribute that a module computes: {held.get('__name__')}.{name}")
    return held.get(name, MISSING)
