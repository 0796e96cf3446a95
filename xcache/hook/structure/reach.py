"""Follow jax's code: all that it reads by name, in this process, and what that reads in turn.

A function reads the globals that its code names, and of modules the attributes that it names: all names in all code are
looked up in all modules of jax's that this leads to. A class counts with all its methods: one that is called on any
object is found with the object's class, which is a part of the program or is named by the code that makes the object.
jax chooses functions from tables by a primitive or a class; the entries of those count that were met.
"""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import itertools
import operator
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jax._src import core
from jax._src.array import ArrayImpl

from xcache.hook.structure.description import CODE, HEAP_TYPE, Description, lowering_tables
from xcache.hook.structure.encoding import CannotSkipError, type_name
from xcache.hook.structure.libraries import (
    is_from_its_file,
    is_known_module,
    is_of_a_library,
    is_of_jax,
    namespace,
    package_of,
)
from xcache.hook.structure.marks import Versions

# Set by Python's importer, or by pytest's in those of jax's modules that are named test_...
_IMPORT_NAMES = frozenset((
    "__builtins__", "__loader__", "__spec__", "__doc__", "__file__", "__cached__", "__path__", "__package__",
    "__annotations__", "@py_builtins", "@pytest_ar",
))  # fmt: skip
# Modules that reach outside of the process, functions that talk to people, and names that shells add to the builtins:
# tools like to replace these, and no result of jax's depends on them.
_OUTSIDE = frozenset((
    "gc", "glob", "gzip", "io", "logging", "os", "pathlib", "platform", "posixpath", "socketserver", "sys", "threading",
    "time", "traceback", "warnings",
))  # fmt: skip
_TALKING = frozenset((
    "print", "input", "open", "copyright", "credits", "display", "exit", "get_ipython", "help", "license", "quit", "_",
))  # fmt: skip
_NO_CONTENT = frozenset((
    types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType, dict, list
))  # fmt: skip
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_TRACED = ("abstract_eval", "bind", "bind_with_trace")
_names_of, _constants_of = operator.attrgetter("co_names"), operator.attrgetter("co_consts")
_Modules = dict[str, types.ModuleType]
_Names = set[str]
_Importable = Mapping[str, list[types.ModuleType]]


class Reach(Description):
    """A description with all that its code reads, but what another one has that counts, too."""

    # The other one; nothing, where there is none.
    _beyond: Reach

    def __init__(self, *, is_complete: bool) -> None:
        super().__init__(is_complete=is_complete)
        # The description holds as long as these do not change, too: globals of modules by their names, and what classes
        # have, by their ids: jax's scalar types say that they are numpy's.
        self.read: dict[str, dict[str, Any]] = {}
        self.classes: dict[int, tuple[type, dict[str, Any]]] = {}
        # The modules of jax's that code names, and those of Python's and of libraries.
        self.modules: _Modules = {}
        self.libraries: _Modules = {"builtins": builtins}
        # All names of globals, attributes and modules in the code, but those beyond, and those not looked up yet.
        self.names: _Names = set()
        self._new_names: _Names = set()
        self.tables: list[tuple[int, dict[Any, Any]]] = []
        # Primitives and classes, by which tables are asked.
        self.keys: list[Any] = []
        # All names that the modules had, and the versions of the modules then.
        self._names_then: tuple[Versions, _Names] | None = None

    def follow(self, beyond: Reach | None = None, imports: _Importable = types.MappingProxyType({})) -> None:
        """Write all that the code reads that was written, but what another description has, which counts as well.

        It may import modules of ``imports``.
        """
        self.is_complete = False
        if beyond is not None:
            self.leave_out(beyond)
        functions = named = 0
        known, own_names = self._beyond.modules, set[str]()
        self._note_imports(imports)
        while functions < len(self.functions) or named < len(self.named) or self.modules.keys() - known.keys():
            while functions < len(self.functions) or named < len(self.named):
                functions, new = len(self.functions), self.functions[functions:]
                self._note_names(new)
                for value in self.named[named:]:
                    self._write_named(value)
                    named += 1
            # Most new names are in none of the modules.
            present = self._new_names & own_names | self._new_names & self._beyond.names_in_modules()
            found = self._new_in(known, present, self.modules)
            own_names.update(*(vars(module) for name, module in self.modules.items() if name not in known))
            known, self._new_names = known | self.modules, set()
            for module, names in found:
                for name in names:
                    self._write_global(module, name)
            self._note_imports(imports)
        for module, names in self._new_in(self._beyond.libraries, self.names, self.libraries):
            self._read_library(module, names)

    def leave_out(self, beyond: Reach) -> None:
        """Write from now on only what another description does not have."""
        self._beyond, self.known = beyond, beyond._numbers

    def write_modules(self, modules: Iterable[types.ModuleType]) -> None:
        """Write all that modules of jax's have, and follow nothing of it."""
        self.is_complete = False
        homes = set()
        for module in modules:
            homes.add(module.__name__)
            for name in vars(module).copy():
                self._write_global(module, name)
        for kind in [each for each in self.named if isinstance(each, type) and each.__module__ in homes]:
            # Tools add methods to arrays, which take no part in a compile; lowering comes to the class by its name.
            if kind is not ArrayImpl:
                self._write_class_content(kind)

    def _note_names(self, functions: Iterable[types.FunctionType]) -> None:
        """Note the modules of functions, and the names of globals, attributes and modules in their code."""
        codes = []
        for function in functions:
            home = function.__globals__["__name__"]
            if is_of_jax(home):
                self.modules[home] = sys.modules[home]
                codes.append(function.__code__)
        names = set[str]()
        while codes:
            names.update(*map(_names_of, codes))
            constants = [*itertools.chain.from_iterable(map(_constants_of, codes))]
            # It may be a name for getattr, or a module's.
            names.update(each for each in constants if type(each) is str and each.replace(".", "").isidentifier())
            codes = [each for each in constants if type(each) is types.CodeType]
        self._new_names |= names - self.names - self._beyond.names
        self.names |= self._new_names

    def _note_imports(self, imports: _Importable) -> None:
        for name in sorted(imports.keys() & self.names):
            self.modules |= {module.__name__: module for module in imports[name]}

    def _new_in(self, known: _Modules, new: _Names, own: _Modules) -> list[tuple[types.ModuleType, list[str]]]:
        """Return modules with the names in code that they have: new names of known modules, of others all."""
        found = [(module, vars(module).keys() & new) for module in known.values()] if new else []
        for home in [name for name in own if name not in known]:
            held = vars(own[home]).keys()
            found.append((own[home], held & self.names | held & self._beyond.names))
        return [(module, sorted(names)) for module, names in found]

    def names_in_modules(self) -> _Names:
        """Return all names that the modules have now."""
        then = self._names_then
        if then is None or not then[0].are_told or then[0].changed():
            modules = [*self.modules.values()]
            # The versions come first, so that a name which another thread adds meanwhile is found at the next look.
            self._names_then = then = Versions(modules), set().union(*map(vars, modules))
        return then[1]

    def _write_global(self, module: types.ModuleType, name: str) -> None:
        """Write what a name in a module of jax's stands for."""
        value = vars(module)[name]
        kind = type(value)
        if kind is types.FunctionType:
            self._write_read(module, name)
            return
        if kind is types.ModuleType and is_of_jax(value.__name__):
            if is_late(module, name):
                # Code may import it, by another name, too.
                self.names.add(value.__name__)
                return
            self.modules[value.__name__] = value
        if name in _IMPORT_NAMES or (not callable(value) and name in assigned_in(module)):
            return
        if kind is types.ModuleType and is_of_a_library(value.__name__) and is_known_module(value):
            self.libraries[value.__name__] = value
        self._write_read(module, name)

    def _write_read(self, module: types.ModuleType, name: str) -> None:
        value, home = vars(module)[name], module.__name__
        if name in self._beyond.read.get(home, ()):
            return
        self.read.setdefault(home, {})[name] = value
        self.parts += home, name
        try:
            if isinstance(value, type) and not is_of_jax(value.__module__):
                self._look_at_library_class(value)
            if isinstance(value, type) and value.__name__ != name and name.islower() and is_of_jax(home):
                # It may be the variable of a loop over a set; it must be jax's own.
                Reach(is_complete=False).write(value)
            elif type(value) is np.ndarray:
                self.write_array(value)
            else:
                self.write(value)
        except CannotSkipError as reason:
            if is_of_jax(home):
                raise CannotSkipError(f"function of jax replaced: {home}.{name}: {reason}") from None
            raise CannotSkipError(f"function of a library replaced: {home}.{name}: {reason}") from None

    def _read_library(self, module: types.ModuleType, names: list[str]) -> None:
        """Write the functions, classes and numbers to which the code's names lead in a module that is not jax's."""
        home = module.__name__
        for name in names if home not in _OUTSIDE else ():
            value = vars(module)[name]
            if name in _TALKING:
                continue
            if callable(value) and home != "builtins" and package_of(type_name(type(value))) == package_of(home):
                self._write_library_object(home, name, value)
            elif callable(value) or type(value) is float:
                self._write_read(module, name)

    def _look_at_library_class(self, kind: type) -> None:
        """Raise CannotSkipError if a class of a library's has methods that are not from its files."""
        if id(kind) not in self.classes and kind.__flags__ & HEAP_TYPE:
            self.classes[id(kind)] = kind, (content := content_of(kind))
            _check_from_files(type_name(kind), content.values())

    def _write_library_object(self, home: str, name: str, value: Any) -> None:
        """Write an object of the library's own, such as numpy.sum, by its name, unless it was made of other code."""
        held = [*gc.get_referents(value), getattr(value, "__wrapped__", None)]
        _check_from_files(
            f"{home}.{name}", itertools.chain(held, *(each.values() for each in held if type(each) is dict))
        )
        self.read.setdefault(home, {})[name] = value
        self.parts += home, name, type_name(type(value)), str(getattr(value, "__name__", None))

    def _write_named(self, value: Any) -> None:
        if isinstance(value, dict):
            self._write_table(value)
        elif isinstance(value, (type, core.Primitive)):
            if isinstance(value, core.Primitive):
                self.write_items(traced_of(value))
                self.objects.append((value, traced_of))
            elif is_of_jax(value.__module__):
                self._write_class_content(value)
            else:
                return
            self.keys.append(value)
            for number, table in (*self._beyond.tables, *self.tables):
                if value in table:
                    self._write_entry(number, table, value)
        else:
            self.write_attributes(value)

    def _write_table(self, value: dict[Any, Any]) -> None:
        """Write the entries of a dictionary by primitives or classes, or of functions, or of such dictionaries."""
        number = self._numbers[id(value)]
        for table in (value, *value.copy().values()):
            entries = table.copy() if isinstance(table, dict) else {}
            if any(isinstance(each, (type, core.Primitive)) for each in entries):
                self.tables.append((number, table))
                others = (each for each in entries if isinstance(each, type) and is_of_a_library(each.__module__))
                keys = (*self._beyond.keys, *self.keys, *sorted(others, key=type_name))
            elif not CODE.isdisjoint(map(type, entries.values())):
                keys = tuple(sorted((each for each in entries if isinstance(each, (str, np.dtype))), key=str))
                self.fixed.append(table)
            else:
                continue
            for key in keys:
                if key in entries:
                    self._write_entry(number, table, key)

    def _write_entry(self, number: int, table: dict[Any, Any], key: Any) -> None:
        label = type_name(key) if isinstance(key, type) else getattr(key, "name", key)
        self.parts += number, label
        # A lowering rule is part of each program that uses it, so all that it holds counts.
        self.is_complete = any(table is each for each in lowering_tables())
        try:
            self.write(table[key])
        except CannotSkipError as reason:
            raise CannotSkipError(f"rule of jax replaced: {label}: {reason}") from None
        finally:
            self.is_complete = False

    def _write_class_content(self, kind: type) -> None:
        if id(kind) in self.classes:
            return
        self.classes[id(kind)] = kind, (content := content_of(kind))
        try:
            self.write_all((type(kind), *kind.__bases__))
            for name, held in content.items():
                self.parts.append(name)
                # A member of an enumeration, or an instance that the class holds, is of this class.
                is_instance = type(held) is kind and not callable(held)
                self.write(getattr(held, "_value_", None) if is_instance else held)
        except CannotSkipError as reason:
            raise CannotSkipError(f"function of jax replaced: {type_name(kind)}: {reason}") from None


Reach._beyond = Reach(is_complete=False)


def _check_from_files(name: str, values: Iterable[Any]) -> None:
    """Raise CannotSkipError if a function among some values is not from the file of its module."""
    for value in values:
        function = getattr(value, "__func__", value)
        if type(function) is types.FunctionType and not is_from_its_file(function, function.__globals__["__name__"]):
            raise CannotSkipError(f"function of a library replaced: {name}: {function.__qualname__}")


def content_of(kind: type) -> dict[str, Any]:
    """Return what counts of a class: its code that is written in Python, and its plain values."""
    # The file of jaxlib tells what is native. It makes the class of an iterator when the first one is needed.
    return {
        name: held
        for name, held in namespace(kind).copy().items()
        if type(held) not in _NO_CONTENT
        # A library's class may keep counts and memos, so that its code alone counts.
        and (is_of_jax(kind.__module__) or type(held) in CODE)
        and type(getattr(held, "fget", held)).__module__ != "nanobind"
        and (not name.startswith("__") or callable(held) or hasattr(type(held), "__get__"))
    }


def traced_of(primitive: Any) -> dict[str, Any]:
    """Return the functions that tracing calls of a primitive; a lowering rule may trace."""
    held = vars(primitive)
    return {name: held[name] for name in _TRACED if name in held}


def is_late(module: types.ModuleType, name: str) -> bool:
    """Return whether a name of a module stands for another module since somebody has imported that."""
    value = vars(module)[name]
    if type(value) is not types.ModuleType or not is_known_module(value):
        return False
    return "__getattr__" in vars(module) or value.__name__ == f"{module.__name__}.{name}"


def importable() -> dict[str, list[types.ModuleType]]:
    """Return jax's modules, as far as they are imported, by the names that are in code which imports them."""
    found: dict[str, list[types.ModuleType]] = {}
    for full, module in sys.modules.copy().items():
        if is_of_jax(full) and type(module) is types.ModuleType:
            for name in {full, full.rpartition(".")[2]}:
                found.setdefault(name, []).append(module)
    return found


@functools.lru_cache(1024)
def assigned_in(module: types.ModuleType) -> frozenset[str]:
    """Return the globals that a module's functions assign: they differ from moment to moment."""
    found, names = set[str](), vars(module).copy()
    # jax assigns no module to a global.
    values = {name for name, value in names.items() if not (type(value) is types.ModuleType or callable(value))}
    file = getattr(module, "__file__", None)
    codes = [each.__code__ for each in names.values() if type(each) is types.FunctionType]
    codes = [code for code in codes if code.co_filename == file]
    while codes:
        for code in codes:
            if not values.isdisjoint(code.co_names) and _STORE_GLOBAL in code.co_code[::2]:
                found.update(each.argval for each in dis.get_instructions(code) if each.opcode == _STORE_GLOBAL)
        constants = itertools.chain.from_iterable(map(_constants_of, codes))
        codes = [each for each in constants if type(each) is types.CodeType]
    return frozenset(found)


def forget_state() -> None:
    """Have the modules looked at again."""
    assigned_in.cache_clear()
