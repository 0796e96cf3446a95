"""The state of jax's modules: a skipped lowering changes none of it, so no lowering may depend on such a change."""

from __future__ import annotations

import collections
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

from jax._src import core

_CONTAINERS = (dict, list, set, collections.deque, weakref.WeakSet, weakref.WeakKeyDictionary)
_VALUES = (int, str, bool, float, type(None), frozenset)

# Each name, and what tells whether its value is another one: a container's identity and length, a plain value itself.
State = dict[str, object]


def state() -> State:
    """Return what the modules of jax and jaxlib hold, and the attributes of jax's objects in them."""
    found: State = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith(("jax._src.", "jaxlib.")) or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            found.update(_told(f"{name}.{key}", value))
            if _is_an_object_of_jax(value):
                for attribute, held in list(vars(value).items()):
                    found.update(_told(f"{name}.{key}.{attribute}", held))
    return found


def changes(before: State, after: State) -> list[str]:
    """Return the names whose value changed or disappeared."""
    return sorted(name for name, value in before.items() if after.get(name) != value)


def primitives(jaxpr: Any) -> Iterator[str]:
    """Return the names of all primitives of a program."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation.primitive.name
        for inner in core.jaxprs_in_params(equation.params):
            yield from primitives(inner)


def _told(name: str, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, _CONTAINERS):
        yield name, (id(value), len(value))
    elif isinstance(value, _VALUES) and value == value:
        yield name, value


def _is_an_object_of_jax(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.startswith("jax") and not isinstance(value, type) and hasattr(value, "__dict__")
