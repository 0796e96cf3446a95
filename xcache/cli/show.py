"""``xcache show``: one entry, with every component of its key."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Any, BinaryIO

import click

from xcache.cli import daemon, option_lines, store_file
from xcache.cli.completion import complete_key
from xcache.cli.output import (
    duration,
    emit,
    json_option,
    moment,
    note,
    print_facts,
    print_line,
    print_text,
    printable,
    refuse_terminal,
    size,
)
from xcache.cli.programs import NOT_HERE, as_text, bytecode, is_here
from xcache.cli.selection import full_key
from xcache.cli.writers import writer_name
from xcache.config import config
from xcache.wire.ownership import is_signer

_SUFFIX = "_component"
_STDOUT = ("-", "<stdout>")
# Columns for eviction, which mean nothing to users.
_INTERNAL = ("used_order", "uses", "used_time", "worth")
# A description with more lines than this is wrapped into paragraphs on a terminal.
_MAX_LINES = 30


@click.command()
@click.argument("wanted", metavar="KEY", shell_complete=complete_key)
@click.option("--program", is_flag=True, help="Print the program it was compiled from, as MLIR text. Needs jaxlib.")
@click.option(
    "--program-bytes",
    type=click.File("wb", lazy=True),
    metavar="FILE",
    help="Write the program to a file, as MLIR bytecode; - for stdout.",
)
@json_option
def show(wanted: str, program: bool, program_bytes: BinaryIO | None, as_json: bool) -> None:
    """Show everything about one entry.

    KEY may be shortened to four digits, or be a part of the name of a module that fits only one entry.

    \b
    JSON: {"key": str, "module_name": str, "platform": str, "device_kind": str, "jaxlib_version": str,
           "blob": str, "file": str or null (inside the database), "codec": str, "raw_size": int,
           "stored_size": int, "compile_seconds": float, "created_at": float, "last_used_at": float, "hits": int,
           "writer_uid": int, "writer_pid": int, "writer_program": str, "pinned": bool,
           "stale": bool (not served: its toolchain is no longer installed anywhere),
           "footprint": int (with its program), "program": {"digest": str, "writer_uid": int, "raw_size": int,
           "stored_size": int, "codec": str, "blob": str},
           "components": {NAME: {"digest": str, "description": str or null,
           "named": [str] or null (the lines of the description, with the names of XLA's options)}}}
    """
    if program + (program_bytes is not None) + as_json > 1:
        raise click.UsageError("--program, --program-bytes and --json exclude each other")
    settings = config.load()
    daemon.flush(settings)
    with store_file.open_store(settings) as store:
        key = full_key(store, wanted)
        assert store is not None  # noqa: S101 - full_key() fails without one
        entry = _collect(store, key)
        content = bytecode(store, entry["program"]) if program or program_bytes is not None else b""
    # Printed after the store is closed: a pager that stays open must not keep the daemon from its checkpoints.
    if program:
        print_text(as_text(content).removesuffix("\n"))
    elif program_bytes is not None:
        if program_bytes.name in _STDOUT:
            refuse_terminal()
        program_bytes.write(content)
        if program_bytes.name not in _STDOUT:
            note(f"{len(content)} bytes written to {program_bytes.name}")
    elif as_json:
        emit(entry)
    else:
        _print(entry)


def _collect(store: store_file.StoreReader, key: str) -> dict[str, Any]:
    """Return an entry's row with its program, file and components in place of their digests."""
    entry = store.entry(key)
    components = {
        name.removesuffix(_SUFFIX): _component(name.removesuffix(_SUFFIX), digest, store.description(digest))
        for name, digest in entry.items()
        if name.endswith(_SUFFIX)
    }
    plain = {name: value for name, value in entry.items() if not name.endswith(_SUFFIX) and name not in _INTERNAL}
    plain["pinned"] = bool(entry.get("pinned"))
    plain["stale"] = store.is_stale(entry["toolchain_component"])
    file = store.file_of(entry["blob"])
    program = store.program(entry["program"], entry["writer_uid"])
    return plain | {"file": file and str(file), "program": program, "components": components}


def _component(name: str, digest: str, description: str | None) -> dict[str, Any]:
    lines = None if description is None else description.split("\n") if description else []
    named = lines if name != "options" or lines is None else [option_lines.named(line) for line in lines]
    return {"digest": digest, "description": description, "named": named}


def _print(entry: dict[str, Any]) -> None:
    program = entry["program"]
    print_facts(
        [
            ("key", entry["key"]),
            ("module", entry["module_name"]),
            ("platform", ", ".join(dict.fromkeys((entry["platform"], entry["device_kind"])))),
            ("jaxlib", entry["jaxlib_version"]),
            ("executable", _sizes(entry)),
            ("digest", entry["blob"]),
            ("kept in", entry["file"] or "the database"),
            ("compile time", duration(entry["compile_seconds"])),
            ("hits", str(entry["hits"])),
            *([("pinned", "stays whatever the limits say")] if entry["pinned"] else []),
            *(
                [("stale", "not served: its toolchain is no longer installed (xcache toolchains)")]
                if entry["stale"]
                else []
            ),
            ("created", moment(entry["created_at"])),
            ("last used", moment(entry["last_used_at"])),
            ("written by", _writer(entry)),
            ("program", program["digest"]),
            ("", f"{_sizes(program)}; --program prints it" if is_here(program) else NOT_HERE),
            *((name, part["digest"]) for name, part in entry["components"].items()),
        ]
    )
    # The shortest first: compile options have hundreds of lines.
    for name, part in sorted(entry["components"].items(), key=lambda row: len(row[1]["description"] or "")):
        print_line()
        print_line(name, bold=True)
        _print_lines(part["named"])


def _writer(entry: dict[str, Any]) -> str:
    if is_signer(entry["writer_uid"]):
        return f"{entry['writer_program']}; {_vouched(entry['writer_uid'])}"
    return f"{entry['writer_program']} (process {entry['writer_pid']}, uid {entry['writer_uid']})"


def _vouched(signer: int) -> str:
    name = writer_name(signer)
    return f"unsigned, from {name}" if name.startswith("tier ") else f"signed by {name}"


def _sizes(row: dict[str, Any]) -> str:
    return f"{size(row['raw_size'])}, stored as {size(row['stored_size'])} ({row['codec']})"


def _print_lines(found: list[str] | None) -> None:
    if not found:
        print_line("  no description was kept" if found is None else "  none")
        return
    lines = [printable(line) for line in found]
    if len(lines) > _MAX_LINES and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 2
        # No break within an option.
        text = "  ".join(line.replace(" ", "\N{NO-BREAK SPACE}") for line in lines)
        wrapped = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        lines = [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrapped]
    for line in lines:
        print_line(f"  {line}")
