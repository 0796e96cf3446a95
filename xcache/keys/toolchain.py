"""The toolchain component: versions, and digests of the compiler's native libraries and tools."""

import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from xcache.clock import process_began
from xcache.descriptors import check_file_size
from xcache.errors import UncacheableError
from xcache.keys import cuda, lines
from xcache.keys.named_files import is_settled
from xcache.wire.protocol import InstalledFile

MEMO = "native-digests.json"
_LARGE_BYTES = 1 << 20
_MAX_MEMO_BYTES = 1 << 20
# A memo with more files than this is rid of those that no longer exist.
_MAX_MEMO_FILES = 256
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
    digests = _Digests(memo)
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


class _Digests:
    """Digests of large files, remembered in a memo until the file's size, inode, mtime or ctime changes."""

    def __init__(self, folder: Path | None) -> None:
        self._memo = None if folder is None else folder / MEMO
        self._known: dict[str, Any] = {}
        self._changed = False
        if self._memo is not None:
            self._known = _read_memo(self._memo)

    def of(self, path: Path, mapped: Callable[[], dict[Path, int]] = dict) -> InstalledFile:
        """Return ``path`` with its digest; raise UncacheableError if it was replaced since this process mapped it."""
        try:
            stat = path.stat()
            _check_in_place(stat, mapped)
            digest = self._remembered(path, stat)
            if digest is None:
                with path.open("rb") as file:
                    stat = os.fstat(file.fileno())
                    _check_in_place(stat, mapped)
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if is_settled(stat):
                    self._known[str(path)] = [*_mark(stat), digest]
                    self._changed = True
        except OSError:
            raise UncacheableError("a native library that cannot be read") from None
        return InstalledFile(str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino, digest)

    def _remembered(self, path: Path, stat: os.stat_result) -> str | None:
        known = self._known.get(str(path))
        return str(known[-1]) if isinstance(known, list) and known[-1] and known[:-1] == _mark(stat) else None

    def save(self) -> None:
        """Write new digests to the memo. Failing to write it only costs time later."""
        if self._memo is None or not self._changed:
            return
        try:
            self._memo.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._memo.parent.stat().st_uid != os.getuid():
                return
            content = json.dumps(self._known)
            check_file_size(len(content))
            handle, name = tempfile.mkstemp(prefix=MEMO, dir=self._memo.parent)
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(content)
                Path(name).replace(self._memo)
            except BaseException:
                # On a full disk every process would leave such a file.
                Path(name).unlink(missing_ok=True)
                raise
        except OSError:
            return


def _check_in_place(stat: os.stat_result, mapped: Callable[[], dict[Path, int]]) -> None:
    """Raise UncacheableError for a library that was replaced since this process mapped it."""
    # Small libraries only load the large one. On a layered file system the inodes may never match, but there the file
    # is older than the process.
    if stat.st_size >= _LARGE_BYTES and stat.st_ctime > process_began() - 1:
        inodes = mapped().values()
        if inodes and stat.st_ino not in inodes:
            raise UncacheableError("a native library was replaced while the program runs")


def _check_no_other_is_mapped(files: Iterable[InstalledFile], mapped: Iterable[Path]) -> None:
    """Raise UncacheableError if the process runs a library from elsewhere in place of one of these files.

    A link to an environment may have been changed, or its folder renamed, after the process mapped the library.
    """
    described = {Path(os.path.realpath(file.path)) for file in files if file.size >= _LARGE_BYTES}
    names = {path.name for path in described}
    if any(path.name in names and path not in described for path in mapped):
        raise UncacheableError("a native library was replaced while the program runs")


def _mark(stat: os.stat_result) -> list[int]:
    """Return the numbers that change when a file does."""
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _read_memo(path: Path) -> dict[str, Any]:
    if not path.is_file():
        # Reading from a pipe would wait for a writer.
        return {}
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            # The memo decides the keys, so only this user may be able to write it.
            if stat.st_uid != os.getuid() or stat.st_mode & 0o022 or stat.st_size > _MAX_MEMO_BYTES:
                return {}
            known = json.load(file)
    except (OSError, ValueError):
        return {}
    return _living(known) if isinstance(known, dict) else {}


def _living(known: dict[str, Any]) -> dict[str, Any]:
    """Forget files that are gone, so that a memo does not grow with every environment there ever was."""
    if len(known) <= _MAX_MEMO_FILES:
        return known
    return {path: mark for path, mark in known.items() if Path(path).exists()}
