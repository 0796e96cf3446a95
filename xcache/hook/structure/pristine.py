"""Describe jax's modules as they are in this process, and notice when one has changed.

A digest of the modules that a program's lowering rules can reach is part of the program's own. It is made of the
content of their functions, classes and constants, so that two processes have one digest only if lowering does the same
in both. Where a module holds code that is not jax's, programs that can reach it are lowered.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import types
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jax._src import core

from xcache.hook.structure.description import Description, assigned_globals, functions_of
from xcache.hook.structure.encoding import CannotSkipError, type_name
from xcache.hook.structure.libraries import is_known_module, is_of_a_library, is_of_jax
from xcache.hook.structure.marks import Marks

# Set by Python's importer, or by pytest's in those of jax's modules that are named test_...
_IMPORT_NAMES = frozenset((
    "__builtins__", "__loader__", "__spec__", "__doc__", "__file__", "__cached__", "__path__", "__package__",
    "__annotations__", "@py_builtins", "@pytest_ar",
))  # fmt: skip
# The names of jax's modules that are imported, each with those of the modules in it.
_loaded: dict[str, set[str]] = {}
_LOWERING = "jax._src.interpreters.mlir"


class _Module(NamedTuple):
    """One module of jax as it was found."""

    module: types.ModuleType
    digest: bytes
    uses: frozenset[str]
    # Why it cannot be described.
    reason: str | None
    # Dictionaries by primitive or class, from which jax chooses functions.
    tables: list[tuple[str, dict[Any, Any]]]
    primitives: list[Any]
    # Classes under another name than their own, which are variables of loops, too, and all names that its code has.
    aliases: dict[str, bytes]
    names: frozenset[str]


class Pristine:
    """What is known of jax's modules in this process."""

    def __init__(self) -> None:
        # Held while modules are described: a thread that waits finds the work done.
        self._lock = threading.RLock()
        self._modules: dict[str, _Module] = {}
        # Each with the ids of what it marks.
        self._marks: list[tuple[Marks, list[int]]] = []
        # By id: the names of the modules to describe again after a change; none for the list of all modules.
        self._owners: dict[int, str] = {}
        self._unmarked: list[tuple[str, Description]] = []
        # Whether all that has been noticed is taken into account.
        self._is_settled = False
        # How often something had changed.
        self.changes = 0
        # Why one of all modules is not jax's own, as it was after so many changes.
        self._checked = -1
        self._reason: str | None = None
        # By the modules whose code a program names: the digest, or the reason why there is none.
        self._digests: dict[frozenset[str], bytes | str] = {}
        # By the modules that are reached from those: the digest of their tables.
        self._tables: dict[frozenset[str], bytes] = {}
        # By id: the entries of tables, which are kept, each with its digest.
        self._entries: dict[int, tuple[Any, bytes]] = {}

    def begin_in_child(self) -> None:
        """Forget all in a forked child if another thread of the parent was changing it."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self.__init__()  # type: ignore[misc] # it is as new

    def refresh(self) -> None:
        """Describe again what has changed since the last call."""
        # In this order: another thread may just have taken the changes, and not be done with them.
        if any(marks.have_changed() for marks, _ in self._marks) or not self._is_settled:
            with self._lock:
                self._is_settled = False
                self._describe_changed()
                self._is_settled = True

    def digest(self, homes: Iterable[str]) -> bytes:
        """Return the digest of the modules that code of these can reach; raise CannotSkipError if one is not jax's own.

        ``refresh`` must have been called.
        """
        key = frozenset(homes)
        known = self._digests.get(key)
        if known is None:
            with self._lock:
                known = self._digests[key] = self._made(key)
        if isinstance(known, str):
            raise CannotSkipError(known)
        return known

    def replaced_in(self, module: str) -> str | None:
        """Return why the code of one module is not jax's own, or None."""
        self.refresh()
        with self._lock:
            record = self._described(module)
            self._mark_described()
        return None if record is None else record.reason

    def watch(self, description: Description) -> None:
        """Count a change whenever something changes that this description of a lowering rule depends on."""
        with self._lock:
            self._unmarked.append((_LOWERING, description))
            self._mark_described()

    def check_all(self) -> None:
        """Raise CannotSkipError if any module of jax's that is imported holds code that is not jax's."""
        if self._checked != self.changes:
            with self._lock:
                records = [self._described(name) for name in sorted(self._modules)]
                self._mark_described()
                self._reason = next((record.reason for record in records if record is not None and record.reason), None)
                self._checked = self.changes
        if self._reason is not None:
            raise CannotSkipError(self._reason)

    def _describe_changed(self) -> None:
        stale: set[str] = set()
        must_look = not self._marks
        if must_look:
            self._owners[id(sys.modules)] = ""
            self._marks = [(Marks([sys.modules], []), [id(sys.modules)])]
        for marks, ids in self._marks:
            for at in marks.take_changes():
                owners = self._owners[ids[at]]
                must_look |= not owners
                stale.update(owners.split())
        before = self._modules
        if must_look:
            self._look_for_modules()
        stale &= self._modules.keys()
        if not stale and self._modules.keys() == before.keys():
            return
        if any(self._modules[name].tables for name in stale):
            self._tables, self._entries = {}, {}
        for name in stale:
            self._modules[name] = _not_described(self._modules[name].module)
        self._digests = {}
        self.changes += 1

    def _look_for_modules(self) -> None:
        """Note which modules of jax are imported now."""
        modules = {
            name: module
            for name, module in sys.modules.copy().items()
            if is_of_jax(name) and isinstance(module, types.ModuleType)
        }
        known = {name: record for name, record in self._modules.items() if modules.get(name) is record.module}
        self._modules = {name: known.get(name) or _not_described(module) for name, module in modules.items()}
        _loaded.clear()
        _loaded.update((name, set()) for name in modules)
        for name in modules:
            package, _, part = name.rpartition(".")
            if package in _loaded:
                _loaded[package].add(part)

    def _described(self, name: str) -> _Module | None:
        """Return what is known of a module, or None if jax has none of this name."""
        record = self._modules.get(name)
        if record is not None and not record.digest:
            record, description = _describe(name, record.module)
            self._modules[name] = record
            self._unmarked.append((name, description))
        return record

    def _mark_described(self) -> None:
        """Watch what the descriptions depend on that were made since this was last called."""
        dictionaries: list[Any] = []
        functions: list[Any] = []
        for name, description in self._unmarked:
            for found, objects in (dictionaries, description.dictionaries), (functions, description.functions):
                for each in objects:
                    owners = self._owners.get(id(each))
                    if owners is None:
                        found.append(each)
                        self._owners[id(each)] = name
                    elif name not in owners.split():
                        self._owners[id(each)] = f"{owners} {name}"
        self._unmarked = []
        if dictionaries or functions:
            self._marks.append((Marks(dictionaries, functions), [*map(id, dictionaries), *map(id, functions)]))

    def _made(self, homes: frozenset[str]) -> bytes | str:
        """Return the digest of the modules that code of these can reach, or why there is none."""
        reached: dict[str, _Module] = {}
        todo = [_LOWERING, *homes]
        while todo:
            name = todo.pop()
            record = None if name in reached else self._described(name)
            if record is not None:
                reached[name] = record
                todo.extend(record.uses)
        records = [reached[name] for name in sorted(reached)]
        # Whether these are imported yet must not count.
        imported = set[str]().union(*(_imported(record.names) for record in records)) - reached.keys()
        others = [record for record in map(self._described, sorted(imported)) if record is not None]
        self._mark_described()
        if reason := next((record.reason for record in (*records, *others) if record.reason), None):
            return reason
        key = frozenset(reached)
        try:
            if key not in self._tables:
                self._tables[key] = self._tables_digest(records, key)
        except CannotSkipError as reason:
            return str(reason)
        digests = b"".join(record.digest for record in records)
        return hashlib.blake2b(digests + self._tables[key], digest_size=16).digest()

    def _tables_digest(self, records: list[_Module], names: frozenset[str]) -> bytes:
        """Return a digest of what these modules' tables have for their primitives and classes."""
        primitives = {id(primitive): primitive for record in records for primitive in record.primitives}
        entries = [
            (f"{name} {label}", entry)
            for record in records
            for name, table in record.tables
            for label, entry in _entries(table, names, primitives.keys())
        ]
        entries += (
            (f"{primitive.name} {name}", function)
            for primitive in primitives.values()
            for name, function in functions_of(primitive).items()
        )
        # A class under a name in lower case that no code of the module reads may be the variable of a loop over a set.
        told = [
            b"%b %b" % (key.encode(), alias)
            for record in records
            for key, alias in record.aliases.items()
            if key in record.names or not key.islower()
        ]
        told += (label.encode() + self._entry(label, entry) for label, entry in entries)
        self._mark_described()
        return hashlib.blake2b(b"\n".join(sorted(told)), digest_size=16).digest()

    def _entry(self, label: str, entry: Any) -> bytes:
        """Return what tells an entry of a table from others."""
        known = self._entries.get(id(entry))
        if known is None:
            # A lowering rule is part of each program that uses it, so all that it holds counts.
            description = Description(is_complete=label.startswith(_LOWERING))
            try:
                description.write(entry)
            except CannotSkipError as reason:
                raise CannotSkipError(f"rule of jax replaced: {label.rpartition(' ')[2]}: {reason}") from None
            self._unmarked.append((_LOWERING, description))
            known = self._entries[id(entry)] = entry, description.digest()
        return known[1]


def _not_described(module: types.ModuleType) -> _Module:
    return _Module(module, b"", frozenset(), None, [], [], {}, frozenset())


def _describe(name: str, module: types.ModuleType) -> tuple[_Module, Description]:
    names = vars(module)
    description = Description(is_complete=False, home=module)
    description.dictionaries.append(names)
    reason, tables, primitives, aliases, imported = None, [], [], {}, set()
    found = names.copy()
    own = (each.__code__ for each in found.values() if type(each) is types.FunctionType and each.__globals__ is names)
    state = set[str]().union(*map(assigned_globals, own))
    for key, value in found.items():
        kind = type(value)
        if kind is not types.FunctionType:
            if (
                key in _IMPORT_NAMES
                or (key in state and not callable(value))
                or (kind is types.ModuleType and value.__name__ == f"{name}.{key}")
            ):
                continue
            if kind is types.ModuleType and "__getattr__" in names and is_known_module(value):
                # Such a module may import others when they are asked for.
                imported.add(value.__name__)
                continue
            if isinstance(value, type):
                if key != value.__name__:
                    # This may be the variable of a loop over a set.
                    try:
                        aliases[key] = description.apart(value)
                    except CannotSkipError as refused:
                        reason = reason or f"function of jax replaced: {name}.{key}: {refused}"
                    continue
            elif isinstance(value, core.Primitive):
                primitives.append(value)
                description.dictionaries.append(vars(value))
            elif isinstance(value, dict):
                for number, table in enumerate((value, *value.values())):
                    if isinstance(table, dict) and any(isinstance(each, (type, core.Primitive)) for each in table):
                        tables.append((f"{name}.{key} {number}", table))
                        description.dictionaries.append(table)
        description.parts.append(key)
        try:
            if kind is np.ndarray:
                description.write_array(value)
            else:
                description.write(value)
        except CannotSkipError as refused:
            reason = reason or f"function of jax replaced: {name}.{key}: {refused}"
    digest = description.digest()
    code_names = description.names()
    return _Module(
        module, digest, frozenset(description.uses), reason, tables, primitives, aliases, code_names | imported
    ), description


def _imported(names: frozenset[str]) -> set[str]:
    """Return the modules that code with these names may import, with submodules that it may take from a package."""
    found = _loaded.keys() & names
    return found.union(*({f"{name}.{part}" for part in _loaded[name] & names} for name in found))


def _entries(table: dict[Any, Any], modules: Container[str], primitives: Container[int]) -> Iterator[tuple[str, Any]]:
    """Yield the functions for these modules' primitives and classes, and for the classes of libraries.

    Only a program that has a primitive or class of its own meets an entry for it.
    """
    for key, entry in table.copy().items():
        if isinstance(key, core.Primitive):
            if id(key) in primitives:
                yield key.name, entry
        elif isinstance(key, type) and (key.__module__ in modules or is_of_a_library(key.__module__)):
            yield type_name(key), entry


pristine = Pristine()
os.register_at_fork(after_in_child=pristine.begin_in_child)
