"""``xcache.version_of``: a version for ``xcache.jit``, made from source files, installed distributions and a config."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
import types
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

_CODE = (".py", ".so", ".pyc")
# At the beginning of any statement, or by name; text that only looks like an import does no harm.
_IMPORT = re.compile(
    r"(?:^|[;:])[ \t\f]*(?:from[ \t\f]+([^\W\d]\w*)[\w.]*[ \t\f]+import\b|import[ \t\f]+([^\W\d][\w., \t\f]*))"
    r"|(?:\bimport_module|\b__import__)\s*\(\s*(?:name\s*=\s*)?[rbfu]?['\"]{1,3}([^\W\d]\w*)",
    re.MULTILINE,
)
# importlib.metadata parses a distribution's whole description for each field, which takes milliseconds.
_FIELD = re.compile(r"^(Name|Version):[ \t]*(\S+)", re.MULTILINE)
_REQUIRED = re.compile(r"^Requires-Dist:[ \t]*([A-Za-z0-9._-]+)", re.MULTILINE)
_INSTALLED = ("site-packages", "dist-packages")
_STANDARD = tuple(f"{Path(sysconfig.get_path(name)).resolve()}/" for name in ("stdlib", "platstdlib"))


class Version(str):
    """A version for ``xcache.jit``; ``covered`` lists all that it was made from."""

    covered: tuple[str, ...] = ()


def version_of(*modules: types.ModuleType | str, config: Any = None) -> Version:
    """Return a version that changes with the code of these modules and packages, with all they import, and ``config``.

    Local files, also those of an editable installation, count by their content, whole packages at once; an installed
    distribution counts by its name, version and RECORD, and so do all that it requires. Also pass the modules that your
    code imports by computed names: they are not found. ``config`` may be a dictionary, a dataclass, or another object
    of plain values.
    """
    if not modules:
        raise TypeError("version_of needs a module or package")
    covered = {} if config is None else {f"the config ({type(config).__qualname__})": _content_of(config)}
    named = [_top_package(module) for module in modules]
    if "__main__" in named:
        # A program run with "python -m" imports from its package.
        named.append(_top_package(getattr(sys.modules["__main__"], "__package__", None) or "__main__"))
    # Tracing does not depend on xcache, which the program imports for this.
    waiting, seen = list(named), {"xcache"} - {*named}
    required, installed = set[str](), _installed_names()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        found = list(_cover(name))
        if not found and name in named and name not in sys.stdlib_module_names:
            raise ValueError(f"there is no source file of {name}")
        while found:
            part = found.pop()
            if part.label not in covered:
                covered[part.label] = part.digest
                waiting += part.imports
                missing = (part.requires & installed) - required
                found += _cover_distributions(missing)
                required |= missing
    lines = sorted(f"{label}\0{digest}" for label, digest in covered.items())
    version = Version(hashlib.sha256("\0\0".join(lines).encode()).hexdigest()[:32])
    version.covered = tuple(sorted(covered))
    return version


class _Covered(NamedTuple):
    """Local code or an installed distribution that counts: its name, the digest of its content, and what it uses."""

    label: str
    digest: str
    imports: tuple[str, ...] = ()
    requires: frozenset[str] = frozenset()


def _content_of(config: Any) -> str:
    from xcache.hook.calls.program_values import ProgramEncoding
    from xcache.hook.structure.encoding import CannotSkipError

    encoding = ProgramEncoding()
    try:
        encoding.encode(config)
    except CannotSkipError as error:
        raise TypeError(f"config holds a value that cannot be described: {error}") from None
    return encoding.digest()


def _cover(name: str) -> Iterator[_Covered]:
    """Yield what counts of a package; nothing if it is Python's own, or has no file."""
    source = _source(name)
    if source is None or _is_standard(source.places[0]):
        return
    local = []
    # Each folder of a namespace package may be of another distribution, or local.
    for place in source.places:
        distributions = list(_distributions_at(name, place))
        yield from map(_cover_distribution, distributions)
        if not distributions:
            local.append(place)
    if local:
        yield _cover_files(name, local)


def _cover_files(name: str, places: list[Path]) -> _Covered:
    imports: list[str] = []
    digest, files = hashlib.sha256(), _code_at(places)
    for file in files:
        content = _archive(file).read_bytes()
        digest.update(b"%s\0%d\0" % (_relative_name(file, places[0]).encode(), len(content)))
        digest.update(content)
        if file.suffix == ".py":
            imports += _imported(content if file.is_file() else _read_in_archive(file))
    label = f"{name} ({len(files)} file{'s' * (len(files) != 1)})"
    return _Covered(label, digest.hexdigest(), tuple(dict.fromkeys(imports)))


def _installed_names() -> frozenset[str]:
    """Return the normal names of all installed distributions: a search for one that is not installed is slow."""
    names: set[str] = set()
    for folder in map(Path, sys.path):
        with contextlib.suppress(OSError, zipfile.BadZipFile):
            if folder.is_dir():
                names |= {file.name for file in folder.iterdir()}
            else:
                with zipfile.ZipFile(folder) as archive:
                    names |= {name.partition("/")[0] for name in archive.namelist()}
    return frozenset(_normal(name.partition("-")[0]) for name in names if name.endswith((".dist-info", ".egg-info")))


def _normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def _cover_distributions(names: Iterable[str]) -> Iterator[_Covered]:
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield _cover_distribution(metadata.distribution(name))


def _cover_distribution(distribution: metadata.Distribution) -> _Covered:
    """Return what counts of an installed distribution; the files of one that is editable are its imports.

    It may use all that it requires and that is installed, also for its extras.
    """
    # A description follows the first empty line.
    header = (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "").partition("\n\n")[0]
    field = dict(_FIELD.findall(header))
    digest = hashlib.sha256(_record_of(distribution).encode()).hexdigest()
    named: list[str] = []
    if '"editable": true' in (distribution.read_text("direct_url.json") or ""):
        named = (distribution.read_text("top_level.txt") or field["Name"].replace("-", "_")).split()
    label = f"{field['Name']} {field['Version']}"
    return _Covered(label, digest, tuple(named), frozenset(map(_normal, _REQUIRED.findall(header))))


def _is_standard(file: Path) -> bool:
    place = str(file.resolve())
    return place.startswith(_STANDARD) and not any(f"/{name}/" in place for name in _INSTALLED)


def _archive(file: Path) -> Path:
    """Return a file, or the archive in which it is."""
    return next((each for each in (file, *file.parents) if each.is_file()), file)


def _read_in_archive(file: Path) -> bytes:
    """Return a file's content from the archive in which it is; nothing if it cannot be read."""
    archive = _archive(file)
    try:
        with zipfile.ZipFile(archive) as opened:
            return opened.read(file.relative_to(archive).as_posix())
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return b""


def _top_package(module: types.ModuleType | str) -> str:
    name = module if isinstance(module, str) else module.__name__
    return name.partition(".")[0]


class _Source(NamedTuple):
    """The places of a module or package: its own file, if it has one, and the folders of a package."""

    file: Path | None
    folders: tuple[Path, ...]

    @property
    def places(self) -> list[Path]:
        """The file, which stands for its folder if it has one, and all other folders."""
        if self.file is None:
            return list(self.folders)
        return [self.file, *(folder for folder in self.folders if folder != self.file.parent)]


def _source(name: str) -> _Source | None:
    """Return where a module or package is; None if it has no file of code."""
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
    file = Path(place) if place is not None and Path(place).suffix in _CODE else None
    source = _Source(file, tuple(map(Path, folders)))
    return source if source.places else None


def _code_at(places: Iterable[Path]) -> list[Path]:
    """Return all files of code, a module's own first."""
    own = [place for place in places if place.is_file() or place.suffix in _CODE]
    folders = [place.parent if place.stem == "__init__" else place for place in places]
    return [*own, *sorted({file for folder in folders for file in _within(folder)} - {*own})]


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
    top = first.parent
    return file.relative_to(top).as_posix() if file.is_relative_to(top) else file.name


def _imported(content: bytes) -> Iterator[str]:
    """Yield the names of packages that a source file imports."""
    source = re.sub(r"\r\n?", "\n", content.decode("utf-8-sig", "replace")).replace("\\\n", " ")
    for package, names, named in _IMPORT.findall(source):
        for name in (package or named,) if package or named else names.split(","):
            yield name.strip().split(".")[0].partition(" ")[0].partition("\t")[0]


def _distributions_at(name: str, place: Path) -> Iterator[metadata.Distribution]:
    """Yield the installed distributions that a file or folder belongs to; none for local and editable ones."""
    folder = next((each for each in place.parents if each.name in _INSTALLED), None)
    if folder is None:
        return
    listed = f"\n{place.relative_to(folder).as_posix()}"
    is_folder = place.is_dir()
    for distribution in _distributions(name, folder):
        record = f"\n{_record_of(distribution)}"
        if f"{listed}," in record or f"{listed}/" in record:
            yield distribution
            if not is_folder:
                return


def _distributions(name: str, folder: Path) -> Iterator[metadata.Distribution]:
    """Yield the distributions in a folder that may contain a package, one of its name first."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        yield metadata.distribution(name)
    yield from metadata.distributions(path=[str(folder)])


def _record_of(distribution: metadata.Distribution) -> str:
    return distribution.read_text("RECORD") or ""
