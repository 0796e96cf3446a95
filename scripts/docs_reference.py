"""The generated sections of the reference, made from the code itself; a page asks for one by its name in SECTIONS."""

from __future__ import annotations

import importlib
import inspect
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import click
import sqlite_utils

import xcache
from xcache import errors
from xcache.cli import main
from xcache.cli.config import spelled
from xcache.config.table import SETTINGS
from xcache.wire import protocol
from xcache.wire.ledger import CAUSES
from xcached.store import schema
from xcached.store.tables import MEANINGS

_NUMBERED = re.compile(r"([A-Z][A-Z_]+) = ")
_SCALAR = str(protocol.Scalar)
_QUOTED = re.compile(r"(: |-> )'([^']*)'")


def all_commands(command: click.Command = main, parent: click.Context | None = None) -> Iterator[click.Context]:
    """Yield the context of each command, from the top down."""
    name = command.name if parent else "xcache"
    context = click.Context(command, info_name=name, parent=parent, **command.context_settings)
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, name
            yield from all_commands(inner, context)


def commands() -> str:
    """Return every command with its usage, help and options; its JSON shape is in a section of its own."""
    parts = []
    for context in all_commands():
        usage = " ".join([context.command_path, *context.command.collect_usage_pieces(context)])
        parts += [f"## {context.command_path}", fenced(usage)]
        parts += [text for text, is_shape in help_of(context.command) if not is_shape]
        records = [parameter.get_help_record(context) for parameter in context.command.get_params(context)]
        parts += ["Options:", "\n".join(f"* `{record[0]}`: {record[1]}" for record in records if record)]
        if isinstance(context.command, click.Group):
            described = (context.command.get_command(context, n) for n in context.command.list_commands(context))
            listed = "\n".join(f"* `{one.name}`: {one.get_short_help_str(200)}" for one in described if one)
            parts += ["Commands:", listed]
    return joined(parts)


def json() -> str:
    """Return the shape of each command's JSON, as its help states it."""
    parts = []
    for context in all_commands():
        shapes = [text for text, is_shape in help_of(context.command) if is_shape]
        if shapes:
            parts += [f"## {context.command_path}", *shapes]
    return joined(parts)


def help_of(command: click.Command) -> Iterator[tuple[str, bool]]:
    """Yield the paragraphs of a command's help, each with whether it is a JSON shape."""
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        for part in re.split(r"\n(?=\x08\n)", paragraph):
            as_written = part.startswith("\b\n")
            part = part.removeprefix("\b\n")
            yield fenced(part) if as_written else part, part.startswith("JSON")


def settings() -> str:
    """Return a table of every setting."""
    rows = ["| setting | variable | default | used by | meaning | value |", "|---|---|---|---|---|---|"]
    for one in SETTINGS:
        value = " ".join(one.default) if isinstance(one.default, tuple) else one.default
        default = "" if value in (None, "") else f"`{spelled(one.kind, value)}`"
        rows.append(f"| `{one.name}` | `{one.variable}` | {default} | {one.used_by} | {one.meaning} | {one.allowed} |")
    return "\n".join(rows)


def causes() -> str:
    """Return a table of every cause of a miss."""
    rows = ["| cause | it means |", "|---|---|"]
    return "\n".join([*rows, *(f"| {cause} | {meaning} |" for cause, meaning in CAUSES.items())])


def python() -> str:
    """Return every public name of the package, with the methods and fields of its classes."""
    parts = []
    for name in sorted(xcache.__all__):
        thing = getattr(xcache, name)
        if callable(thing):
            parts += [f"## xcache.{name}", *described(f"xcache.{name}", thing)]
    return joined([*parts, "## xcache.\\_\\_version\\_\\_", "The version, as text."])


def described(name: str, thing: Any) -> Iterator[str]:
    """Yield the signature and the docstring of a function or class, and then those of its public methods."""
    # enable() makes handles, so nobody needs the signature of their class; nobody makes an exception, either.
    if thing not in (xcache.Handle, xcache.CompileInGuardError):
        yield fenced(signature(name, thing), "python")
    yield inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        for method, function in inspect.getmembers(thing, inspect.isfunction):
            if not method.startswith("_"):
                yield f"### {name}.{method}"
                yield from described(method, function)


def exceptions() -> str:
    """Return the tree of exceptions, with each one's meaning."""

    def branch(kind: type[Exception], depth: int) -> Iterator[str]:
        yield f"{'    ' * depth}* `{kind.__name__}`: {in_one_line(kind)}"
        for child in kind.__subclasses__():
            if child.__module__ == errors.__name__:
                yield from branch(child, depth + 1)

    return "\n".join(branch(errors.XcacheError, 0))


def messages() -> str:
    """Return every message of the protocol with its fields."""
    parts = []
    for message in get_args(protocol.Message):
        parts += [f"### {message.__name__}", fenced(signature(message.__name__, message), "python")]
        parts.append(inspect.getdoc(message) or "")
    return joined(parts)


def direct() -> str:
    """Return how to use the cache without JAX's frontend, as the module says it."""
    return introduction(importlib.import_module("xcache.direct"))


def framing() -> str:
    """Return how frames and contents are written, as the modules say it."""
    envelope = importlib.import_module("xcache.wire.envelope")
    return joined([introduction(protocol), "## Stored executables", introduction(envelope)])


def limits() -> str:
    """Return the protocol's numbers, each with the comment that stands above it."""
    rows = ["| name | value | meaning |", "|---|---:|---|"]
    comment: list[str] = []
    for line in Path(protocol.__file__).read_text("utf-8").splitlines():
        found = _NUMBERED.match(line)
        if found and type(value := getattr(protocol, found[1])) is int:
            rows.append(f"| `{found[1]}` | {value:,} | {' '.join(comment)} |")
        comment = [*comment, line[2:]] if line.startswith("# ") else []
    return "\n".join(rows)


def tables() -> str:
    """Return every table that the migrations make, with its columns and indexes."""
    connection = sqlite3.connect(":memory:")
    database = sqlite_utils.Database(connection)
    schema.migrations.apply(database)
    parts = []
    for table in sorted(database.tables, key=lambda table: table.name):
        if table.name.startswith(("_", "sqlite_")):
            continue
        to = {key.column: f"`{key.other_table}.{key.other_column}`" for key in table.foreign_keys if key.column}
        rows = ["| column | type | |", "|---|---|---|"]
        for column in table.columns:
            facts = ["primary key"] * bool(column.is_pk) + ["not null"] * bool(column.notnull)
            facts += [f"refers to {to[column.name]}"] if column.name in to else []
            rows.append(f"| `{column.name}` | {column.type} | {', '.join(facts)} |")
        parts += [f"## {table.name}", MEANINGS[table.name], "\n".join(rows)]
        own = [index for index in table.indexes if index.origin == "c"]
        if own:
            parts.append("Indexes: " + "; ".join(f"`{', '.join(index.columns)}`" for index in own) + ".")
    connection.close()
    return joined(parts)


def signature(name: str, thing: Any) -> str:
    """Return the signature, with one parameter a line if it is long."""
    found = inspect.signature(thing)
    text = name + plain(str(found))
    if len(text) <= 100:
        return text
    inside = ",\n    ".join(plain(str(one)) for one in found.parameters.values())
    return f"{name}(\n    {inside},\n)"


def plain(text: str) -> str:
    """Return a part of a signature without the quotes around annotations, and with Scalar by its name."""
    return _QUOTED.sub(r"\1\2", text).replace(_SCALAR, "Scalar")


def introduction(module: ModuleType) -> str:
    """Return a module's docstring."""
    return inspect.cleandoc(module.__doc__ or "")


def in_one_line(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split())


def fenced(text: str, language: str = "text") -> str:
    return f"```{language}\n{text}\n```"


def joined(parts: list[str]) -> str:
    return "\n\n".join(part for part in parts if part)


SECTIONS: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (commands, json, settings, causes, python, direct, exceptions, framing, limits, messages, tables)
}
