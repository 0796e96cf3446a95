"""``xcache bundle``: look into a file that ``xcache export`` made."""

from __future__ import annotations

import time
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from xcache.cli import Group
from xcache.cli.bundle_file import NOBODY, Object, namespace_of, objects, opened, tell_problems
from xcache.cli.key_files import Keys
from xcache.cli.output import (
    Column,
    counted,
    duration,
    emit,
    json_option,
    note,
    print_facts,
    print_line,
    print_table,
    progress,
    size,
)
from xcache.cli.selection import SHORT_KEY
from xcache.config import config
from xcache.wire import parcel
from xcache.wire.trusted_keys import TrustedKeys

_COLUMNS = (
    Column("key", lambda row: row["key"][:SHORT_KEY]),
    Column("module", itemgetter("module_name"), cut=True),
    Column("platform", itemgetter("platform")),
    Column("jaxlib", itemgetter("jaxlib_version")),
    Column("size", lambda row: size(row["stored_size"]), "right"),
    Column("compile", lambda row: duration(row["compile_seconds"]), "right"),
    Column("made by", itemgetter("writer"), cut=True),
)
_file_argument = click.argument("path", metavar="FILE", type=click.Path(path_type=Path))


@click.group(cls=Group, short_help="Look into a file of entries that xcache export made.")
def bundle() -> None:
    """Look into a file of entries that xcache export made. Nothing is imported, and no daemon is needed."""


@bundle.command()
@_file_argument
@json_option
def inspect(path: Path, as_json: bool) -> None:
    """Show what is in a bundle: entries, the programs that want them, and how many objects are damaged.

    Signatures are not checked; see verify.

    \b
    JSON: {"file": str, "bytes": int, "namespace": str, "signers": [str (the id of a key; "" for unsigned)],
           "entries": [{"key": str, "module_name": str, "platform": str, "device_kind": str,
           "jaxlib_version": str, "toolchain": str, "stored_size": int, "compile_seconds": float,
           "stored_at": float, "writer": str, "has_program": bool}],
           "programs": [{"program": str, "keys": [str]}], "damaged": int}
    """
    settings = config.load()
    entries: list[dict[str, Any]] = []
    programs: list[dict[str, Any]] = []
    signers: set[str] = set()
    damaged: list[Object] = []
    with opened(path) as file:
        namespace, total = namespace_of(file), file.status.st_size
        for each in objects(file, NOBODY, trust_unsigned=True):
            signers.add(each.signer)
            if each.entry is not None:
                entries.append(_described(each.entry))
            elif each.history is not None:
                keys = [item["key"] for item in each.history.items]
                programs.append({"program": each.history.program, "keys": keys})
            else:
                damaged.append(each._replace(content=b""))
    document = {"file": str(path), "bytes": total, "namespace": namespace, "signers": sorted(signers)}
    if as_json:
        emit(document | {"entries": entries, "programs": programs, "damaged": len(damaged)})
        return
    known = {key.public.id: key.public.name for key in TrustedKeys.load(settings.trusted_keys).keys}
    named = [known.get(each, f"the key {each}, not known here") if each else "nobody" for each in sorted(signers)]
    rows = [
        ("file", f"{path}, {size(total)}"),
        ("namespace", namespace or "none"),
        ("entries", str(len(entries))),
        ("programs", ", ".join(sorted({each["program"] for each in programs})) or "none"),
        ("signed by", ", ".join(named) + " (as it says; xcache bundle verify checks)" * bool(named)),
    ]
    if damaged:
        rows.append(("damaged", f"{counted(len(damaged), 'object')}, so that xcache import takes nothing of it"))
    print_facts(rows)
    if entries:
        print_line()
        print_table(_COLUMNS, entries)
    tell_problems(damaged, settings)


def _described(entry: parcel.Parcel) -> dict[str, Any]:
    put = entry.put
    names = "key", "module_name", "platform", "device_kind", "jaxlib_version", "stored_size", "compile_seconds"
    return {name: getattr(put, name) for name in names} | {
        "toolchain": put.components["toolchain"],
        "stored_at": entry.stored_at,
        "writer": entry.writer,
        "has_program": entry.program is not None,
    }


@bundle.command()
@_file_argument
@json_option
def verify(path: Path, as_json: bool) -> None:
    """Check every byte of a bundle, and that this machine's own key, or keys which are trusted here, signed all of it.

    A machine vouches for what it signed itself. It loads that from elsewhere only if its own key is trusted as well.
    Damage is found in a file that nobody has signed, too, and is said first.

    \b
    JSON: {"file": str, "objects": int, "problems": [{"name": str, "problem": str,
           "is_damaged": bool (false: only its signature is missing or not trusted)}]}

    Exit status 1 if anything is wrong, also if all bytes are as they were written and nobody has signed them.
    """
    settings = config.load()
    keys = Keys(settings)
    wrong: list[Object] = []
    signers: set[str] = set()
    with opened(path) as file:
        trusted, total = keys.trusted_or_own(), sum(1 for _ in file.names())
        with progress(total, "checking") as advance:
            for each in objects(file, trusted, trust_unsigned=False):
                signers.add(each.signer)
                if each.problem:
                    wrong.append(each._replace(content=b""))
                advance(1)
    untrusted = not all(keys.trusted.public(signer, time.time()) for signer in signers)
    if as_json:
        problems = [{name: getattr(each, name) for name in ("name", "problem", "is_damaged")} for each in wrong]
        emit({"file": str(path), "objects": total, "problems": problems})
    elif not wrong:
        whose = "this machine's own key" if untrusted else "keys that are trusted here"
        print_line(f"{counted(total, 'object')}: all are whole, and signed by {whose}")
        if untrusted:
            note(f"this machine itself loads none of it before its key is trusted: xcache key trust '{keys.signer()}'")
    elif not any(each.is_damaged for each in wrong):
        print_line(f"{counted(total, 'object')}: every byte is as it was written")
    if tell_problems(wrong, settings):
        click.get_current_context().exit(1)
