"""ARCHITECTURE.md names files that exist, the layers that are checked, and every thread and lock there is."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIDES = (ROOT / "xcache", ROOT / "daemon" / "xcached")
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
ROWS = [line for line in TEXT.splitlines() if line.startswith("|")]
SHARED = {"Lock", "RLock", "Condition", "Event"}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for side in SIDES:
        for path in sorted(side.rglob("*.py")):
            yield str(path.relative_to(side)), ast.parse(path.read_text())


def called(node: ast.AST) -> str:
    """Return the last name of a call's function: ``Lock`` for ``threading.Lock()``."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def primitives() -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each lock, condition, event and thread's own object."""
    for module, tree in sources():
        local = {
            node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and "threading.local" in bases(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and called(node.value) in SHARED | local and not is_of_asyncio(node.value):
                yield from ((module, getattr(target, "attr", getattr(target, "id", ""))) for target in node.targets)


def bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base) for base in node.bases]


def is_of_asyncio(node: ast.AST) -> bool:
    return ast.unparse(node).startswith("asyncio.")


def thread_names() -> Iterator[str]:
    for _, tree in sources():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.keyword)
                and node.arg == "name"
                and ast.unparse(node.value).strip("f'").startswith(("xcache-", "xcached-"))
            ):
                yield ast.unparse(node.value).strip("f'").split("{")[0].rstrip("-")


def test_every_lock_is_in_a_table():
    found = set(primitives())
    assert len(found) > 20
    listed = {(path, name) for row in ROWS for path in re.findall(r"`([\w/]+\.py)`", row) for name in found_in(row)}
    assert not {
        (module, name)
        for module, name in found
        if not any((path, name) in listed for path in (module, f"xcache/{module}", f"daemon/xcached/{module}"))
    }


def found_in(row: str) -> list[str]:
    return re.findall(r"`(\w+)`", row)


def test_every_thread_is_in_a_table():
    found = set(thread_names())
    assert len(found) > 7
    assert not {name for name in found if not any(f"`{name}" in row for row in ROWS)}


def test_every_file_exists():
    # The page says why there is no compile.py.
    named = set(re.findall(r"`([\w/]+\.py)`", TEXT)) - {"compile.py"}
    assert not {name for name in named if not any((side / name).is_file() for side in (*SIDES, ROOT))}


def test_the_layers_are_those_that_lint_checks():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    drawn = re.findall(r"^    (xcached?\.[\w.]+(?: \| [\w.]+)*)", TEXT, re.MULTILINE)
    assert sorted(drawn) == sorted(layer for contract in contracts for layer in contract.get("layers", ()))
    for contract in contracts:
        layers = contract.get("layers", [])
        assert [layer for layer in drawn if layer in layers] == layers
