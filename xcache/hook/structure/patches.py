"""Find out whether somebody has replaced functions of jax's, which any lowering rule may call.

All modules of jax are examined when the first program is described, and again when modules were imported since. The
functions and constants of the modules that lower, and the functions of those that they use, are compared before each
program. Any constant is accepted, and so is a function or class of jax's in the wrong place, which is jax's own code,
too: the digest says what each of these names leads to.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
from jax._src.interpreters import mlir

from xcache.hook.structure.callables import describe_callable
from xcache.hook.structure.code import is_of_jax, is_of_jaxs_files
from xcache.hook.structure.encoding import CannotSkipError, are_same, type_name
from xcache.hook.structure.libraries import is_import_of_jax, is_installed_as, is_of_a_library, leads_to
from xcache.hook.structure.rules import EXPERIMENTAL, is_imported_later, rule_tables

# Libraries whose objects may stand in place of functions.
_PACKAGES_OF_CALLABLES = frozenset((
    "jax", "jaxlib", "builtins", "functools", "numpy", "operator", "types", "typing", "collections", "contextlib",
    "nanobind", "pybind11_builtins", "weakref", "xcache", "ml_dtypes", "_thread", "threading", "absl",
))  # fmt: skip

_JITTED = type(jax.jit(lambda: None))
_FUNCTIONS = frozenset((types.FunctionType, functools.partial, _JITTED))
_MADE_WITH = _FUNCTIONS | {types.MethodType}
_CONSTANTS = frozenset((bool, int, float, complex, str, bytes, type(None)))
_KINDS_WHERE_LOWERED = _FUNCTIONS | _CONSTANTS | {types.ModuleType}
# The functions behind an attribute of a class, by the attribute's type.
_FUNCTIONS_OF: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    types.FunctionType: lambda value: (value,),
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    property: lambda value: (value.fget, value.fset, value.fdel),
    functools.cached_property: lambda value: (value.func,),
    functools.partialmethod: lambda value: (value.func,),
}
_WARNED = "xcache.hook.warned"
# The importer of a module, such as pytest's loader, which rewrites the asserts in those of jax's named test_...
_IMPORT_ATTRIBUTES = ("__loader__", "__spec__", "@py_builtins", "@pytest_ar")


class _Patches:
    """Remembers jax's functions as they were when they were examined."""

    def __init__(self) -> None:
        # The names of all modules that were imported when jax's were examined.
        self._modules: list[str] = []
        self._reason: str | None = None
        # The function that is not jax's own: the namespace of the module, the name, and the value found there.
        self._replacement: tuple[dict[str, Any], str, Any] = {}, "", None
        self._watched: list[tuple[dict[str, Any], Callable[[Any], Any], Any]] = []
        # The functions and constants of each module that lowers or is used for that, and their digest.
        self._described: dict[str, tuple[Any, bytes]] = {}
        # The digest of what is unusual about the classes of such a module.
        self._classes: dict[str, bytes] = {}
        self._digests: dict[bool, bytes] = {}
        # Functions from these files, and instances of these types, may stand in a module of jax's.
        self._known_files: set[str] = set()
        self._known_types: set[type] = set()
        # The objects whose functions are being examined, by thread and id.
        self._examining: set[tuple[int, int]] = set()

    def check(self) -> None:
        """Raise CannotSkipError if a function in a module of jax's is not jax's own."""
        are_unchanged = self._are_unchanged()
        # A list of a dictionary is one step, and much sooner compared than a set.
        modules = list(sys.modules)
        if not are_unchanged or self._modules != modules:
            # Noted last: another thread must not pass before all is examined.
            imported = frozenset(modules).difference(self._modules)
            # Modules that jax imports while it lowers run no code of the program's, so only they are examined.
            is_partial = are_unchanged and self._reason is None and all(map(is_import_of_jax, imported))
            self._reason = self._examine(imported if is_partial else modules)
            self._modules = modules
        if self._reason is not None:
            raise CannotSkipError(self._reason)

    def _are_unchanged(self) -> bool:
        if self._reason is not None:
            names, key, value = self._replacement
            return names.get(key) is value
        try:
            return all(are_same(get(names), functions) for names, get, functions in self._watched)
        except KeyError:
            return False

    def digest(self, *, with_imported_later: bool) -> bytes:
        """Return a digest of what the names of those modules lead to; the last ``check`` has made it.

        ``with_imported_later`` adds the modules that a program may import after jax.
        """
        return self._digests[with_imported_later]

    def _examine(self, names: Collection[str]) -> str | None:
        """Examine those of these modules that are jax's, and describe the modules that lower and those they use.

        Return the first reason why lowering cannot be skipped, or None.
        """
        watched: list[tuple[dict[str, Any], Callable[[Any], Any], Any]] = []
        modules = {
            name: module
            for name, module in sys.modules.copy().items()
            # Rules call functions by their public names, too, and jax.experimental defines rules.
            if is_of_jax(name) and isinstance(module, types.ModuleType)
        }
        seen: set[int] = set()
        for name in modules.keys() & names:
            namespace = vars(modules[name])
            seen.update(id(namespace.get(key)) for key in _IMPORT_ATTRIBUTES)
            # Without the keys: so many pairs at once would make Python's garbage collector look at all objects.
            for value in list(namespace.values()):
                if id(value) not in seen and not self._is_acceptable(value):
                    key = next((key for key, found in namespace.copy().items() if found is value), "")
                    # jax imports other libraries where they are installed.
                    if not (isinstance(value, types.ModuleType) and is_installed_as(value, key)):
                        self._replacement = namespace, key, value
                        return f"function of jax replaced: {name}.{key}"
                seen.add(id(value))
        homes = {_defining_module(entry) for table in rule_tables() for entry in list(table.values())}
        # Programs that use rules of jax.experimental are lowered.
        lowering = {mlir.__name__, *(home for home in homes & modules.keys() if not home.startswith(EXPERIMENTAL))}
        without_imported_later = _with_used(modules, [name for name in lowering if not is_imported_later(f"{name}.")])
        with_imported_later = _with_used(modules, lowering)
        for name in with_imported_later:
            namespace = vars(modules[name])
            # A module may have been imported before another one made it one of these.
            if name in names or name not in self._classes:
                lines = sorted(_unusual_classes(name, namespace))
                self._classes[name] = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()
            # Values beside functions may change in the modules that these use, as jax works: some import modules late.
            kinds = _KINDS_WHERE_LOWERED if name in lowering else _FUNCTIONS
            keys = [
                key
                for key, value in namespace.copy().items()
                if type(value) in kinds and not key.startswith("__") and not _is_submodule(value, name, key)
            ]
            if len(keys) > 1:
                get = operator.itemgetter(*keys)
                watched.append((namespace, get, get(namespace)))
                if reason := self._describe(name, namespace, keys, watched[-1][2]):
                    return reason
        self._digests = {False: self._digest_of(without_imported_later), True: self._digest_of(with_imported_later)}
        self._watched = watched
        return None

    def _digest_of(self, names: Iterable[str]) -> bytes:
        known = (self._described[name][1] for name in sorted(names) if name in self._described)
        digests = b"".join((*known, *(self._classes.get(name, b"") for name in sorted(names))))
        return hashlib.blake2b(digests, digest_size=16).digest()

    def _describe(self, module: str, names: dict[str, Any], keys: list[str], values: tuple[Any, ...]) -> str | None:
        """Describe the functions and constants of a module; return why one cannot be described, or None."""
        known = self._described.get(module)
        if known is None or not are_same(known[0], values):
            lines = []
            for key, value in zip(keys, values, strict=True):
                try:
                    lines.append(f"{key} {_description_of(value)}")
                except CannotSkipError as reason:
                    self._replacement = names, key, value
                    return f"function of jax that cannot be described: {module}.{key}: {reason}"
            lines.sort()
            digest = hashlib.blake2b("\n".join((module, *lines)).encode(), digest_size=16).digest()
            self._described[module] = values, digest
        return None

    def _is_acceptable(self, value: Any) -> bool:
        kind = type(value)
        if kind is types.FunctionType:
            return self._is_function_acceptable(value)
        if kind not in self._known_types:
            if isinstance(value, types.ModuleType):
                # A copy of a module may hold anything; xcache's own stands for ``warnings``.
                return is_of_a_library(kind.__module__) and (
                    kind.__module__ == _WARNED or (is_of_a_library(value.__name__) and leads_to(value.__name__, value))
                )
            if kind is types.MethodType:
                return self._is_acceptable(value.__func__) and self._is_acceptable(value.__self__)
            if isinstance(value, functools.partial):
                # jax's own tests give it a stream that is pytest's.
                given = filter(callable, (*value.args, *value.keywords.values()))
                return all(map(self._is_acceptable, (value.func, *given)))
            if kind is types.SimpleNamespace:
                return all(map(self._is_acceptable, vars(value).values()))
            package = kind.__module__.split(".", 1)[0]
            if not is_of_a_library(kind.__module__) or (
                package not in _PACKAGES_OF_CALLABLES and callable(value) and not isinstance(value, type)
            ):
                return False
            self._known_types.add(kind)
        if isinstance(value, type):
            if is_of_jax(value.__module__):
                return self._are_methods_acceptable(value)
            return is_of_a_library(value.__module__)
        inner = getattr(value, "__wrapped__", None) or getattr(value, "func", None) if callable(value) else None
        return inner is None or inner is value or self._is_acceptable(inner)

    def _is_function_acceptable(self, function: types.FunctionType) -> bool:
        if function.__code__.co_filename not in self._known_files and not self._is_from_accepted_file(function):
            return False
        # A function of jax's may have made this one of a function of the program's.
        if function.__closure__ is None and not function.__dict__:
            return True
        return self._are_acceptable_within(function, _functions_within(function))

    def _are_methods_acceptable(self, value: type) -> bool:
        return self._are_acceptable_within(value, _functions_of_class(value))

    def _are_acceptable_within(self, owner: Any, functions: Iterable[Any]) -> bool:
        """Return whether all functions of an object are acceptable; they may lead back to it."""
        key = threading.get_ident(), id(owner)
        if key in self._examining:
            return True
        try:
            self._examining.add(key)
            return all(map(self._is_acceptable, functions))
        finally:
            self._examining.discard(key)

    def _is_from_accepted_file(self, function: types.FunctionType) -> bool:
        """Return whether a function is jax's, from a file of jax's, or of a library that jax imports."""
        module, file = function.__globals__.get("__name__", ""), function.__code__.co_filename
        is_acceptable = is_of_jaxs_files(function) or (not is_of_jax(module) and is_of_a_library(module))
        if is_acceptable and not file.startswith("<"):
            self._known_files.add(file)
        return is_acceptable


patches = _Patches()


def _functions_of_class(kind: type) -> Iterator[Any]:
    for each in list(vars(kind).values()):
        functions_of = _FUNCTIONS_OF.get(type(each))
        if functions_of is not None:
            yield from functions_of(each)
        elif callable(each) and not isinstance(each, type):
            yield each


def _functions_within(function: types.FunctionType) -> Iterator[Any]:
    """Yield the functions that one wraps or was made with."""
    inner = getattr(function, "__wrapped__", None)
    if inner is not None:
        yield inner
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        if type(held) in _MADE_WITH and held is not inner:
            yield held


def _is_submodule(value: Any, package: str, name: str) -> bool:
    """Return whether importing a module put it into its package."""
    return type(value) is types.ModuleType and value.__name__ == f"{package}.{name}"


def _description_of(value: Any) -> str:
    if isinstance(value, functools.partial):
        return describe_callable(value)
    if type(value) is types.ModuleType:
        return f"module {value.__name__}"
    if type(value) is _JITTED:
        return f"jitted {_description_of(value.__wrapped__)}"
    if type(value) not in _FUNCTIONS:
        return repr(value)
    return f"{value.__module__} {value.__qualname__} {value.__code__.co_firstlineno}"


def _unusual_classes(module: str, namespace: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each class under another name than its own, and each constant or other's function in one."""
    for key, value in namespace.copy().items():
        if not isinstance(value, type):
            continue
        home = sys.modules.get(value.__module__)
        # The variable of a loop over a set of classes is another one in each process.
        is_variable = key.islower() and (len(key) <= 2 or not value.__name__.islower())
        if not is_variable and (key != value.__name__ or home is None or vars(home).get(key) is not value):
            yield f"{key} {type_name(value)}"
        if value.__module__ == module:
            yield from _unusual_parts(value)


def _unusual_parts(kind: type) -> Iterator[str]:
    prefix = f"{kind.__qualname__}."
    for name, held in vars(kind).copy().items():
        of = type(held)
        if of in _CONSTANTS:
            if not name.startswith("__"):
                yield f"{prefix}{name} {held!r}"
            continue
        function = (
            held if of is types.FunctionType else held.fget if of is property else getattr(held, "__func__", None)
        )
        if type(function) is types.FunctionType and function.__qualname__ != prefix + name:
            yield f"{prefix}{name} {function.__module__}.{function.__qualname__}"


def _with_used(modules: Mapping[str, types.ModuleType], lowering: Collection[str]) -> set[str]:
    """Return the names of modules that lower, and of those of jax's that they have in a global variable.

    A module of operations in MLIR comes with the generated module that its functions are from.
    """

    def held(names: Iterable[str], kind: type) -> Iterator[Any]:
        return (value for name in names for value in list(vars(modules[name]).values()) if type(value) is kind)

    used = {module.__name__ for module in held(lowering, types.ModuleType)}
    dialects = [name for name in used & modules.keys() if name.startswith("jaxlib.mlir.dialects.")]
    generated = {function.__module__ for function in held(dialects, types.FunctionType)}
    return {*lowering, *used, *generated} & modules.keys()


def _defining_module(entry: Any) -> Any:
    """Return the module of a rule's function."""
    rule = getattr(entry, "rule", entry)
    return getattr(getattr(rule, "func", rule), "__module__", None)
