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

from xcache.clock import process_began
from xcache.hook.calls.program_code import code_of
from xcache.hook.structure.encoding import CannotSkipError, are_same, text
from xcache.hook.structure.libraries import is_of_jax

# Python reads no source file so soon after its start; the clocks of processes and files have this resolution.
_GRACE_SECONDS = 0.01
PROGRAM, LIBRARY, PYTHON, JAX = "program", "library", "python", "jax"
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_STANDARD = f"{Path(os.__file__).parent}{os.sep}"
# Modules of Python's whose functions read nothing but their arguments, and whose objects keep all in attributes.
_PURE = frozenset((
    "_abc", "_bisect", "_collections", "_functools", "_heapq", "_operator", "_struct", "_thread._local", "_typing",
    "_warnings", "abc", "argparse.Namespace", "array", "base64", "binascii", "bisect", "builtins", "cmath",
    "collections", "collections.abc", "contextlib", "copy", "dataclasses", "enum", "fractions", "functools", "heapq",
    "inspect.BoundArguments", "inspect.Parameter", "inspect.Signature", "inspect._ParameterKind", "inspect._empty",
    "inspect.signature", "itertools", "json", "json.decoder", "json.encoder", "keyword", "math", "numbers", "operator",
    "re", "reprlib", "string", "struct", "textwrap", "types", "typing", "unicodedata", "warnings", "zlib",
))  # fmt: skip
_IMPURE = frozenset((
    "builtins.open", "builtins.input", "builtins.eval", "builtins.exec", "builtins.compile", "builtins.globals",
    "builtins.id", "builtins.hash", "builtins.__import__", "builtins.breakpoint", "typing.get_type_hints",
))  # fmt: skip
# What the modules of libraries held when that was found to be theirs, by the module's name, with what was generated of
# it, and what may be a setting.
_MOST_SETTINGS = 100
_examined: dict[str, tuple[list[Any], bytes, dict[str, Any]]] = {}
_CONTAINERS = (dict, list, tuple, set)
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


def is_a_library_s(value: Any, own: frozenset[str] = frozenset()) -> bool:
    """Return whether a name in a module of a library's leads to this: its files say what it is."""
    return is_named(value) and origin(value.__module__, own) != PROGRAM


@functools.cache
def file_digest(file: str) -> str:
    """Return the digest of a library's file; raise CannotSkipError if the process may run what it held before."""
    try:
        content, status = Path(file).read_bytes(), Path(file).stat()
    except OSError:
        return ""
    # A rename changes ctime, and no mtime.
    if status.st_ctime > process_began() + _GRACE_SECONDS:
        raise CannotSkipError(f"changed source file: {file}")
    return hashlib.sha256(content).hexdigest()


def of_libraries(packages: Iterable[str], own: frozenset[str]) -> Iterator[bytes]:
    """Yield what counts of the modules of these packages beside their files; raise CannotSkipError if one is patched.

    That is their settings, and the code that Python and libraries generate. All other code has to be a library's.
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
                settings = {
                    key: value for key, value in names.items() if not key.startswith("__") and _is_setting(value)
                }
                known = _examined[name] = held, _generated(name, held, own), settings
            told = [f"{key} {said}" for key, value in known[2].items() if (said := _said(value))]
            if known[1] or told:
                yield text(name) + known[1] + text("\n".join(told))


def _generated(module: str, held: Iterable[Any], own: frozenset[str]) -> bytes:
    """Return a digest of the generated functions among these values; refuse a function that is the program's."""
    found = []
    for function in {id(each): each for value in held for each in _functions_of(value)}.values():
        if _is_programs(function, own):
            raise CannotSkipError(f"function of a library replaced: {module}.{function.__qualname__}")
        if function.__code__.co_filename.startswith("<"):
            found.append(code_of(function.__code__).digest)
    return hashlib.blake2b(b"".join(found), digest_size=16).digest() if found else b""


def _is_setting(value: Any) -> bool:
    kind = type(value)
    return kind in _PLAIN or kind in _CONTAINERS or origin(kind.__module__) == LIBRARY


def _said(value: Any, depth: int = 4) -> str | None:
    """Return a text of plain values and what holds nothing else; None of what is empty, large or holds others."""
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if kind not in _CONTAINERS:
        value = getattr(value, "__dict__", None) if _is_setting(value) else None
    if not isinstance(value, _CONTAINERS) or not 0 < len(value) <= _MOST_SETTINGS or depth == 0:
        return None
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    said = [_said(each, depth - 1) for each in parts]
    if None in said:
        return None
    return f"{kind.__name__} {sorted(map(str, said)) if kind is set else said}"


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
