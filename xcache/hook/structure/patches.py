"""Whether somebody has replaced functions of jax's, which any lowering rule may call.

All modules of jax are examined when the first program is described, and again when modules were imported since. The
functions of the modules that lower, and of those that they use, are compared before each program. A function of jax's
in the wrong place is jax's own code, too: the digest says which function each name of the modules that lower leads to.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

from jax._src.interpreters import mlir

from xcache.hook.structure.callables import describe_callable
from xcache.hook.structure.code import is_of_jax, is_of_jaxs_files
from xcache.hook.structure.encoding import CannotSkipError
from xcache.hook.structure.rules import is_late, rule_tables

# Packages from which jax imports functions and objects by name.
_LIBRARIES = frozenset((
    *sys.stdlib_module_names, "jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "scipy", "flatbuffers", "nanobind",
    "absl", "etils", "rich", "xcache", "portpicker", "libtpu", "jax_plugins", "triton", "google", "mlir",
    "typing_extensions",
))  # fmt: skip
# Packages among them whose objects may stand in place of functions.
_PACKAGES_OF_CALLABLES = frozenset((
    "jax", "jaxlib", "builtins", "functools", "numpy", "operator", "types", "typing", "collections", "contextlib",
    "nanobind", "pybind11_builtins", "weakref", "xcache", "ml_dtypes", "_thread", "threading", "absl",
))  # fmt: skip

_DESCRIBED = (types.FunctionType, functools.partial)
# The importer of a module, such as pytest's loader.
_IMPORT_ATTRIBUTES = ("__loader__", "__spec__")


class _Patches:
    """Remembers jax's functions as they were when they were examined."""

    def __init__(self) -> None:
        self._modules = 0
        self._reason: str | None = None
        # The function that is not jax's own: the namespace of the module, the name, and the value found there.
        self._replacement: tuple[dict[str, Any], str, Any] = {}, "", None
        self._watched: list[tuple[dict[str, Any], Callable[[Any], Any], Any]] = []
        # The functions of each module that lowers, as they were described, and their digest.
        self._described: dict[str, tuple[Any, bytes]] = {}
        self._digests: dict[bool, bytes] = {}
        # Functions from these files, and instances of these types, may stand in a module of jax's.
        self._known_files: set[str] = set()
        self._known_types: set[type] = set()

    def check(self) -> None:
        """Raise CannotSkipError if a function of jax's is not its own."""
        if self._modules != len(sys.modules) or not self._are_unchanged():
            # Noted last: another thread must not pass before all is examined.
            modules = len(sys.modules)
            self._reason = self._examine()
            self._modules = modules
        if self._reason is not None:
            raise CannotSkipError(self._reason)

    def _are_unchanged(self) -> bool:
        if self._reason is not None:
            names, key, value = self._replacement
            return names.get(key) is value
        try:
            return all(get(names) == functions for names, get, functions in self._watched)
        except KeyError:
            return False

    def digest(self, *, with_late: bool) -> bytes:
        """Return a digest of what the names of the modules that lower lead to; the last ``check`` has made it.

        ``with_late`` adds the modules that a program may import after jax.
        """
        return self._digests[with_late]

    def _examine(self) -> str | None:
        watched: list[tuple[dict[str, Any], Callable[[Any], Any], Any]] = []
        modules = {
            name: module
            for name, module in list(sys.modules.items())
            # The others hand on names of these.
            if name.startswith(("jax._src.", "jaxlib.")) and isinstance(module, types.ModuleType)
        }
        for name, module in modules.items():
            for key, value in list(vars(module).items()):
                if key not in _IMPORT_ATTRIBUTES and not self._is_acceptable(value):
                    self._replacement = vars(module), key, value
                    return f"function of jax replaced: {name}.{key}"
        homes = {_defining_module(entry) for table in rule_tables() for entry in table.values()}
        lowering = {mlir.__name__, *(home for home in homes if home in modules)}
        used = {
            value.__name__
            for name in lowering
            for value in vars(modules[name]).values()
            if type(value) is types.ModuleType
        }
        for name in (lowering | used) & modules.keys():
            names = vars(modules[name])
            functions = [key for key, value in names.items() if type(value) in _DESCRIBED]
            if len(functions) > 1:
                get = operator.itemgetter(*functions)
                watched.append((names, get, get(names)))
                if name in lowering and (reason := self._describe(name, names, functions, watched[-1][2])):
                    return reason
        self._digests = {late: self._digest_of_all(with_late=late) for late in (False, True)}
        self._watched = watched
        return None

    def _digest_of_all(self, *, with_late: bool) -> bytes:
        counted = sorted(name for name in self._described if with_late or not is_late(name + "."))
        digests = b"".join(self._described[name][1] for name in counted)
        return hashlib.blake2b(digests, digest_size=16).digest()

    def _describe(self, module: str, names: dict[str, Any], keys: list[str], functions: tuple[Any, ...]) -> str | None:
        """Describe the functions of a module; return why one of them cannot be described, or None."""
        known = self._described.get(module)
        if known is None or known[0] != functions:
            lines = []
            for key, function in zip(keys, functions, strict=True):
                try:
                    lines.append(f"{key} {_describe_function(function)}")
                except CannotSkipError as reason:
                    self._replacement = names, key, function
                    return f"function of jax that cannot be described: {module}.{key}: {reason}"
            lines.sort()
            digest = hashlib.blake2b("\n".join((module, *lines)).encode(), digest_size=16).digest()
            self._described[module] = functions, digest
        return None

    def _is_acceptable(self, value: Any) -> bool:
        kind = type(value)
        if kind is types.FunctionType:
            return value.__code__.co_filename in self._known_files or self._is_of_a_library(value)
        if kind not in self._known_types:
            package = kind.__module__.split(".", 1)[0]
            if package not in _LIBRARIES or (
                package not in _PACKAGES_OF_CALLABLES and callable(value) and not isinstance(value, type)
            ):
                return False
            self._known_types.add(kind)
        if isinstance(value, type):
            return not is_of_jax(value.__module__) or self._are_methods_acceptable(value)
        inner = getattr(value, "__wrapped__", None) or getattr(value, "func", None) if callable(value) else None
        return inner is None or inner is value or self._is_acceptable(inner)

    def _are_methods_acceptable(self, value: type) -> bool:
        known, function = self._known_files, types.FunctionType
        return all(
            each.__code__.co_filename in known or self._is_of_a_library(each)
            for each in vars(value).values()
            if type(each) is function
        )

    def _is_of_a_library(self, function: types.FunctionType) -> bool:
        """Return whether a function is jax's, from a file of jax's, or of a library that jax imports."""
        module, file = function.__globals__.get("__name__", ""), function.__code__.co_filename
        is_acceptable = is_of_jaxs_files(function) or (not is_of_jax(module) and module.split(".", 1)[0] in _LIBRARIES)
        if is_acceptable and not file.startswith("<"):
            self._known_files.add(file)
        return is_acceptable


patches = _Patches()


def _describe_function(function: Any) -> str:
    if isinstance(function, functools.partial):
        return describe_callable(function)
    return f"{function.__module__} {function.__qualname__} {function.__code__.co_firstlineno}"


def _defining_module(entry: Any) -> Any:
    """Return the module of a rule's function."""
    rule = getattr(entry, "rule", entry)
    return getattr(getattr(rule, "func", rule), "__module__", None)
