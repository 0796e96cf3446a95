"""``xcache.version_of``: a version for ``xcache.jit``, made from source files, installed distributions and a config."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import re
import sys
import types
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

_SOURCE = (".py", ".so", ".pyd")
_IMPORT = re.compile(rb"^[ \t]*(?:from[ \t]+([A-Za-z_]\w*)|import[ \t]+([^#\r\n]+))", re.MULTILINE)


class Version(str):
    """A version for ``xcache.jit``; ``covered`` lists all that it was made from."""

    covered: tuple[str, ...] = ()


def version_of(*modules: types.ModuleType | str, config: Any = None) -> Version:
    """Return a version that changes with the code of these modules and packages, with all they import, and ``config``.

    Local files, also those of an editable installation, count by their content, whole packages at once; an installed
    distribution counts by its name, version and RECORD. Modules that the code imports under a name which it computes
    are not found: list them, too. ``config`` may be a dictionary, a dataclass, or another object of plain values.
    """
    if not modules:
        raise TypeError("version_of needs a module or package")
    from xcache.hook.calls.contents import Contents
    from xcache.hook.structure.encoding import MustLowerError

    contents = Contents()
    try:
        contents.encode(config)
    except MustLowerError as error:
        raise TypeError(f"the config cannot be told by its content: {error}") from None
    covered = {} if config is None else {f"the config ({type(config).__qualname__})": contents.digest()}
    waiting, seen = [_top(module) for module in modules], set()
    if "__main__" in waiting:
        # "python -m package.program" has relative imports.
        waiting.append(_top(getattr(sys.modules["__main__"], "__package__", None) or "__main__"))
    while waiting:
        name = waiting.pop()
        if name in seen or name in sys.stdlib_module_names or name in sys.builtin_module_names:
            continue
        seen.add(name)
        files = _files(name)
        if files is None:
            if name in map(_top, modules):
                raise ValueError(f"there is no source file of {name}")
            continue
        distribution = _distribution(name, files[0])
        if distribution is not None:
            covered[f"{distribution.name} {distribution.version}"] = distribution.read_text("RECORD") or ""
            continue
        digest = hashlib.sha256()
        for file in files:
            content = file.read_bytes()
            digest.update(b"%s\0%d\0" % (_below(file, files[0]).encode(), len(content)))
            digest.update(content)
            if file.suffix == ".py":
                waiting += _imported(content)
        covered[f"{name} ({len(files)} file{'s' * (len(files) != 1)})"] = digest.hexdigest()
    told = sorted(f"{name}\0{digest}" for name, digest in covered.items())
    version = Version(hashlib.sha256("\0\0".join(told).encode()).hexdigest()[:32])
    version.covered = tuple(sorted(covered))
    return version


def _top(module: types.ModuleType | str) -> str:
    name = module if isinstance(module, str) else module.__name__
    return name.partition(".")[0]


def _files(name: str) -> list[Path] | None:
    """Return the source files of a module, or of a whole package with its own first; None if it has none."""
    module = sys.modules.get(name)
    place = getattr(module, "__file__", None)
    folders: Iterable[str] = getattr(module, "__path__", ())
    if module is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            return None
        place, folders = spec.origin, spec.submodule_search_locations or ()
    files = sorted({file for folder in folders for file in _within(Path(folder))})
    if place is not None and Path(place).suffix in _SOURCE:
        files = [Path(place), *(file for file in files if file != Path(place))]
    return files or None


def _within(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(folder).parts)
        if file.suffix in _SOURCE and not hidden and file.is_file():
            yield file


def _below(file: Path, first: Path) -> str:
    """Return a file's name within its package, which is the same in another checkout."""
    return file.relative_to(first.parent).as_posix() if file.is_relative_to(first.parent) else file.name


def _imported(content: bytes) -> Iterator[str]:
    """Yield the names of packages that a source file imports; text that only looks like an import does no harm."""
    for source, names in _IMPORT.findall(content):
        for name in (source,) if source else names.split(b","):
            yield name.strip().split(b".")[0].split(b" ")[0].decode("ascii", "ignore")


def _distribution(name: str, file: Path) -> metadata.Distribution | None:
    """Return the installed distribution that a file belongs to; None for local ones and editable installations."""
    if not any(part in ("site-packages", "dist-packages") for part in file.parts):
        return None
    for distribution in _distributions(name):
        if any(Path(str(distribution.locate_file(each))) == file for each in distribution.files or ()):
            return distribution
    return None


def _distributions(name: str) -> Iterator[metadata.Distribution]:
    """Yield the distributions that may contain a package: first the one of its name, which is found at once."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        yield metadata.distribution(name)
    for other in _providers().get(name, ()):
        yield metadata.distribution(other)


@functools.cache
def _providers() -> Any:
    return metadata.packages_distributions()
