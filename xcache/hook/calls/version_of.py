"""``xcache.version_of``: a version for ``xcache.jit``, made from the files of modules and packages, and a config."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_CODE = (".py", ".so", ".pyc")


class Version(str):
    """A version for ``xcache.jit``; ``covered`` lists all that it was made from."""

    covered: tuple[str, ...] = ()


def version_of(*modules: types.ModuleType | str, config: Any = None) -> Version:
    """Return a version that changes with the files of these modules, each with its whole package, and with ``config``.

    Other modules need not be named: all that a function uses of them counts by itself (docs/how-to/skip-tracing.md).
    ``config`` may be a dictionary, a dataclass, or another object of plain values.
    """
    if not modules:
        raise TypeError("version_of needs a module or package")
    names = {_top_package(module if isinstance(module, str) else module.__name__) for module in modules}
    if "__main__" in names:
        # A program run with "python -m" is of a package.
        names.add(_top_package(getattr(sys.modules["__main__"], "__package__", None) or "__main__"))
    covered = {} if config is None else {f"the config ({type(config).__qualname__})": _content_of(config)}
    for name in names:
        files = sorted({file for place in _places(name) for file in _within(place)})
        if not files:
            raise ValueError(f"there is no source file of {name}")
        covered[f"{name} ({len(files)} file{'s' * (len(files) != 1)})"] = _digest(files)
    lines = sorted(f"{label}\0{digest}" for label, digest in covered.items())
    version = Version(hashlib.sha256("\0\0".join(lines).encode()).hexdigest()[:32])
    version.covered = tuple(sorted(covered))
    return version


def _top_package(name: str) -> str:
    return name.partition(".")[0]


def _content_of(config: Any) -> str:
    from xcache.hook.calls.program_values import ProgramEncoding
    from xcache.hook.structure.encoding import CannotSkipError

    encoding = ProgramEncoding()
    try:
        encoding.encode(config)
        return encoding.digest()
    except CannotSkipError as error:
        raise TypeError(f"config holds a value that cannot be described: {error}") from None


def _places(name: str) -> list[Path]:
    """Return the folders of a package, or the file of a module; nothing if it has none."""
    module = sys.modules.get(name)
    place: str | None = getattr(module, "__file__", None)
    folders: Iterable[str] = getattr(module, "__path__", ())
    if module is None:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            if spec is not None:
                place, folders = spec.origin, spec.submodule_search_locations or ()
    return [Path(each) for each in folders or ((place,) if place else ())]


def _within(place: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of code in a folder, each with its name in there, which is the same in another checkout."""
    if not place.is_dir():
        # The file itself, or the archive that it is in.
        yield from ((place.name, each) for each in (place, *place.parents) if each.is_file())
    walked = set()
    for folder, folders, files in os.walk(place, followlinks=True):
        real = os.path.realpath(folder)
        # A link may lead back up.
        folders[:] = [] if real in walked else [name for name in folders if not _is_hidden(name)]
        walked.add(real)
        for name in files:
            if name.endswith(_CODE) and not _is_hidden(name):
                file = Path(folder, name)
                yield file.relative_to(place).as_posix(), file


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, file in files:
        content = file.read_bytes()
        digest.update(b"%s\0%d\0" % (name.encode(), len(content)))
        digest.update(content)
    return digest.hexdigest()
