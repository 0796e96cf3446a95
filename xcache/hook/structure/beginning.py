"""Notice what is changed in jax before it is described, and perhaps put back: jax's caches may hold what it traced."""

from __future__ import annotations

import sys
import types

from xcache.hook.structure.encoding import type_name
from xcache.hook.structure.libraries import is_of_jax
from xcache.hook.structure.marks import Versions


class Beginning:
    """The states of jax's modules, and later of the classes in them, when these were first seen."""

    def __init__(self) -> None:
        self._modules: set[types.ModuleType] = set()
        # Finding the classes takes ten times as long as the modules, so only who describes programs pays for them.
        self._has_classes = False
        self._seen: list[Versions] = []
        self.see_new()

    def see_new(self) -> None:
        """Note the states of modules that were imported since."""
        loaded = sys.modules.copy().items()
        new = {each for name, each in loaded if is_of_jax(name) and issubclass(type(each), types.ModuleType)}
        new -= self._modules
        self._modules |= new
        self._seen.append(Versions([*new]))
        if self._has_classes:
            values = {id(value): value for module in new for value in [*vars(module).values()]}.values()
            kinds = [value for value in values if isinstance(value, type) and is_of_jax(value.__module__)]
            self._seen.append(Versions(kinds))

    def see_all(self) -> None:
        """Note all states as they are now, from now on also those of classes."""
        self._has_classes, self._modules, self._seen = True, set(), []
        self.see_new()

    def change(self) -> str:
        """Return the name of a module or class in which something was replaced since, or nothing.

        The import of a module adds a name to its package, and a module whose functions assign its globals changes at
        any time.
        """
        from xcache.hook.structure.reach import assigned_in

        for holder in (holder for versions in self._seen for holder in versions.replaced()):
            if isinstance(holder, type):
                return type_name(holder)
            if not assigned_in(holder):
                return str(holder.__name__)
        return ""
