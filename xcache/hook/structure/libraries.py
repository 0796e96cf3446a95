"""Whose a module or function is: jax's own, Python's, a library's (of which jax is made, or any), or the program's."""

from __future__ import annotations

import functools
import gc
import os
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jaxlib

ROOTS = tuple(f"{Path(package.__file__).resolve().parent}/" for package in (jax, jaxlib))
# As code names them, which may be by a link.
_SPELT = (*ROOTS, *(f"{Path(package.__file__).parent}/" for package in (jax, jaxlib)))
# Packages that jax or jaxlib requires, brings, or uses where it finds them, whose objects stand in its modules.
_REQUIRED = frozenset((
    "numpy", "ml_dtypes", "scipy", "opt_einsum", "typing_extensions", "nanobind", "absl", "flatbuffers", "etils",
))  # fmt: skip
PROGRAM, LIBRARY, PYTHON, JAX = "program", "library", "python", "jax"
_STANDARD = f"{Path(os.__file__).parent}{os.sep}"
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
# Methods that Python generates for dataclasses and named tuples, from no file.
_GENERATED = frozenset((
    "__init__", "__repr__", "__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__setattr__", "__delattr__",
    "__replace__", "__new__",
))  # fmt: skip

# All that such a method finds in its globals.
_NAMES_OF_NAMED_TUPLES = {"_tuple_new", "__builtins__", "__name__"}


@functools.cache
def is_of_jax(module: str | None) -> bool:
    """Return whether a module belongs to jax or jaxlib, by its name."""
    return module is not None and module.split(".", 1)[0] in ("jax", "jaxlib")


def package_of(module: Any) -> str:
    """Return the name of the package that a module is in."""
    return str(module).partition(".")[0]


def origin(module: Any, own: frozenset[str] = frozenset()) -> str:
    """Return whose a module is, by its name; the packages ``own`` are the program's wherever they are."""
    package = package_of(module)
    if is_of_jax(package):
        return JAX
    if package in own:
        return PROGRAM
    found = sys.modules.get(str(module)) or sys.modules.get(package)
    # Programs put objects of other kinds there, too.
    file = namespace(found).get("__file__") if issubclass(type(found), types.ModuleType) else None
    if file is None:
        return PYTHON if package in sys.stdlib_module_names else PROGRAM
    return origin_of_file(file, package)


@functools.cache
def origin_of_file(file: str, package: str) -> str:
    """Return whose a file with a module of this package is."""
    if _is_installed(file) or package == "xcache":
        return LIBRARY
    return PYTHON if package in sys.stdlib_module_names and file.startswith(_STANDARD) else PROGRAM


@functools.cache
def is_of_a_library(module: str) -> bool:
    """Return whether a module is of the standard library, or of a package that jax requires."""
    # A program may have a profile.py, too.
    return package_of(module) in _REQUIRED or origin(module) == PYTHON


def _is_installed(place: str) -> bool:
    return any(folder in place for folder in _INSTALLED)


def namespace(holder: Any) -> dict[str, Any]:
    """Return the names of a module without asking it, which may import something for that; or those of a class."""
    if isinstance(holder, type):
        return gc.get_referents(holder.__dict__)[0]  # type: ignore[no-any-return]
    found: dict[str, Any] = types.ModuleType.__getattribute__(holder, "__dict__")
    return found


def named(module: str, name: str) -> Any:
    """Return what a name leads to, or None."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        held = namespace(found) if issubclass(type(found), types.ModuleType) else getattr(found, "__dict__", {})
        found = held.get(part)
    return found


def original_of(value: Any) -> Any:
    """Return the object of jax's that xcache has put this one in the place of, or the object itself."""
    if type(value) is types.FunctionType:
        names = value.__globals__
        module = names.get("__name__") or ""
        is_xcaches = module.startswith("xcache.") and names is vars(sys.modules[module])
    else:
        is_xcaches = type(value).__module__.startswith("xcache.")
    return getattr(value, "__wrapped__", value) if is_xcaches else value


def is_known_module(module: types.ModuleType) -> bool:
    """Return whether a module is jax's or a library's, and is what was imported under its name."""
    name = module.__name__
    if sys.modules.get(name, module) is not module:
        return False
    if is_of_jax(name) or is_of_a_library(name):
        return True
    # jax imports further libraries where they are installed.
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(_is_installed(place) for place in places if place)


def is_from_its_file(function: types.FunctionType, module: str) -> bool:
    """Return whether a function is of the file of its module, which is jax's or a library's."""
    code, names = function.__code__, function.__globals__
    if module.startswith("namedtuple_"):
        return names.keys() == _NAMES_OF_NAMED_TUPLES
    # Python 3.11 and 3.12 give this module the name of another one.
    holder = sys.modules.get("_collections_abc" if module == "collections.abc" else module)
    is_library = is_of_a_library(module)
    if holder is None or vars(holder) is not names or not (is_library or is_of_jax(module)):
        return False
    file = code.co_filename
    return (
        (file == getattr(holder, "__file__", None) and (is_library or file.startswith(_SPELT)))
        or (is_library and file.startswith("<frozen "))
        or (file == "<string>" and code.co_name in _GENERATED)
    )
