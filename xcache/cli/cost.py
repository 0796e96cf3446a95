"""``xcache cost``: what XLA knows of the cost of an executable."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from xcache.cli import Failure
from xcache.cli.artifacts import process, stages
from xcache.cli.artifacts.entry import Entry, read
from xcache.cli.completion import complete_key
from xcache.cli.hlo import python_option
from xcache.cli.output import emit, json_option, print_facts, size
from xcache.config import config
from xcache.wire.bounded import parsed_json, text_of

# In the folder of this user's own files, by the digest of the executable.
_FILE = "costs.json"
_MOST_KEPT, _MOST_BYTES = 1000, 16 * 1024**2
_ANALYSIS = {"flops": "flops", "transcendentals": "transcendentals", "bytes_accessed": "bytes accessed"}
_MEMORY = {
    "argument_bytes": "argument_size_in_bytes",
    "output_bytes": "output_size_in_bytes",
    "aliased_bytes": "alias_size_in_bytes",
    "temporary_bytes": "temp_size_in_bytes",
    "code_bytes": "generated_code_size_in_bytes",
}


@click.command()
@click.argument("wanted", metavar="KEY", shell_complete=complete_key)
@python_option
@json_option
def cost(wanted: str, python: str | None, as_json: bool) -> None:
    """Show the operations and the memory that an executable needs.

    KEY is as in `xcache show`. XLA counts the body of a loop once, however often it runs. The executable is loaded as
    by `xcache hlo`, and what was found is kept.

    \b
    JSON: {"key": str, "module_name": str, "jaxlib_version": str, "flops": float or null,
           "transcendentals": float or null, "bytes_accessed": float or null, "argument_bytes": int,
           "output_bytes": int, "aliased_bytes": int (results that take the place of arguments),
           "temporary_bytes": int, "code_bytes": int (0 on CPU), "computed_at": float}
    """
    settings = config.load()
    entry = read(settings, wanted, with_executable=False)
    file = settings.own_dir / _FILE
    found = _kept(file).get(entry.blob)
    if found is None:
        found = _computed(read(settings, entry.key, with_executable=True), python)
        _keep(file, entry.blob, found)
    document = {"key": entry.key, "module_name": entry.module_name, "jaxlib_version": entry.jaxlib} | found
    if as_json:
        emit(document)
    else:
        _print(document)


def _computed(entry: Entry, python: str | None) -> dict[str, Any]:
    chosen, _ = stages.chosen_python(entry, python, any_jaxlib=False)
    task, environment = stages.of_loading(entry)
    result = process.run(entry, chosen, "cost", environment=environment, **task).found
    try:
        # XLA leaves out what is zero.
        analysis = result["analysis"]
        found = {name: float(analysis.get(named, 0)) if analysis else None for name, named in _ANALYSIS.items()}
        sizes = {name: int(result["memory"][named]) for name, named in _MEMORY.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Failure("jaxlib says nothing of the cost of this executable") from None
    return found | sizes | {"computed_at": time.time()}


def _kept(file: Path) -> dict[str, Any]:
    try:
        found = parsed_json(text_of(file, _MOST_BYTES), _MOST_BYTES) if file.stat().st_uid == os.getuid() else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(file: Path, blob: str, found: dict[str, Any]) -> None:
    """Add what was found to the file; the oldest go. Failing to write it only costs time later."""
    rows = {**_kept(file), blob: found}
    content = json.dumps(dict(list(rows.items())[-_MOST_KEPT:]))
    with contextlib.suppress(OSError):
        if file.parent.stat().st_uid != os.getuid():
            return
        handle, name = tempfile.mkstemp(prefix=_FILE, dir=file.parent)
        try:
            with os.fdopen(handle, "w") as made:
                made.write(content)
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _print(document: dict[str, Any]) -> None:
    flops, moved = document["flops"], document["bytes_accessed"]
    facts = [
        ("key", document["key"]),
        ("module", document["module_name"]),
        ("operations", _count(flops, "flops")),
        ("transcendentals", _count(document["transcendentals"], "calls of exp, tanh and such")),
        ("bytes accessed", "not known" if moved is None else size(moved)),
        ("intensity", f"{flops / moved:.2f} flops per byte accessed" if flops and moved else "not known"),
        ("arguments", size(document["argument_bytes"])),
        ("outputs", size(document["output_bytes"])),
        ("of these shared", size(document["aliased_bytes"])),
        ("temporaries", size(document["temporary_bytes"])),
        ("generated code", size(document["code_bytes"]) if document["code_bytes"] else "not known"),
    ]
    print_facts(facts)


def _count(number: float | None, what: str) -> str:
    return "not known" if number is None else f"{number:,.0f} {what}"
