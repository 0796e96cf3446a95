"""The toolchain component: versions, and digests of the compiler's native libraries and tools."""

import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from xcache.errors import UncacheableError
from xcache.keys import cuda, lines
from xcache.keys.file_digests import LARGE_BYTES, FileDigests
from xcache.wire.protocol import InstalledFile

_PLUGIN = re.compile(r"(libtpu|.*pjrt.*|xla_cuda_plugin)[^/]*\.(so|dylib)[0-9.]*")
_GPU_LIBRARY = re.compile(cuda.LIBRARY)


class Toolchain(NamedTuple):
    """The compiler: its description as sorted lines, and its files."""

    content: bytes
    files: tuple[InstalledFile, ...]
    # XLA runs these at each compile, so replacing one makes another toolchain at once.
    tools: tuple[InstalledFile, ...] = ()

    def is_in_place(self) -> bool:
        """Return whether the tools are still the files that were described."""
        return all(_is_in_place(file) for file in self.tools)


def describe(
    platform: str, jaxlib: Path, version: str, memo: Path | None, cuda_folders: Iterable[str] = ()
) -> Toolchain:
    """Describe the compiler of ``platform``; ``memo`` is a folder where digests are remembered."""
    mapped = functools.cache(_mapped_files)
    libraries = sorted([*jaxlib.glob("*.so"), *jaxlib.glob("*.dylib")])
    if not libraries:
        raise UncacheableError("jaxlib without a native library")
    plugins: list[Path] = []
    if platform != "cpu":
        plugins = [path for path in mapped() if _PLUGIN.fullmatch(path.name)]
        if not plugins:
            raise UncacheableError(f"no native library known for platform {platform}")
    digests = FileDigests(memo)
    # Files count by name and content; the folder they are installed in changes no code.
    facts: dict[str, object] = {"jaxlib": version}
    files = [digests.of(path, mapped) for path in (*libraries, *plugins)]
    tools: list[InstalledFile] = []
    if platform in ("gpu", "cuda"):
        files += [digests.of(path, mapped) for path in mapped() if _GPU_LIBRARY.fullmatch(path.name)]
        facts |= cuda.versions()
        for kind, paths in cuda.candidates(cuda_folders, [*plugins, *libraries[:1]]).items():
            for path in paths:
                file = digests.of(path)
                # Their order counts, because XLA takes the first that suits it.
                name = f"{kind} {path.name}"
                facts[name] = f"{facts.get(name, '')} {file.digest}".strip()
                tools.append(file)
    digests.save()
    _check_no_other_is_mapped(files, mapped())
    for file in files:
        known = facts.setdefault(name := Path(file.path).name, "")
        facts[name] = " ".join(sorted({*str(known).split(), file.digest}))
    return Toolchain(lines(facts), tuple(dict.fromkeys([*files, *tools])), tuple(tools))


def _is_in_place(file: InstalledFile) -> bool:
    try:
        found = Path(file.path).stat()
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns, found.st_ino) == (file.size, file.mtime_ns, file.inode)


def _mapped_files() -> dict[Path, int]:
    """Return the files mapped into this process with their inodes, or nothing without /proc."""
    try:
        maps = Path("/proc/self/maps").read_text("utf-8", "surrogateescape")
    except OSError:
        return {}
    rows = (line.split(maxsplit=5) for line in maps.splitlines() if ".so" in line)
    inodes = {row[5].removesuffix(" (deleted)"): row[4] for row in rows if len(row) == 6}
    return {Path(name): int(inode) for name, inode in inodes.items()}


def _check_no_other_is_mapped(files: Iterable[InstalledFile], mapped: Iterable[Path]) -> None:
    """Raise UncacheableError if the process runs a library from elsewhere in place of one of these files.

    A link to an environment may have been changed, or its folder renamed, after the process mapped the library.
    """
    described = {Path(os.path.realpath(file.path)) for file in files if file.size >= LARGE_BYTES}
    names = {path.name for path in described}
    if any(path.name in names and path not in described for path in mapped):
        raise UncacheableError("a native library was replaced while the program runs")
