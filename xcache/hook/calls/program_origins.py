"""Whose a function or class is: the program's, which is read to its end, or a library's, for which its files stand."""

from __future__ import annotations

import abc
import collections
import functools
import hashlib
import marshal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from xcache.clock import process_began
from xcache.hook.structure.description import MADE_OF_FUNCTIONS, PLAIN
from xcache.hook.structure.encoding import CannotSkipError, tagged, text, type_name
from xcache.hook.structure.libraries import (
    JAX,
    LIBRARY,
    PROGRAM,
    PYTHON,
    is_of_jax,
    named,
    namespace,
    origin,
    origin_of_file,
    package_of,
)
from xcache.hook.structure.marks import Marks

# Python reads no source file so soon after its start; the clocks of processes and files have this resolution.
_GRACE_SECONDS = 0.01
# Modules of Python's whose functions read nothing but their arguments, and whose objects keep all in attributes.
PURE = frozenset((
    "_abc", "_bisect", "_collections", "_functools", "_heapq", "_operator", "_struct", "_thread._local", "_typing",
    "_warnings", "abc", "argparse.Namespace", "array", "base64", "binascii", "bisect", "builtins", "cmath",
    "collections", "collections.abc", "contextlib", "copy", "dataclasses", "enum", "fractions", "functools", "heapq",
    "inspect.BoundArguments", "inspect.Parameter", "inspect.Signature", "inspect._ParameterKind", "inspect._empty",
    "inspect.signature", "itertools", "json", "json.decoder", "json.encoder", "keyword", "math", "numbers", "operator",
    "re", "reprlib", "string", "struct", "textwrap", "types", "typing", "unicodedata", "warnings", "zlib",
))  # fmt: skip
# A mapped file is read without a system call that anybody counts.
IMPURE = frozenset((
    "builtins.open", "builtins.input", "builtins.eval", "builtins.exec", "builtins.compile", "builtins.globals",
    "builtins.id", "builtins.hash", "builtins.__import__", "builtins.breakpoint", "typing.get_type_hints",
    "numpy.memmap",
))  # fmt: skip
_MOST_SETTINGS = 100
# Later formats depend on how often an object is referred to, and on which texts Python has interned.
_MARSHAL = 0
_CONTAINERS = (dict, list, tuple, set)
_HOLDERS = {**MADE_OF_FUNCTIONS, functools.partial: ("func",)}


def origin_of_function(function: types.FunctionType, own: frozenset[str]) -> str:
    """Return whose a function is: a library's, if it has the library's names and stands in its file."""
    names, file = function.__globals__, function.__code__.co_filename
    name = names.get("__name__")
    found = sys.modules.get(name) if isinstance(name, str) else None
    # Python makes the methods of a named tuple without a module.
    is_of_text = file.startswith("<") and not file.startswith("<frozen ")
    return PROGRAM if found is None or namespace(found) is not names or is_of_text else origin(name, own)


def is_named(value: Any) -> bool:
    """Return whether the name of a class or function leads to it."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", None))
    if not (isinstance(module, str) and isinstance(name, str)):
        return False
    found = named(module, name)
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    # Its name in jaxlib leads nowhere.
    return found is value or value is jax.Array


def is_a_library_s(value: Any, own: frozenset[str] = frozenset()) -> bool:
    """Return whether a name in a module of a library's leads to this: its files say what it is."""
    return is_named(value) and origin(value.__module__, own) != PROGRAM


class _Examined(NamedTuple):
    """The content of libraries' modules, which holds as long as Python has as many modules, and these are the same."""

    modules: int
    marks: Marks
    digest: bytes
    # Containers that the program can change in place, by their names, and classes that it can register others with.
    containers: dict[str, Any]
    abstract: list[type]


_examined: dict[tuple[frozenset[str], frozenset[str]], _Examined] = {}


def of_libraries(packages: frozenset[str], own: frozenset[str]) -> bytes:
    """Return what counts of packages: files, settings, generated code; raise CannotSkipError if one is patched."""
    if not packages:
        return b""
    known = _examined.get((packages, own))
    if known is None or known.modules != len(sys.modules) or known.marks.have_changed():
        known = _examined[packages, own] = _examine(packages, own)
    return known.digest + _told_registered(known.abstract, own) + _told(known.containers, own)


def _examine(packages: frozenset[str], own: frozenset[str]) -> _Examined:
    """Look at the files of packages and of all that these use, and at what is in their own modules and classes."""
    count, digest, settings, abstract = len(sys.modules), hashlib.sha256(), dict[str, Any](), list[type]()
    # By id, because modules import classes from each other.
    holders, functions = dict[int, tuple[str, dict[str, Any]]](), dict[int, types.FunctionType]()
    for name, names in _modules_of(packages, own):
        digest.update(text(name) + file_digest(names.get("__file__") or ""))
        if package_of(name) in packages:
            kinds = [each for each in names.copy().values() if isinstance(each, type)]
            own_kinds = [kind for kind in kinds if package_of(kind.__module__) in packages]
            abstract += [kind for kind in own_kinds if "_abc_impl" in namespace(kind)]
            holders |= {id(held): (type_name(kind), held) for kind in own_kinds for held in [namespace(kind)]}
            holders[id(names)] = name, names
    for place, names in holders.values():
        settings |= {f"{place}.{key}": each for key, each in names.copy().items() if _is_setting(key, each)}
        for key, function in ((key, each) for key, value in names.copy().items() for each in _functions_of(value)):
            functions[id(function)] = function
            if _is_programs(function, own):
                raise CannotSkipError(f"function of a library replaced: {place}.{function.__qualname__}")
            placed = f"{place}.{key} {function.__qualname__} {function.__name__}"
            digest.update(_told({placed: function.__defaults__ or ()}, own))
            if function.__kwdefaults__:
                settings[placed] = function.__kwdefaults__
            if function.__code__.co_filename.startswith("<"):
                digest.update(marshal.dumps(function.__code__, _MARSHAL))
    digest.update(_told(settings, own))
    names_of = {id(each): name for name, each in settings.items() if type(each) not in PLAIN}
    containers = {name: settings[name] for name in names_of.values()}
    marks = Marks([*(names for _, names in holders.values()), *functions.values()])
    return _Examined(count, marks, digest.digest(), containers, abstract)


def _modules_of(packages: frozenset[str], own: frozenset[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the loaded modules of packages with their names, and those of the packages that these use, and so on.

    Of Python's own only those that are asked for are among them.
    """
    loaded = collections.defaultdict(list)
    for name, module in sorted(sys.modules.copy().items()):
        is_module = issubclass(type(module), types.ModuleType)
        if is_module and (package_of(name) in packages or origin(name) not in (JAX, PYTHON)):
            loaded[package_of(name)].append((name, namespace(module)))
    waiting = sorted(packages)
    for package in waiting:
        for name, names in loaded.pop(package, ()):
            yield name, names
            if origin(name, own) not in (PROGRAM, PYTHON):
                waiting += map(_package_of_part, list(names.values()))


def _package_of_part(value: Any) -> str:
    """Return the package of a module, function or class that stands in a module; nothing for other values."""
    if issubclass(type(value), types.ModuleType):
        return package_of(namespace(value).get("__name__"))
    return package_of(value.__module__) if isinstance(value, (types.FunctionType, type)) else ""


@functools.cache
def file_digest(file: str) -> bytes:
    """Return the digest of a library's file; raise CannotSkipError if the process may run what it held before."""
    try:
        content, status = Path(file).read_bytes(), Path(file).stat()
    except OSError:
        return b""
    # A rename changes ctime, and no mtime.
    if status.st_ctime > process_began() + _GRACE_SECONDS:
        raise CannotSkipError(f"changed source file: {file}")
    return hashlib.sha256(content).digest()


def _is_setting(name: str, value: Any) -> bool:
    kind = type(value)
    is_plain = kind in PLAIN or kind in _CONTAINERS
    whose = origin(kind.__module__)
    is_object = whose == LIBRARY or (whose == PYTHON and kind.__module__ != "builtins" and not callable(value))
    return not name.startswith("__") and (is_plain or is_object)


def _told(settings: dict[str, Any], own: frozenset[str]) -> bytes:
    said = {name: _said(value) for name, value in settings.items()}
    for name, each in said.items():
        if not each:
            _check_held(name, settings[name], own)
    return b"".join(text(name) + tagged(b"S", each) for name, each in said.items())


def _said(value: Any) -> bytes:
    """Return the content of a plain value, or of a container or object that holds nothing else; nothing of others."""
    held = value if type(value) in (*PLAIN, *_CONTAINERS) else getattr(value, "__dict__", None)
    if isinstance(held, _CONTAINERS) and len(held) > _MOST_SETTINGS:
        return b""
    try:
        return marshal.dumps(sorted(held) if isinstance(held, set) else held, _MARSHAL)
    except (TypeError, ValueError):
        return b""


def _check_held(name: str, value: Any, own: frozenset[str], depth: int = 4) -> None:
    """Raise CannotSkipError if a container or object of a library's holds functions or classes of the program's."""
    held = value if type(value) in _CONTAINERS else getattr(value, "__dict__", {})
    for each in (list(held.values()) if isinstance(held, dict) else list(held)) if depth else ():
        is_class = isinstance(each, type) and origin(each.__module__, own) == PROGRAM
        if is_class or any(_is_programs(function, own) for function in _functions_of(each)):
            raise CannotSkipError(f"function of a library replaced: {name}")
        if type(each) in _CONTAINERS:
            _check_held(name, each, own, depth - 1)


def registered_with(kind: type) -> list[type]:
    """Return the classes that somebody has made subclasses of an abstract one, or of a subclass, by a call."""
    # All abstract classes derive from abc.ABC, and nobody asks whether something is one.
    if "_abc_impl" not in namespace(kind) or kind is abc.ABC:
        return []
    found = [each for reference in sys.modules["_abc"]._get_dump(kind)[0] if (each := reference()) is not None]
    # Type's own method: a class may say something else of itself.
    derived: list[type] = type.__subclasses__(kind)
    for each in derived:
        found += registered_with(each)
    return sorted(found, key=type_name)


def _told_registered(abstract: list[type], own: frozenset[str]) -> bytes:
    told = b""
    for kind in abstract:
        for each in registered_with(kind):
            if origin(each.__module__, own) == PROGRAM:
                raise CannotSkipError(f"class with registered subclasses: {type_name(kind)}")
            told += text(f"{type_name(kind)} {type_name(each)}")
    return told


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    kind = type(value)
    if kind is types.FunctionType:
        yield value
    elif kind in _HOLDERS:
        for name in _HOLDERS[kind]:
            yield from _functions_of(getattr(value, name))
    elif not isinstance(value, type) and type(call := getattr(kind, "__call__", None)) is types.FunctionType:  # noqa: B004
        yield call
    if type(inner := getattr(value, "__wrapped__", None)) is types.FunctionType:
        yield inner


def _is_programs(function: types.FunctionType, own: frozenset[str]) -> bool:
    file, package = function.__code__.co_filename, package_of(function.__globals__.get("__name__"))
    if file.startswith("<"):
        return False
    return package in own or (not is_of_jax(package) and origin_of_file(file, package) == PROGRAM)
