"""The libraries that jax is made of: whether a module is theirs."""

from __future__ import annotations

import functools
import os
import sys
import types
from pathlib import Path

# Packages from which jax has functions, classes and objects in its modules, besides the standard library.
_PACKAGES = frozenset((
    "jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "scipy", "flatbuffers", "nanobind", "pybind11_builtins",
    "absl", "etils", "typing_extensions", "xcache",
))  # fmt: skip
# Packages that jax imports while it works, and that change nothing of jax's.
_IMPORTED = frozenset(("rich", "libtpu", "jax_plugins", "triton", "portpicker", "_cyutility"))
_STANDARD = Path(os.__file__).resolve().parent
_INSTALLED = ("site-packages", "dist-packages")


def is_import_of_jax(module: str) -> bool:
    """Return whether a module is one that jax imports."""
    return is_of_a_library(module) or module.split(".", 1)[0] in _IMPORTED


def leads_to(name: str, module: types.ModuleType) -> bool:
    """Return whether no other module was imported under this name; an import that failed leaves none."""
    return sys.modules.get(name, module) is module


def is_installed_as(module: types.ModuleType, name: str) -> bool:
    """Return whether a module is one of an installed library, and has this name there."""
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    parts = {part for place in places if place for part in Path(place).parts}
    return (
        module.__name__.rpartition(".")[2] == name
        and leads_to(module.__name__, module)
        and any(folder in parts for folder in _INSTALLED)
    )


@functools.cache
def is_of_a_library(module: str) -> bool:
    """Return whether a module is jax's or of a library whose code jax has in its modules."""
    package = module.split(".", 1)[0]
    return package in _PACKAGES or (package in sys.stdlib_module_names and _is_standard(package))


def _is_standard(package: str) -> bool:
    """Return whether a module with the name of a standard one is that: a program may have a ``profile.py``, too."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:
        return True
    path = Path(file).resolve()
    return path.is_relative_to(_STANDARD) and path.relative_to(_STANDARD).parts[0] not in _INSTALLED
