"""The compiler that a Python of this machine has, and whether it is the one that a lock file names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from xcache.cli import WrongUsage
from xcache.cli.output import printable
from xcache.errors import UncacheableError
from xcache.keys import toolchain
from xcache.lock_file import Made
from xcache.wire.bounded import SMALL_FILE, parsed_json
from xcache.wire.hashing import digest

_SECONDS = 60
# It starts no device, and imports nothing that is slow.
_PROGRAM = """
import json
try:
    import jaxlib
except ImportError:
    print("null")
else:
    print(json.dumps([jaxlib.__version__, jaxlib.__file__]))
"""


class Compiler(NamedTuple):
    """The jaxlib of an interpreter."""

    python: str
    jaxlib: str
    folder: Path

    def toolchain(self, memo: Path) -> str | None:
        """Return the digest of its toolchain for the CPU; None if it cannot be told.

        ``memo`` is a folder where digests of files are remembered.
        """
        try:
            return digest(toolchain.describe("cpu", self.folder, self.jaxlib, memo).content)
        except (UncacheableError, OSError):
            return None


def of_python(named: str | None) -> Compiler | None:
    """Return the compiler of the Python that was named, else of the one that runs this; None if that has none."""
    python = named or sys.executable
    try:
        said = subprocess.run(
            [python, "-c", _PROGRAM], capture_output=True, text=True, timeout=_SECONDS, check=True
        ).stdout
        found = parsed_json(said.splitlines()[-1], SMALL_FILE)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        raise WrongUsage(f"{printable(python)} is no Python that runs here") from None
    if found is not None:
        return Compiler(python, found[0], Path(found[1]).parent)
    if named:
        raise WrongUsage(f"{printable(python)} has no jaxlib")
    return None


def differs(made: Made, here: Compiler, memo: Path) -> bool | None:
    """Return whether programs are made with another compiler than the one here; None if that cannot be told."""
    if made.jaxlib != here.jaxlib:
        return True
    if made.platform != "cpu":
        # Which plugin and tools a program takes shows only once it has the device.
        return None
    found = here.toolchain(memo)
    return None if found is None else found != made.toolchain
