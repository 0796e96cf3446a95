"""The compiler that is installed beside this command, without loading it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from xcache.errors import UncacheableError
from xcache.keys import Component, toolchain


def cpu_toolchain(memo: Path) -> str | None:
    """Return the digest of the toolchain for the CPU that programs of this Python have; None if it has no jaxlib.

    ``memo`` is the folder where the digests of its files are remembered.
    """
    found = importlib.util.find_spec("jaxlib")
    if found is None or not found.submodule_search_locations:
        return None
    try:
        version = importlib.metadata.version("jaxlib")
        made = toolchain.describe("cpu", Path(found.submodule_search_locations[0]), version, memo)
    except (importlib.metadata.PackageNotFoundError, UncacheableError, OSError):
        return None
    return Component("toolchain", made.content).digest
