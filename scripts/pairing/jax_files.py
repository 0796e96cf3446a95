"""Copies of jax whose files are edited, before a program starts or while it runs. No installed file is touched."""

from __future__ import annotations

import os
import py_compile
import shutil
import time
from pathlib import Path

import jax

_LOWERING = "_src/interpreters/mlir.py"
_DIRECTION = "hlo.ComparisonDirectionAttr.get(direction)"
# Each state of the files: the file, a text in it, and what stands there instead. All change a use of "v < 1".
EDITS = {
    "pristine": (_LOWERING, _DIRECTION, _DIRECTION),
    "NE": (_LOWERING, _DIRECTION, "hlo.ComparisonDirectionAttr.get({'LT': 'NE'}.get(direction, direction))"),
    "EQ": (_LOWERING, _DIRECTION, "hlo.ComparisonDirectionAttr.get({'LT': 'EQ'}.get(direction, direction))"),
}


class Overlay:
    """Copies of jax for one worker, at one path for all programs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._current = root / "current"

    def prepared(self, state: str) -> dict[str, str]:
        """Have jax's files in a state, "EDIT" or "EDIT, MANNER"; return the environment of a program that uses them."""
        edit, _, manner = state.partition(", ")
        folder = {"": edit, "in place": "edited", "with its times": "edited", "compiled": f"compiled {edit}"}[manner]
        made = self._root / folder
        if not made.exists():
            self._copy(made)
        if manner == "":
            _write(made, edit)
        elif manner == "compiled":
            _compile(made, edit)
        else:
            _write(made, edit, keeps_times=manner == "with its times")
        link = self._root / "next"
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
        link.rename(self._current)
        # The program begins later than its files, by the clock of both.
        time.sleep(0.05)
        return {"PYTHONPATH": str(self._current), "PAIRS_OVERLAY": str(self._current)}

    def _copy(self, to: Path) -> None:
        # With its times, so that the compiled files fit; those of other Pythons and of tests are not needed.
        source = Path(jax.__file__).parent
        shutil.copytree(source, to / "jax", ignore=shutil.ignore_patterns("tools", "pallas_test*"), symlinks=True)


def _write(root: Path, edit: str, *, keeps_times: bool = False) -> None:
    file, text, instead = EDITS[edit]
    path = root / "jax" / file
    now = path.read_text()
    wanted = (Path(jax.__file__).parent / file).read_text().replace(text, instead)
    if now == wanted:
        return
    status = path.stat()
    if keeps_times:
        # Python takes a file of the same size and time for the one that it has compiled.
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()
    path.write_text(wanted)
    if keeps_times:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _compile(root: Path, edit: str) -> None:
    """Have a compiled file that is used whatever its source says, as a distribution of software may have it."""
    file, text, instead = EDITS[edit]
    path = root / "jax" / file
    original = path.read_text()
    if text not in original:
        return
    compiled = next(path.parent.glob(f"__pycache__/{path.stem}.*.pyc"), None)
    target = compiled or Path(py_compile.compile(str(path)))
    edited = root / path.name
    edited.write_text(original.replace(text, instead))
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(edited), str(target), str(path), invalidation_mode=mode, doraise=True)
    edited.unlink()
