"""The names, attributes, imports and sets that a function's code uses."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import types
from collections.abc import Iterable
from typing import Any, NamedTuple


class Import(NamedTuple):
    """An import in a function's body: the number of dots, the module's name, and the names imported from it."""

    level: int
    name: str
    parts: tuple[str, ...]


@functools.cache
def iterated_sets(value: types.CodeType) -> frozenset[Any]:
    """Return the sets among code's constants of which it does more than test whether something is in them."""
    steps = _steps(value)
    return frozenset(
        step.argval
        for step, following in itertools.pairwise(steps)
        if type(step.argval) is frozenset and following.opname != "CONTAINS_OP"
    )


@functools.cache
def names_in(value: types.CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[Import]]:
    """Return the names of globals and of attributes that code uses, and its imports, inner functions included."""
    used, named, imported = set[str](), set[str](), set[Import]()
    before: Any = None
    constant: Any = None
    for step in _steps(value):
        if isinstance(step.argval, types.CodeType):
            inner = names_in(step.argval)
            used, named, imported = used | inner[0], named | inner[1], imported | inner[2]
        elif step.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
            used.add(step.argval)
        elif "ATTR" in step.opname or "METHOD" in step.opname or step.opname == "IMPORT_FROM":
            named.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            imported.add(Import(before, step.argval, constant or ()))
        elif step.opname == "MATCH_CLASS" and isinstance(constant, tuple):
            # The names of the pattern's attributes were loaded just before.
            named |= {*constant}
        before, constant = constant, step.argval
    if "vars" in used:
        named.add("__dict__")
    return frozenset(used), frozenset(named), frozenset(imported)


def modules_of(imported: Iterable[Import], package: str | None) -> dict[str, types.ModuleType]:
    """Return the modules that imports in the body of a function of this package lead to, by name."""
    found = set[str]()
    for level, name, parts in imported:
        if level:
            above = (package or "").rsplit(".", level - 1)[0]
            name = f"{above}.{name}" if name else above
        # With ``import a.b`` the function has ``a``.
        found.update(itertools.accumulate(name.split("."), "{}.{}".format))
        found.update(f"{name}.{part}" for part in parts)
    return {name: sys.modules[name] for name in found if isinstance(sys.modules.get(name), types.ModuleType)}


def _steps(value: types.CodeType) -> list[dis.Instruction]:
    return [step for step in dis.get_instructions(value) if step.opname != "EXTENDED_ARG"]
