"""Whose a function or class is: the program's, which is read to its end, or a library's, for which its files stand."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from xcache.hook.calls import sources
from xcache.hook.calls.program_code import code_of
from xcache.hook.structure.code import is_of_jax
from xcache.hook.structure.encoding import CannotSkipError, are_same, text

PROGRAM, LIBRARY, PYTHON, JAX = "program", "library", "python", "jax"
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_STANDARD = f"{Path(os.__file__).parent}{os.sep}"
# Modules of Python's whose functions read nothing but their arguments, and whose objects keep all in attributes.
_PURE = frozenset((
    "_abc", "_bisect", "_collections", "_functools", "_heapq", "_operator", "_struct", "_typing", "abc",
    "_thread._local", "argparse.Namespace", "array", "base64", "binascii", "bisect", "builtins", "cmath", "collections",
    "collections.abc", "contextlib", "copy", "dataclasses", "enum", "fractions", "functools", "heapq", "inspect.BoundArguments", "inspect.Parameter",
    "inspect.Signature", "inspect._ParameterKind", "inspect._empty", "inspect.signature", "itertools",
    "json", "json.decoder", "json.encoder", "keyword", "math", "numbers", "operator", "re", "reprlib", "string",
    "struct", "textwrap", "types", "typing", "unicodedata", "warnings", "_warnings", "zlib",
))  # fmt: skip
_IMPURE = frozenset((
    "builtins.open", "builtins.input", "builtins.eval", "builtins.exec", "builtins.compile", "builtins.globals",
    "builtins.id", "builtins.hash", "builtins.__import__", "builtins.breakpoint", "typing.get_type_hints",
))  # fmt: skip
# What the modules of libraries held when that was found to be theirs, by the module's name, and what of it counts.
_examined: dict[str, tuple[list[Any], bytes]] = {}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


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
    file = None if found is None else namespace(found).get("__file__")
    if file is None:
        return PYTHON if package in sys.stdlib_module_names else PROGRAM
    return _origin_of_file(file, package)


@functools.cache
def _origin_of_file(file: str, package: str) -> str:
    if any(folder in file for folder in _INSTALLED) or package == "xcache":
        return LIBRARY
    return PYTHON if package in sys.stdlib_module_names and file.startswith(_STANDARD) else PROGRAM


def origin_of_function(function: types.FunctionType, own: frozenset[str]) -> str:
    """Return whose a function is: a library's, if it has the library's names and stands in its file."""
    names = function.__globals__
    name = names.get("__name__")
    found = sys.modules.get(name) if isinstance(name, str) else None
    if found is None or namespace(found) is not names:
        # Python makes the methods of a named tuple so.
        return PROGRAM
    file = function.__code__.co_filename
    if file.startswith("<") and not file.startswith("<frozen "):
        return PROGRAM
    return origin(name, own)


def check_pure(module: Any, name: str) -> None:
    """Raise CannotSkipError unless a function or class of Python's reads nothing but what it is given."""
    full = f"{module}.{name}"
    if full in _IMPURE or not (module in _PURE or full in _PURE):
        raise CannotSkipError(f"outside the program: {full}")


def namespace(module: types.ModuleType) -> dict[str, Any]:
    """Return a module's names without asking the module, which may import something for that."""
    found: dict[str, Any] = types.ModuleType.__getattribute__(module, "__dict__")
    return found


def is_named(value: Any) -> bool:
    """Return whether the name of a class or function leads to it."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", None))
    if not (isinstance(module, str) and isinstance(name, str)):
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        held = namespace(found) if isinstance(found, types.ModuleType) else getattr(found, "__dict__", {})
        found = held.get(part)
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    # Its name in jaxlib leads nowhere.
    return found is value or value is jax.Array


@functools.cache
def file_digest(file: str) -> str:
    """Return the digest of a library's file; raise CannotSkipError if the process may run what it held before."""
    try:
        content, has_changed = sources.read(Path(file))
    except OSError:
        return ""
    if has_changed:
        raise CannotSkipError(f"changed source file: {file}")
    return hashlib.sha256(content).hexdigest()


def of_libraries(packages: Iterable[str], own: frozenset[str]) -> Iterator[bytes]:
    """Yield what counts of the modules of these packages beside their files; raise CannotSkipError if one is patched.

    That is their plain values, and the code that Python and libraries generate. All other code has to be a library's.
    """
    wanted = {*packages}
    for name, module in sorted(sys.modules.copy().items()):
        if package_of(name) in wanted and isinstance(module, types.ModuleType):
            names = namespace(module).copy()
            held = list(names.values())
            kinds = [kind for kind in held if isinstance(kind, type) and package_of(kind.__module__) in wanted]
            held += itertools.chain.from_iterable(vars(kind).values() for kind in kinds)
            known = _examined.get(name)
            if known is None or not are_same(known[0], held):
                counts = [f"{key} {value!r}" for key, value in names.items()
                          if type(value) in _PLAIN and not key.startswith("__")]  # fmt: skip
                for each in {id(each): each for each in held}.values():
                    for function in _functions_of(each):
                        if _is_programs(function, own):
                            replaced = f"{name}.{function.__qualname__}"
                            raise CannotSkipError(f"function of a library replaced: {replaced}")
                        if function.__code__.co_filename.startswith("<"):
                            counts.append(f"{function.__qualname__} {code_of(function.__code__).digest.hex()}")
                digest = hashlib.blake2b("\n".join(sorted(counts)).encode("utf-8", "replace"), digest_size=16)
                known = _examined[name] = held, digest.digest() if counts else b""
            if known[1]:
                yield text(name) + known[1]


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    kind = type(value)
    if kind is types.FunctionType:
        yield value
    elif kind in (staticmethod, classmethod, types.MethodType):
        yield from _functions_of(value.__func__)
    elif kind is property:
        for each in (value.fget, value.fset, value.fdel):
            yield from _functions_of(each)
    elif kind is functools.partial:
        yield from _functions_of(value.func)
    elif not isinstance(value, type) and type(call := getattr(kind, "__call__", None)) is types.FunctionType:  # noqa: B004
        yield call


def _is_programs(function: types.FunctionType, own: frozenset[str]) -> bool:
    file, package = function.__code__.co_filename, package_of(function.__globals__.get("__name__"))
    if file.startswith("<"):
        return False
    return package in own or (not is_of_jax(package) and _origin_of_file(file, package) == PROGRAM)
