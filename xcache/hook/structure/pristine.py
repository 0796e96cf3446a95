"""Keep the description of jax's code as it is in this process, and notice when that has changed.

It is made of the content of all that a program's lowering can reach, so that two processes have one digest only if
lowering does the same in both. Where that is code that is not jax's, programs are lowered.
"""

from __future__ import annotations

import collections
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax._src import util

from xcache.hook.structure import reach
from xcache.hook.structure.encoding import CannotSkipError, are_same
from xcache.hook.structure.libraries import is_of_a_library, is_of_jax, namespace, original_of
from xcache.hook.structure.marks import Marks
from xcache.hook.structure.reach import Reach

_LOWERING = "jax._src.interpreters.mlir"
# They hand modules on, and have the classes of objects that C++ makes.
_WHOLE = ("jax._src.interpreters.pxla", "jaxlib.mlir._mlir_libs._mlir.ir")
# So many are looked at one by one.
_MOST_MARKS = 8


class Pristine:
    """The descriptions of jax's code in this process."""

    def __init__(self) -> None:
        # Held while code is described: a thread that waits finds the work done.
        self._lock = threading.RLock()
        # The generation of jax's caches in which its code was changed: they may hold what other code has traced.
        self._changed_in: object = None
        self._forget()

    def _forget(self) -> None:
        reach.forget_state()
        # Another object after each change.
        self.state = object()
        # The state of all that descriptions depend on.
        self._marks = [Marks({"sys.modules": sys.modules}, {})]
        self._classes: dict[type, dict[str, Any]] = {}
        # By id: tables with the entries that were met; objects with their dictionaries (or themselves), their classes
        # and the attributes that count.
        self._tables: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}
        self._objects: dict[int, tuple[Any, Any, type, Callable[[Any], dict[str, Any]], dict[str, Any]]] = {}
        self._keys: set[Any] = set()
        self._read: dict[str, dict[str, Any]] = {}
        self._known: dict[str, set[str]] = {}
        self._names: set[str] = set()
        # The modules that its code may import, with names to read there, and those of them that were looked at.
        self._imports: dict[str, set[str]] = {}
        self._imported: set[str] = set()
        # All that lowering reads in any program, or why that cannot be described.
        self._base: Reach | str | None = None
        self._base_digest = b""
        # By the ids of what is described, which are kept: the digest, or the reason why there is none.
        self._described: dict[tuple[int, ...], tuple[Any, bytes | str]] = {}
        # The tokens of primitives that were made of these, or the reasons why there are none: as texts, because an
        # exception would hold the frames in which it was raised, with all that the program has there.
        self.tokens: dict[tuple[Any, bool], bytes | str] = {}
        # By module: why its code is not jax's own, or None.
        self._modules: dict[str, str | None] = {}

    def begin_in_child(self) -> None:
        """Forget all in a forked child if another thread of the parent was changing it."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self.__init__()  # type: ignore[misc] # it is as new

    def refresh(self) -> None:
        """Forget what has changed since the last call."""
        if any(marks.have_changed() for marks in self._marks):
            with self._lock:
                changed = set().union(*(marks.take_changes() for marks in self._marks))
                if not all(map(self._is_as_read, changed)):
                    self._changed_in = _generation()
                    self._forget()

    def digest(self, modules: Sequence[str] = ()) -> bytes:
        """Return the digest of the code that lowers any program, and of all that these modules have.

        ``refresh`` must have been called. Raise CannotSkipError if that is not jax's own.
        """
        self._reach_of_lowering()
        if self._changed_in is not None and self._changed_in is _generation():
            raise CannotSkipError("code of jax changed while it was in use")
        return self._base_digest + (self.describe(*(sys.modules[name] for name in modules)) if modules else b"")

    def describe(self, *values: Any) -> bytes:
        """Return the digest of objects in a program, or of modules with all they have, and of what they lead to."""
        key = tuple(map(id, values))
        known = self._described.get(key)
        if known is None:
            with self._lock:
                known = self._described.get(key)
                if known is None:
                    known = self._described[key] = values, self._made(values)
        if isinstance(known[1], str):
            raise CannotSkipError(known[1])
        return known[1]

    def replaced_in(self, module: str) -> str | None:
        """Return why the code of one module is not jax's own, or None."""
        self.refresh()
        return self._look_at(module)

    def check_all(self) -> None:
        """Raise CannotSkipError if any module of jax's that is imported holds code that is not jax's."""
        _raise_first(map(self._look_at, filter(is_of_jax, sys.modules.copy())))

    def _reach_of_lowering(self) -> Reach:
        if self._base is None:
            with self._lock:
                if self._base is None:
                    self._base = self._made_of_lowering()
        if isinstance(self._base, str):
            raise CannotSkipError(self._base)
        return self._base

    def _made_of_lowering(self) -> Reach | str:
        made = Reach(is_complete=False)
        try:
            made.write(original_of(vars(sys.modules[_LOWERING])["lower_jaxpr_to_module"]))
            for module in _WHOLE:
                made.write_module_content(sys.modules[module])
            made.follow()
            self._check_imports(made.imports, made)
            self._base_digest = made.digest()
        except CannotSkipError as reason:
            return str(reason)
        finally:
            self._watch(made)
        return made

    def _made(self, values: tuple[Any, ...]) -> bytes | str:
        made = Reach(is_complete=True)
        try:
            for value in values:
                if type(value) is types.ModuleType:
                    made.write_module_content(value)
                else:
                    made.write(value)
            base = self._reach_of_lowering()
            made.follow(base)
            self._check_imports(made.imports, base)
            return made.digest()
        except CannotSkipError as reason:
            return str(reason)
        finally:
            self._watch(made)

    def _check_imports(self, imports: dict[str, set[str]], base: Reach) -> None:
        """Raise CannotSkipError unless these modules are jax's own as far as they are imported.

        Code imports them while it runs. Whether they are imported yet must not count.
        """
        made = Reach(is_complete=False)
        try:
            made.follow_imports(imports, base)
        finally:
            self._watch(made)
            for name, names in made.imports.items():
                self._imports.setdefault(name, set()).update(names)
            self._imported |= self._imports.keys() & sys.modules.keys()

    def _look_at(self, name: str) -> str | None:
        module = sys.modules.get(name)
        if name not in self._modules and isinstance(module, types.ModuleType):
            with self._lock:
                made = Reach(is_complete=False)
                try:
                    made.write_module_content(module)
                    self._modules[name] = None
                except CannotSkipError as reason:
                    self._modules[name] = str(reason)
                self._watch(made)
        return self._modules.get(name)

    def _is_as_read(self, module: str | type | int) -> bool:
        """Return whether a module or class has all that was read of it, though it has changed."""
        if isinstance(module, int):
            if module in self._tables:
                table, entries = self._tables[module]
                return self._entries_of(table) == entries
            if module in self._objects:
                value, names, kind, read, attributes = self._objects[module]
                if names is not value and object.__getattribute__(value, "__dict__") is not names:
                    return False
                return type(value) is kind and _is_same(attributes, read(value))
            return False
        if isinstance(module, type):
            return _is_same(self._classes[module], reach.content_of(module))
        if module == "sys.modules":
            new = (self._imports.keys() & sys.modules.keys()) - self._imported
            try:
                if new:
                    self._check_imports({name: self._imports[name] for name in new}, self._reach_of_lowering())
            except CannotSkipError:
                return False
            return True
        held = sys.modules[module]
        names = vars(held)
        is_same = all(names.get(name, self) is value for name, value in self._read[module].items())
        return is_same and all(reach.is_late(held, name) for name in self._names & (names.keys() - self._known[module]))

    def _watch(self, made: Reach) -> None:
        """Notice changes of what a description depends on."""
        self._names |= made.names
        held: dict[str | type | int, dict[Any, Any]] = {id(each): each for each in made.dictionaries}
        self._keys.update(made.keys)
        self._tables.update((id(table), (table, {})) for _, table in made.tables)
        for number, (table, _) in self._tables.items():
            self._tables[number] = table, self._entries_of(table)
        held.update((id(table), table) for _, table in made.tables)
        slotted: dict[type, list[Any]] = collections.defaultdict(list)
        owners = []
        for value, read in made.objects:
            try:
                names = object.__getattribute__(value, "__dict__")
                owners.append(value)
            except AttributeError:
                names = value
                slotted[type(value)].append(value)
            self._objects[id(names)] = self._objects[id(value)] = value, names, type(value), read, read(value)
        held.update((kind, namespace(kind)) for kind in made.classes if kind not in self._classes)
        self._classes.update(made.classes)
        for module, names in made.read.items():
            if module not in self._read:
                held[module] = vars(sys.modules[module])
                self._known[module] = {*held[module]}
            self._read.setdefault(module, {}).update(names)
        modules = [sys.modules[name] for name in made.read]
        objects: dict[type, Sequence[Any]] = {
            types.FunctionType: made.functions,
            type: [*made.classes],
            types.CellType: made.cells,
            functools.partial: made.partials,
            object: [*modules, *(value for value, _ in made.objects)],
            **slotted,
        }
        if held or owners or any(objects.values()):
            self._marks.append(Marks(held, objects, owners))
            if len(self._marks) > _MOST_MARKS and not any(marks.have_changed() for marks in self._marks):
                self._marks[2:] = [Marks.joined(self._marks[2:])]

    def _entries_of(self, table: dict[Any, Any]) -> dict[Any, Any]:
        """Return the ids of the entries of a table that count: those for keys that were met, and for libraries'."""
        return {
            key: id(entry)
            for key, entry in table.copy().items()
            if key in self._keys or (isinstance(key, type) and is_of_a_library(key.__module__))
        }


def _is_same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return before.keys() == now.keys() and are_same([*before.values()], [*now.values()])


@util.cache(max_size=1, trace_context_in_key=False)  # type: ignore[untyped-decorator]
def _generation() -> object:
    """Return an object that is another one since ``jax.clear_caches``."""
    return object()


def _raise_first(reasons: Iterable[str | None]) -> None:
    reason = next((each for each in reasons if each), None)
    if reason is not None:
        raise CannotSkipError(reason)


pristine = Pristine()
os.register_at_fork(after_in_child=pristine.begin_in_child)
