"""Notice what is changed in jax before it is described, and perhaps put back: jax's caches may hold what it traced."""

from __future__ import annotations

import sys
import types

from xcache.hook.structure.encoding import type_name
from xcache.hook.structure.libraries import is_of_jax
from xcache.hook.structure.marks import Versions

# jax computes with the functions of these modules while it traces, and they keep no state.
_MATHEMATICAL = frozenset(("math", "numpy", "operator"))


class Beginning:
    """The states of jax's modules, and later of the classes in them, when these were first seen."""

    def __init__(self) -> None:
        self._modules: set[types.ModuleType] = set()
        # Finding the classes takes ten times as long as the modules, so only who describes programs pays for them.
        self._has_classes = False
        self._seen: list[Versions] = []
        self.see_new()

    def see_new(self) -> None:
        """Note the states of modules that were imported since; xcache's own functions must be in them already."""
        loaded = sys.modules.copy().items()
        wanted = (each for name, each in loaded if is_of_jax(name) or name in _MATHEMATICAL)
        new = {each for each in wanted if issubclass(type(each), types.ModuleType)} - self._modules
        self._modules |= new
        self._see(new)

    def see_all(self) -> None:
        """Note the states of all known modules as they are now, and from now on also those of their classes."""
        self._has_classes, self._seen = True, []
        self._see(self._modules)

    def _see(self, modules: set[types.ModuleType]) -> None:
        self._seen.append(Versions([*modules]))
        if self._has_classes:
            values = {id(value): value for module in modules for value in [*vars(module).values()]}.values()
            kinds = [value for value in values if isinstance(value, type) and is_of_jax(value.__module__)]
            self._seen.append(Versions(kinds))

    def change(self) -> str:
        """Return the name of a module or class in which something was replaced since, if only for a time, or nothing.

        The import of a module adds it to its package, jax adds attributes to classes when it imports more, and a module
        whose functions assign its globals changes at any time.
        """
        from xcache.hook.structure.reach import assigned_in

        for holder, new in (each for versions in self._seen for each in versions.changed()):
            if isinstance(holder, type):
                if not new:
                    return type_name(holder)
            elif not assigned_in(holder) and not (new and all(isinstance(each, types.ModuleType) for each in new)):
                return str(holder.__name__)
        return ""
