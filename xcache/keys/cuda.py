"""Find the CUDA tools and libraries that XLA may pick while it compiles. Every candidate that exists counts.

XLA tries the folder it was told of, every folder of PATH, the toolkit it was built with, usual places, the wheels
beside it and conda's folders, in this order, and skips versions that do not suit it. This module does not repeat the
choice: all candidates, in their order within each kind of place, are part of the key.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

_TOOL = r"ptxas|nvlink|fatbinary|nvdisasm"
_LIBDEVICE = r"libdevice.*\.bc"
# XLA hands parts of the compile to these libraries, or writes their version into the code.
LIBRARY = r"lib(nvJitLink|nvptxcompiler|nvrtc|nvvm|cudnn\w*|cublas\w*|cuda)\.so[0-9.]*"
_LOADER_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
_VARIABLES = ("CUDA_ROOT", "CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")
_USUAL = ("/usr/local", "/opt")


def candidates(named: Iterable[str], beside: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the existing tools, libdevice files and libraries, by the kind of place where XLA or the loader looks.

    ``named`` are the folders that flags, options and jax name; ``beside`` are libraries that look for others beside
    themselves.
    """
    roots = {
        "named": [Path(folder) for folder in named],
        "variable": [Path(os.environ[name]) for name in _VARIABLES if os.environ.get(name)],
        # A link that is pointed at another toolkit changes the order.
        "usual": [path for folder in _USUAL for path in _entries(Path(folder), "cuda.*")],
        "beside": [path for library in beside for path in _beside(library.parent)],
        "environment": [Path(sys.prefix), *_runfiles()],
    }
    found = {kind: [path for root in places for path in _in_root(root)] for kind, places in roots.items()}
    searched = [Path(folder or ".") for folder in os.environ.get("PATH", os.defpath).split(os.pathsep)]
    found["PATH"] = [path for folder in searched for path in _entries(folder, _TOOL)]
    # XLA looks in the current folder last.
    found["current"] = _entries(Path(), _LIBDEVICE)
    loader = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    found["loader"] = [path for folder in loader for path in _entries(folder, LIBRARY)]
    system = [part for folder in map(Path, _LOADER_FOLDERS) for part in (folder, *_entries(folder, ".*-linux-gnu"))]
    found["system"] = [path for folder in system for path in _entries(folder, LIBRARY)]
    return {kind: _files(paths) for kind, paths in found.items()}


def versions() -> dict[str, object]:
    """Return the versions that jax's CUDA plugin was built with and finds; nothing if it is not loaded."""
    found: dict[str, object] = {}
    for name, module in sys.modules.copy().items():
        if not re.fullmatch(r"jax_cuda\d*_plugin\._versions", name):
            continue
        for function in dir(module):
            # The other functions need a device.
            if re.fullmatch(r"\w+_build_version|(cuda_runtime|cudnn|cublas)_get_version", function):
                try:
                    found[f"{name} {function}"] = getattr(module, function)()
                except Exception as error:  # noqa: BLE001 - a library that is not there has no version
                    found[f"{name} {function}"] = type(error).__name__
    return found


def _in_root(root: Path) -> list[Path]:
    """Return the candidates in one CUDA folder."""
    libraries = [path for name in ("lib", "lib64") for path in _entries(root / name, LIBRARY)]
    return [*_entries(root / "bin", _TOOL), *_entries(root / "nvvm" / "libdevice", _LIBDEVICE), *libraries]


def _beside(folder: Path) -> list[Path]:
    """Return the CUDA folders where a library in ``folder`` looks: its own, the wheels' and conda's environment."""
    wheels = [path for above in (folder.parent, folder.parent.parent) for path in _entries(above / "nvidia", ".*")]
    # The last two are the environment, if the folder is in lib/python3.x/site-packages or one level below.
    return [folder / "cuda", *wheels, *list(folder.parents)[3:5]]


def _runfiles() -> list[Path]:
    """Return the folders where a program packed by Bazel has its CUDA."""
    roots = [Path(f"{sys.executable}.runfiles")] if sys.executable else []
    roots += [Path(os.environ["PYTHON_RUNFILES"])] if os.environ.get("PYTHON_RUNFILES") else []
    return [path for root in roots for path in _entries(root, "cuda_.*|nvidia_.*")]


def _entries(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if re.fullmatch(pattern, path.name))
    except OSError:
        return []


def _files(paths: Iterable[Path]) -> list[Path]:
    """Return the existing files among the paths, each once, with links resolved."""
    found: dict[Path, None] = {}
    for path in paths:
        try:
            if path.is_file():
                found[path.resolve()] = None
        except (OSError, RuntimeError):
            continue
    return list(found)
