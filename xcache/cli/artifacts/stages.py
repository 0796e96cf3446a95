"""The forms that a program takes on its way to an executable, as text."""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple

from xcache.cli import Failure
from xcache.cli.artifacts import process, recipe
from xcache.cli.artifacts.entry import Entry
from xcache.cli.artifacts.process import Python


class Stage(NamedTuple):
    """How a stage is made: an action of the worker, which passes XLA is to write, and which files are wanted."""

    action: str
    files: str
    passes: str = ""


STAGES = {
    "stablehlo": Stage("stablehlo", r".*\.mlir"),
    "hlo": Stage("hlo", r".*\.hlo\.txt"),
    "optimized": Stage("optimized", r".*\.hlo\.txt"),
    "passes": Stage("compiled", r"(\d{4}\..*|(.*_)?(before|after)_optimizations)\.txt", ".*"),
    "llvm": Stage("compiled", r".*\.ll"),
    "asm": Stage("compiled", r".*\.(s|ptx|sass|o)"),
}
# These need no device, and any jaxlib can make them of a stored program.
_CONVERTED = ("stablehlo", "hlo")
_NUMBER = re.compile(r"\d{4}\.")


class Made(NamedTuple):
    """The files of a stage by name, in their order; the jaxlib that made them; and a remark on that."""

    files: dict[str, bytes]
    jaxlib: str
    remark: str = ""

    def texts(self) -> dict[str, bytes]:
        """Return the files that are texts; raise Failure if there are none."""
        found = {name: content for name, content in self.files.items() if not name.endswith(".o")}
        if not found:
            raise Failure(f"{self.remark}; -o writes them")
        return found


def make(entry: Entry, stage: str, python: str | None) -> Made:
    """Return an entry's program in a stage; ``python`` is to be used instead of the one that wrote the entry."""
    how = STAGES[stage]
    chosen, remark = chosen_python(entry, python, any_jaxlib=stage in _CONVERTED)
    disassembler = ""
    if how.action == "compiled":
        made_with = recipe.rebuilt(entry.components, own=entry.is_own)
        task, environment = of_recipe(
            entry, made_with._replace(options=recipe.with_dumps(made_with.options, how.passes))
        )
        disassembler = "objdump" if stage == "asm" else ""
    else:
        task, environment = ({}, {}) if stage in _CONVERTED else of_loading(entry)
    result = process.run(entry, chosen, how.action, environment=environment, disassembler=disassembler, **task)
    named = {_name(entry, name): content for name, content in result.files.items()}
    files = {name: named[name] for name in sorted(named, key=_order) if re.fullmatch(how.files, name)}
    if not files:
        raise Failure(f"XLA made no {stage} of this program: it may only call libraries")
    if result.found is False:
        remark = "objdump is not installed (Debian: binutils), so there are only object files"
    return Made(files, result.jaxlib, remark)


def chosen_python(entry: Entry, python: str | None, *, any_jaxlib: bool) -> tuple[Python, str]:
    """Return the Python to use, and a remark if it is another one than the entry's."""
    if python is not None:
        return Python(python), ""
    try:
        return process.of_entry(entry), ""
    except Failure as gone:
        if any_jaxlib:
            return Python(sys.executable), f"{gone.message}; the jaxlib of {sys.executable} made this"
        raise Failure(f"{gone.message}; any jaxlib can show stablehlo and hlo, and --python names another") from None


def of_loading(entry: Entry) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the task and environment for loading an entry's executable, without compile options if those are lost."""
    try:
        found = recipe.rebuilt(entry.components, own=entry.is_own)
    except Failure:
        # The executable holds its options, too.
        found = recipe.Recipe(b"", (), {})
    return of_recipe(entry, found)


def of_recipe(entry: Entry, found: recipe.Recipe) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the task and environment for compiling or loading with these settings."""
    client = recipe.client(entry.components)
    task = {
        "options": found.options.hex(),
        "ids": found.devices,
        "devices": client.devices,
        "count": client.used,
    }
    threads = {name: str(client.threads) for name in ("PJRT_NPROC", "NPROC") if client.threads}
    return task, found.environment | threads


def _name(entry: Entry, name: str) -> str:
    """Return a file's name without the number and name of the module."""
    return re.sub(r"module_\d+\.", "", name, count=1).removeprefix(f"{entry.module_name}.")


def _order(name: str) -> tuple[int, str]:
    """Sort the passes between the programs before and after all of them."""
    return (0 if "before_optimizations" in name else 1 if _NUMBER.match(name) else 2), name
