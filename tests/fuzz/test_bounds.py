"""Each reader of foreign bytes refuses what would take much memory, and there are no other readers."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys

from support import bombs
from support.places import REPOSITORY

# They read what the kernel, root, the administrator or this package has written, or what a child of theirs prints that
# runs this package's code.
TRUSTED = {
    "xcache.cli.account",
    "xcache.cli.compiler_here",
    "xcache.cli.option_lines",
    "xcache.cli.report.page",
    "xcache.cli.service",
    "xcache.cli.trial",
    "xcache.cli.units",
    "xcache.client.launcher",
    "xcache.warming.worker",
    "xcached.requests.lease_holders",
    "xcached.requests.process_ends",
    "xcached.requests.trust",
    "xcached.tiers.aws_files",
    "xcached.tiers.bundle",
    "xcached.toolchains.toolchains",
}
# They read contents whose size is known from a row or a message that was checked before.
SIZED = {"xcache.cli.daemon_listing", "xcache.cli.exporting", "xcache.cli.store_file", "xcached.store.histories"}
# They translate the reader's exception.
TRANSLATING = {"xcache.cli.programs"}
# Its own tests have its bombs, because it imports jax.
OF_JAX = {"xcache.hook.calls.record_format"}
# A program's own files and the kernel's: whoever can write them has the program.
OF_THE_PROGRAM = ("xcache.hook", "xcache.keys")
# It runs without xcache.
APART = {"xcache.cli.artifacts.worker"}
TO_THE_END = {"read_text", "read_bytes", "readline", "readlines", "readall", "recvfrom"}
SIZES = {"read", "recv", "recvmsg", "readexactly"}


def test_no_reader_takes_more_memory_than_it_may():
    tried = subprocess.run(
        [sys.executable, "-m", "support.bombs"], cwd=REPOSITORY / "tests", capture_output=True, text=True
    )
    assert json.loads(tried.stdout or '{"it": "crashed"}') == {}, tried.stderr


def test_every_module_that_reads_is_tried():
    reading = {name for name, tree in modules() if any(map(imports_the_reader, ast.walk(tree)))}
    tried = bombs.BOMBS.keys() - {"xcache.wire.bounded"}
    # Shapes are stated where the kinds of objects are, and used by signed_header.
    shapes = {"xcache.wire.parcel", "xcache.wire.runs"}
    assert reading == tried | shapes | TRUSTED | SIZED | TRANSLATING | OF_JAX


def test_nothing_is_read_to_its_end_elsewhere():
    found = [
        f"{name}:{node.lineno}"
        for name, tree in modules()
        if not name.startswith(OF_THE_PROGRAM) and name not in APART | {"xcache.wire.bounded"}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in TO_THE_END or (node.func.attr in SIZES and not node.args and not node.keywords)
    ]
    assert found == []


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    found = []
    for root, package in ((REPOSITORY, "xcache"), (REPOSITORY / "daemon", "xcached")):
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            found.append((name.removesuffix(".__init__"), ast.parse(path.read_text())))
    return found


def imports_the_reader(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and (
        node.module == "xcache.wire.bounded"
        or (node.module == "xcache.wire" and any(each.name == "bounded" for each in node.names))
    )
