"""The programs that tests run, each a file in ``tests/programs``."""

from __future__ import annotations

from pathlib import Path

from support.places import TESTS


def program_path(name: str) -> Path:
    """Return the file of a program, for those that run it as a script."""
    return TESTS / "programs" / f"{name}.py"


def program_text(name: str) -> str:
    """Return the text of a program, for those that run it with ``-c`` or put code before it or after it."""
    return program_path(name).read_text("utf-8")
