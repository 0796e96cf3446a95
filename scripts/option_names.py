#!/usr/bin/env python3
"""Writes the names of XLA's compile options by field number, for `xcache show` and `xcache why`.

    scripts/option_names.py 0.6.2 0.8.3 0.10.2 0.12.0

The arguments are versions of jaxlib, the oldest first; their wheels are downloaded with pip. The shared libraries in a
wheel hold the descriptions of XLA's protocol buffers. The number of a field never gets another meaning, so the fields
of all versions go into one table, and a field that was renamed has its newest name.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from xcache.keys.protobuf import fields, varint

TABLE = Path(__file__).parent.parent / "xcache" / "cli" / "option_names.json"
# Numbers in google/protobuf/descriptor.proto: the fields of a file, a message, an enumeration, and a field.
_PACKAGE, _MESSAGES, _ENUMS = 2, 4, 5
_NAME, _FIELDS, _INNER_MESSAGES, _INNER_ENUMS, _VALUES = 1, 2, 3, 4, 2
_FIELD_NUMBER, _FIELD_LABEL, _FIELD_TYPE, _FIELD_TYPE_NAME = 3, 4, 5, 6
_REPEATED, _TEXT, _MESSAGE, _BYTES = 3, 9, 11, 12
_OF_A_FILE = frozenset((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14))
_BEGINNING = re.compile(rb"\x0a([\x01-\x7f])((?:xla|tensorflow|tsl)/[a-z0-9_/]*\.proto)\x12")
_ROOT = ".xla.CompileOptionsProto"
# How a value is written, by FieldDescriptorProto.Type. None of the compile options has one of the other types.
_KINDS = {
    1: "double",
    2: "float",
    3: "int64",
    4: "uint64",
    5: "int32",
    8: "bool",
    _TEXT: "text",
    _BYTES: "bytes",
    13: "uint32",
    14: "enum",
}

Table = dict[str, dict[str, list[str]]]


def main(arguments: list[str]) -> None:
    """Write the table."""
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit(__doc__)
    messages: dict[str, dict[int, list[str]]] = {}
    enums: dict[str, dict[int, str]] = {}
    for version in arguments:
        files = [file for library in libraries(version) for file in descriptors(library)]
        if not files:
            raise SystemExit(f"no descriptions of protocol buffers in jaxlib {version}")
        for file in files:
            read_file(file, messages, enums)
    wanted, waiting = {}, [_ROOT]
    while waiting:
        name = waiting.pop()
        if name in wanted or name not in messages:
            continue
        wanted[name] = {str(number): messages[name][number] for number in sorted(messages[name])}
        waiting += [field[2] for field in messages[name].values() if len(field) > 2 and field[1] == "message"]
    used = {field[2] for message in wanted.values() for field in message.values() if len(field) > 2}
    values = {
        name: {str(number): enums[name][number] for number in sorted(enums[name])} for name in sorted(used & set(enums))
    }
    TABLE.write_text(json.dumps({"messages": dict(sorted(wanted.items())), "enums": values}, indent=1) + "\n")
    print(f"{TABLE}: {len(wanted)} messages, {sum(map(len, wanted.values()))} fields")


def libraries(version: str) -> Iterator[bytes]:
    """Yield the shared libraries in the wheel of a jaxlib."""
    with tempfile.TemporaryDirectory() as folder:
        # Python 3.12 is the one with wheels of all supported versions; it need not be here.
        wanted = ["--no-deps", "--only-binary", ":all:", "--python-version", "3.12", f"jaxlib=={version}"]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "-d", folder, *wanted], check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            for name in sorted(wheel.namelist()):
                if name.endswith(".so"):
                    yield wheel.read(name)


def descriptors(library: bytes) -> Iterator[bytes]:
    """Yield the serialized file descriptors in a library."""
    for found in _BEGINNING.finditer(library):
        if found[1][0] == len(found[2]):
            yield library[found.start() : end_of_file(library, found.start())]


def end_of_file(library: bytes, begin: int) -> int:
    """Return where the fields of a file's description end."""
    at = begin
    while True:
        tag, after = varint(library, at)
        number, kind = tag >> 3, tag & 7
        if number not in _OF_A_FILE or (number == 1 and at != begin) or kind not in (0, 2):
            return at
        size, after = varint(library, after)
        at = after if kind == 0 else after + size


def read_file(file: bytes, messages: dict[str, dict[int, list[str]]], enums: dict[str, dict[int, str]]) -> None:
    """Add the messages and enumerations of a file."""
    parts = list(fields(file))
    package = next((as_text(value) for number, value in parts if number == _PACKAGE), "")
    for number, value in parts:
        if number == _MESSAGES:
            read_message(value, f".{package}", messages, enums)
        elif number == _ENUMS:
            read_enum(value, f".{package}", enums)


def read_message(
    message: object, prefix: str, messages: dict[str, dict[int, list[str]]], enums: dict[str, dict[int, str]]
) -> None:
    """Add a message and those within it."""
    assert isinstance(message, bytes)
    parts = list(fields(message))
    name = f"{prefix}.{as_text(next(value for number, value in parts if number == _NAME))}"
    known = messages.setdefault(name, {})
    for number, value in parts:
        if number == _FIELDS:
            assert isinstance(value, bytes)
            field = dict(fields(value))
            kind = field.get(_FIELD_TYPE)
            named = as_text(field[_FIELD_TYPE_NAME]) if _FIELD_TYPE_NAME in field else ""
            type_of = "message" if kind == _MESSAGE else _KINDS.get(int(str(kind)), "")
            is_packed = field.get(_FIELD_LABEL) == _REPEATED and kind not in (_TEXT, _MESSAGE, _BYTES)
            described = [as_text(field[_NAME]), f"packed {type_of}" if is_packed else type_of]
            known[int(str(field[_FIELD_NUMBER]))] = [*described, named] if named else described
        elif number == _INNER_MESSAGES:
            read_message(value, name, messages, enums)
        elif number == _INNER_ENUMS:
            read_enum(value, name, enums)


def read_enum(enum: object, prefix: str, enums: dict[str, dict[int, str]]) -> None:
    """Add an enumeration."""
    assert isinstance(enum, bytes)
    parts = list(fields(enum))
    name = f"{prefix}.{as_text(next(value for number, value in parts if number == _NAME))}"
    for number, value in parts:
        if number == _VALUES:
            assert isinstance(value, bytes)
            each = dict(fields(value))
            enums.setdefault(name, {})[int(str(each.get(2, 0)))] = as_text(each[_NAME])


def as_text(value: object) -> str:
    """Return a text of a message."""
    assert isinstance(value, bytes)
    return value.decode()


if __name__ == "__main__":
    main(sys.argv[1:])
