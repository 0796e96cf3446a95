"""Name the compile options of a key: their lines have numbers for names, as XLA's protocol buffers do."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xcache.keys.protobuf import fields, varint
from xcache.wire.bounded import SMALL_FILE, parsed_json, text_of

# scripts/option_names.py makes it.
_TABLE = Path(__file__).with_name("option_names.json")
_ROOT = ".xla.CompileOptionsProto"
# These messages are opened by keys/options.py, and their names would only make the lines longer.
_TRANSPARENT = ("executable_build_options", "debug_options")
_FLOATS = {("float", 4): "<f", ("double", 8): "<d"}
_SIGN = 1 << 63


class Option(NamedTuple):
    """A field of XLA's compile options: its name, how its value is written, and the type of a message or enumeration.

    All are empty for a field of a newer jaxlib.
    """

    name: str = ""
    kind: str = ""
    type_name: str = ""


def named(line: str) -> str:
    """Return a line ``path=value`` of the options component with names for numbers; a line of another form as it is."""
    path, equals, value = line.partition("=")
    numbers = path.split(".")
    if not equals or not all(number.isdigit() for number in numbers):
        return line
    found = options_at(numbers)
    names = [option.name or f"option {number}" for number, option in zip(numbers, found, strict=True)]
    kind, type_name = found[-1].kind, found[-1].type_name
    shown = [name for name in names[:-1] if name not in _TRANSPARENT] + names[-1:]
    return f"{'.'.join(shown)} = {_value(value, kind, type_name)}"


def options_at(path: Sequence[str]) -> list[Option]:
    """Return the fields on a path of field numbers; those that the table does not know are empty."""
    found = []
    message = _ROOT
    for number in path:
        option = Option(*_table()["messages"].get(message, {}).get(number, ()))
        message = option.type_name
        found.append(option)
    return found


def _value(text: str, kind: str, type_name: str) -> str:
    """Return the value of a line, which is a number in decimal, or bytes in hexadecimal."""
    is_number = kind in ("", "bool", "enum", "int32", "int64", "uint32", "uint64")
    if is_number and text.isdigit():
        return _number(int(text), kind, type_name)
    try:
        return _content(bytes.fromhex(text), kind, type_name)
    except (ValueError, IndexError):
        return text


def _number(number: int, kind: str, type_name: str) -> str:
    if kind == "bool" and number in (0, 1):
        return "true" if number else "false"
    if kind == "enum":
        return str(_table()["enums"].get(type_name, {}).get(str(number), number))
    return str(number - 2 * _SIGN if number >= _SIGN else number)


def _content(content: bytes, kind: str, type_name: str) -> str:
    if (layout := _FLOATS.get((kind, len(content)))) is not None:
        return f"{struct.unpack(layout, content)[0]:g}"
    if kind == "text":
        return repr(content.decode("utf-8", "replace"))
    if kind == "message":
        return _message(content, type_name)
    if kind.startswith("packed "):
        each = kind.removeprefix("packed ")
        return f"[{', '.join(_number(number, each, type_name) for number in _packed(content))}]"
    return content.hex()


def _message(content: bytes, type_name: str) -> str:
    parts = []
    for number, value in fields(content):
        name, kind, inner = (*_table()["messages"].get(type_name, {}).get(str(number), (str(number),)), "", "")[:3]
        text = _number(value, kind, inner) if isinstance(value, int) else _content(value, kind, inner)
        parts.append(f"{name}: {text}")
    return f"{{{', '.join(parts)}}}"


def _packed(content: bytes) -> list[int]:
    found, at = [], 0
    while at < len(content):
        number, at = varint(content, at)
        found.append(number)
    return found


@functools.cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = parsed_json(text_of(_TABLE), SMALL_FILE)
    return found
