"""``xcache.version_of``: a version for ``xcache.jit``, made from source files, installed distributions and a config."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

_CODE = (".py", ".so", ".pyc")
# Wherever it stands in a line; text that only looks like an import does no harm.
_IMPORT = re.compile(r"(?<![\w.])(?:from[ \t\f]+([^\W\d]\w*)|import[ \t\f]+([^\W\d][\w., \t\f]*))")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_STANDARD = tuple(f"{Path(sysconfig.get_path(name)).resolve()}/" for name in ("stdlib", "platstdlib"))


class Version(str):
    """A version for ``xcache.jit``; ``covered`` lists all that it was made from."""

    covered: tuple[str, ...] = ()


def version_of(*modules: types.ModuleType | str, config: Any = None) -> Version:
    """Return a version that changes with the code of these modules and packages, with all they import, and ``config``.

    Local files, also those of an editable installation, count by their content, whole packages at once; an installed
    distribution counts by its name, version and RECORD. List modules whose names the code computes, because they are
    not found. ``config`` may be a dictionary, a dataclass, or another object of plain values.
    """
    if not modules:
        raise TypeError("version_of needs a module or package")
    covered = {} if config is None else {f"the config ({type(config).__qualname__})": _content_of(config)}
    named = [_top_package(module) for module in modules]
    if "__main__" in named:
        # A program run with "python -m" imports from its package.
        named.append(_top_package(getattr(sys.modules["__main__"], "__package__", None) or "__main__"))
    waiting, seen = list(named), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        found = _cover(name)
        if found is None and name in named and name not in sys.stdlib_module_names:
            raise ValueError(f"there is no source file of {name}")
        if found is not None:
            covered[found.label] = found.digest
            waiting += found.imports
    lines = sorted(f"{label}\0{digest}" for label, digest in covered.items())
    version = Version(hashlib.sha256("\0\0".join(lines).encode()).hexdigest()[:32])
    version.covered = tuple(sorted(covered))
    return version


class _Covered(NamedTuple):
    """One package that counts: how it is called, the digest of its content, and what it imports."""

    label: str
    digest: str
    imports: tuple[str, ...] = ()


def _content_of(config: Any) -> str:
    from xcache.hook.calls.contents import Contents
    from xcache.hook.structure.encoding import CannotSkipError

    contents = Contents()
    try:
        contents.encode(config)
    except CannotSkipError as error:
        raise TypeError(f"config holds a value that cannot be described: {error}") from None
    return contents.digest()


def _cover(name: str) -> _Covered | None:
    """Return what counts of a package; None if it is Python's own, or has no file."""
    files = _files(name)
    if not files or _is_standard(files[0]):
        return None
    distribution = _distribution(name, files[0])
    if distribution is not None:
        return _Covered(f"{distribution.name} {distribution.version}", distribution.read_text("RECORD") or "")
    imports: list[str] = []
    digest = hashlib.sha256()
    for file in files:
        content = _archive(file).read_bytes()
        digest.update(b"%s\0%d\0" % (_relative_name(file, files[0]).encode(), len(content)))
        digest.update(content)
        if file.suffix == ".py" and file.is_file():
            imports += _imported(content)
    label = f"{name} ({len(files)} file{'s' * (len(files) != 1)})"
    return _Covered(label, digest.hexdigest(), tuple(dict.fromkeys(imports)))


def _is_standard(file: Path) -> bool:
    place = str(file.resolve())
    return place.startswith(_STANDARD) and not any(part in place for part in _INSTALLED)


def _archive(file: Path) -> Path:
    """Return a file, or the archive in which it is."""
    return next((each for each in (file, *file.parents) if each.is_file()), file)


def _top_package(module: types.ModuleType | str) -> str:
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
    if place is not None and Path(place).suffix in _CODE:
        files = [Path(place), *(file for file in files if file != Path(place))]
    return files or None


def _within(folder: Path) -> Iterator[Path]:
    walked = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        # A link may lead back up.
        folders[:] = [] if real in walked else [name for name in folders if not _is_hidden(name)]
        walked.add(real)
        yield from (Path(place, name) for name in files if name.endswith(_CODE) and not _is_hidden(name))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _relative_name(file: Path, first: Path) -> str:
    """Return a file's name within its package, which is the same in another checkout."""
    return file.relative_to(first.parent).as_posix() if file.is_relative_to(first.parent) else file.name


def _imported(content: bytes) -> Iterator[str]:
    """Yield the names of packages that a source file imports."""
    source = content.decode("utf-8", "replace").replace("\r\n", "\n").replace("\\\n", " ")
    for package, names in _IMPORT.findall(source):
        for name in (package,) if package else names.split(","):
            yield name.strip().split(".")[0].split(" ")[0]


def _distribution(name: str, file: Path) -> metadata.Distribution | None:
    """Return the installed distribution that a file belongs to; None for local ones and editable installations."""
    if not any(part in str(file) for part in _INSTALLED):
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
