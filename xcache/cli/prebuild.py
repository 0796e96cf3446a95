"""``xcache prebuild``: compile what calls of a function will need, of which a file lists the shapes."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import click

from xcache.cli import Failure, WrongUsage
from xcache.cli.building import Tally, dask_option, progress, workers_option
from xcache.cli.output import json_option, printable
from xcache.config import config
from xcache.errors import XcacheError
from xcache.wire.bounded import parsed_json, parsed_toml, text_of

_ARRAY = re.compile(r"([a-z][a-z0-9_]*)\[\s*((?:\d+\s*(?:,\s*\d+\s*)*)?)\]")
# As jax prints types, and the ledger of a run has them.
_SHORT = {"f": "float", "bf": "bfloat", "i": "int", "s": "int", "u": "uint", "c": "complex"}


@click.command()
@click.argument("function", metavar="MODULE:FUNCTION")
@click.option(
    "--spec",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    required=True,
    help="The calls, as TOML (FILE ends in .toml) or JSON.",
)
@workers_option
@dask_option
@json_option
def prebuild(function: str, file: Path, workers: int | None, dask: str | None, as_json: bool) -> None:
    """Compile what calls of a jitted function will need, several at once, and run none.

    The module is imported as `python -m` would find it, from the current folder too. FILE lists the calls; arrays are
    written as "float32[8,128]" or "f32[8,128]", lists and tables hold further ones, and everything else stands for
    itself:

    \b
      [[calls]]
      arguments = [{w = "float32[128,128]", b = "float32[128]"}, "float32[8,128]"]
      keywords = {train = false}

    Programs that only the function's own process can compile, such as those with Python callbacks, are compiled in
    this one. xcache.prebuild() does the same from Python, with shardings too.

    \b
    JSON: {"calls": int, "here": int (compiled in this process), "built": int, "there": int,
           "compile_seconds": float, "failed": [{"reason": str, "entries": [{"key": str, "module_name": str}]}],
           "left_out": [] (always)}
    """
    config.load()
    if not re.fullmatch(r"[^:]+:[^:]+", function):
        raise WrongUsage(f"{function!r} is not of the form MODULE:FUNCTION")
    calls = _calls(file)
    jitted = _function(function)
    from xcache.hook import enable
    from xcache.warming.building import workers_of
    from xcache.warming.prebuilding import as_call, prebuilt
    from xcache.warming.process import this_python

    try:
        handle = enable(on_miss="allow")
    except XcacheError as error:
        raise Failure(f"the cache cannot be used with the jax of this Python: {error}") from None
    tally = Tally(("here", "built", "there"), calls=len(calls))
    with handle, contextlib.closing(workers_of(this_python(), dask)) as processes, tally.shown(as_json):
        described = [(as_call(_read(call["arguments"]))[0], _read(call["keywords"])) for call in calls]
        with progress("compiling", len(described)) as advance:
            try:
                for done in prebuilt(handle, jitted, described, processes, workers):
                    tally.add_named(done.kind, done.key, done.module_name, done.reason, done.compile_seconds)
                    advance()
            except (TypeError, ValueError) as error:
                reason = str(error).strip().partition("\n")[0]
                raise Failure(f"jax cannot trace a call of {printable(function)}: {printable(reason)}") from None
    if tally.failed:
        raise SystemExit(1)


def _function(named: str) -> Any:
    """Import a function; raise Failure if it is none that jax has jitted."""
    module, _, path = named.partition(":")
    sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise Failure(f"{module} cannot be imported: {error}") from None
    try:
        for name in path.split("."):
            found = getattr(found, name)
    except AttributeError:
        raise Failure(f"{module} has no {path}") from None
    if not hasattr(found, "lower"):
        raise Failure(f"{named} is not a jitted function: jax.jit makes one")
    return found


# Of a file of calls.
_MOST_BYTES = 64 * 1024**2


def _calls(file: Path) -> list[dict[str, Any]]:
    """Return the calls in a file; raise Failure if it is of another form."""
    try:
        content = text_of(file, _MOST_BYTES)
        document = (parsed_toml if file.suffix == ".toml" else parsed_json)(content, _MOST_BYTES)
    except OSError as error:
        raise Failure(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        kind = "TOML" if file.suffix == ".toml" else "JSON"
        raise Failure(f"{file} is not {kind}: {error}") from None
    calls = document.get("calls") if isinstance(document, dict) else None
    if not isinstance(calls, list) or not calls:
        raise Failure(f"{file} lists no calls; `xcache prebuild --help` shows its form")
    return [_call(file, number, call) for number, call in enumerate(calls, 1)]


def _call(file: Path, number: int, call: Any) -> dict[str, Any]:
    if isinstance(call, dict) and call.keys() <= {"arguments", "keywords"}:
        arguments, keywords = call.get("arguments", []), call.get("keywords", {})
        if isinstance(arguments, list) and isinstance(keywords, dict):
            return {"arguments": arguments, "keywords": keywords}
    raise Failure(f"call {number} in {file} is not {{arguments = [...], keywords = {{...}}}}")


def _read(value: Any) -> Any:
    """Return an argument, with a ShapeDtypeStruct for each array in it."""
    if isinstance(value, dict):
        return {name: _read(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_read(each) for each in value]
    if not isinstance(value, str) or not (found := _ARRAY.fullmatch(value.strip())):
        return value
    import jax

    name, shape = found[1], tuple(int(size) for size in found[2].split(",") if size.strip())
    short = re.fullmatch(r"(bf|f|i|s|u|c)(\d+)", name)
    try:
        dtype = jax.numpy.dtype(f"{_SHORT[short[1]]}{short[2]}" if short else name)
    except TypeError:
        raise Failure(f"{printable(value)}: jax knows no type {printable(name)}") from None
    return jax.ShapeDtypeStruct(shape, dtype)
