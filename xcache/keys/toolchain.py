"""The toolchain component: what compiles. Versions, and digests of the native libraries that are mapped right now."""

import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from xcache.errors import UncacheableError
from xcache.keys import lines

MEMO = "native-digests.json"
# A file changed within this many seconds before it was hashed could change again without its times showing it.
_SETTLED = 2.0
_LARGE = 1 << 20
_PLUGIN = re.compile(r"(libtpu|.*pjrt.*|xla_(cuda|rocm)_plugin)[^/]*\.(so|dylib)[0-9.]*")
# Libraries that XLA:GPU hands parts of the compile to, or whose version it bakes into what it emits.
_GPU_LIBRARY = re.compile(
    r"lib(nvJitLink|nvptxcompiler|nvrtc|nvvm|cudnn\w*|cublas\w*|cuda|amd_comgr\w*|MIOpen)\.so[0-9.]*"
)


class InstalledFile(NamedTuple):
    """A file of a toolchain as it was found, and the digest of its content."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    digest: str


class Toolchain(NamedTuple):
    """What compiles: as sorted lines, and the files it consists of."""

    content: bytes
    files: tuple[InstalledFile, ...]


def describe(platform: str, jaxlib: Path, version: str, memo: Path | None, cuda: Path | None = None) -> Toolchain:
    """The compiler of ``platform``; ``memo`` is a folder where digests are remembered."""
    # It takes longer than all the rest, and on CPU hardly anybody asks.
    mapped = functools.cache(_mapped_files)
    libraries = sorted([*jaxlib.glob("*.so"), *jaxlib.glob("*.dylib")])
    if not libraries:
        raise UncacheableError("jaxlib without a native library")
    if platform != "cpu":
        plugins = [path for path in mapped() if _PLUGIN.fullmatch(path.name)]
        if not plugins:
            raise UncacheableError(f"no native library known for platform {platform}")
        libraries += plugins
    if platform in ("gpu", "cuda", "rocm"):
        libraries += [path for path in mapped() if _GPU_LIBRARY.fullmatch(path.name)]
        libraries += _cuda_tools(cuda)
    facts: dict[str, object] = {"jaxlib": version}
    # By name alone: where it is installed changes no code.
    digests = _Digests(memo)
    files = [digests.of(path, mapped) for path in libraries]
    digests.save()
    for path, file in zip(libraries, files, strict=True):
        known = facts.setdefault(path.name, "")
        facts[path.name] = " ".join(sorted([*str(known).split(), file.digest]))
    return Toolchain(lines(facts), tuple(files))


def _cuda_tools(cuda: Path | None) -> list[Path]:
    """The ptxas, nvlink and libdevice that XLA will run: in the CUDA folder it was told of, else on the path."""
    found = []
    for name in ("ptxas", "nvlink"):
        inside = cuda / "bin" / name if cuda else None
        tool = str(inside) if inside and inside.is_file() else shutil.which(name)
        if tool:
            found.append(Path(tool))
    if cuda:
        found += sorted((cuda / "nvvm" / "libdevice").glob("*.bc"))
    return found


def _mapped_files() -> dict[Path, int]:
    """Files mapped into this process and their inodes; nothing where there is no /proc."""
    try:
        maps = Path("/proc/self/maps").read_text("utf-8", "surrogateescape")
    except OSError:
        return {}
    rows = (line.split(maxsplit=5) for line in maps.splitlines() if ".so" in line)
    inodes = {row[5].removesuffix(" (deleted)"): row[4] for row in rows if len(row) == 6}
    return {Path(name): int(inode) for name, inode in inodes.items()}


@functools.cache
def _started() -> float:
    """When this process began, as file times are counted; never, where that cannot be told."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError):
        return float("inf")


class _Digests:
    """Digests of large files, remembered against everything that shows that a file has changed."""

    def __init__(self, folder: Path | None) -> None:
        self._memo = None if folder is None else folder / MEMO
        self._known: dict[str, Any] = {}
        self._changed = False
        if self._memo is not None:
            self._known = _read_memo(self._memo)

    def of(self, path: Path, mapped: Callable[[], dict[Path, int]]) -> InstalledFile:
        """What ``path`` holds; it must not have been replaced since this process mapped it."""
        try:
            stat = path.stat()
            _check_in_place(stat, mapped)
            digest = self._remembered(path, stat)
            if digest is None:
                with path.open("rb") as file:
                    stat = os.fstat(file.fileno())
                    _check_in_place(stat, mapped)
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if time.time() - max(stat.st_mtime, stat.st_ctime) > _SETTLED:
                    self._known[str(path)] = [*_mark(stat), digest]
                    self._changed = True
        except OSError:
            raise UncacheableError("a native library that cannot be read") from None
        return InstalledFile(str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino, digest)

    def _remembered(self, path: Path, stat: os.stat_result) -> str | None:
        known = self._known.get(str(path))
        return str(known[-1]) if isinstance(known, list) and known[-1] and known[:-1] == _mark(stat) else None

    def save(self) -> None:
        """Write what was learned; a memo that cannot be written is only slower."""
        if self._memo is None or not self._changed:
            return
        try:
            self._memo.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._memo.parent.stat().st_uid != os.getuid():
                return
            handle, name = tempfile.mkstemp(prefix=MEMO, dir=self._memo.parent)
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(self._known, file)
                Path(name).replace(self._memo)
            except BaseException:
                # On a full disk every process would leave one.
                Path(name).unlink(missing_ok=True)
                raise
        except OSError:
            return


def _check_in_place(stat: os.stat_result, mapped: Callable[[], dict[Path, int]]) -> None:
    """UncacheableError for what has been replaced since this process mapped it."""
    # Small ones only lead to the large one. That no inode matches proves nothing on layered file systems, but then the
    # file is older than the process.
    if stat.st_size >= _LARGE and stat.st_ctime > _started() - 1:
        inodes = mapped().values()
        if inodes and stat.st_ino not in inodes:
            raise UncacheableError("a native library was replaced while the program runs")


def _mark(stat: os.stat_result) -> list[int]:
    """What shows that a file has changed."""
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _read_memo(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            # Whoever can write this file decides what the keys are.
            if stat.st_uid != os.getuid() or stat.st_mode & 0o022 or stat.st_size > 1 << 20:
                return {}
            known = json.load(file)
    except (OSError, ValueError):
        return {}
    return _living(known) if isinstance(known, dict) else {}


def _living(known: dict[str, Any]) -> dict[str, Any]:
    """Forget files that are gone, so that the memo does not grow with every environment there ever was."""
    return {path: mark for path, mark in known.items() if Path(path).exists()} if len(known) > 256 else known
