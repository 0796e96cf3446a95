"""Candidates for changing the code that XLA makes, taken from what is installed."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from xcache.keys.protobuf import field_at, fields, varint

# FieldDescriptorProto: types and labels.
_BOOL, _STRING, _ENUM, _MESSAGE, _REPEATED = 8, 9, 14, 11, 3
_FLOATS = (1, 2)
# Names that look like environment variables.
_VARIABLE = re.compile(rb"(?<![A-Za-z0-9_$.])[A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+(?=\0)")
_READ_IN_PYTHON = re.compile(
    r"""(?:environ(?:\.get|\.setdefault|\.pop)?[(\[]|getenv\()\s*['"]([A-Za-z_][A-Za-z0-9_]*)"""
)
# Every program needs these unchanged.
_LEFT_ALONE = re.compile(r"(LD_|DYLD_|PYTHON|XCACHE|PATH$|HOME$|TMPDIR$|PWD$|VIRTUAL_ENV$|LC_|.*_PATH$|MALLOC_)")


class Option(NamedTuple):
    """One field of XLA's DebugOptions, and values to try that are not its default."""

    number: int
    name: str
    values: tuple[Any, ...]


def debug_options(jaxlib: Path, defaults: bytes) -> list[Option]:
    """Return every field of DebugOptions in jaxlib's descriptor; ``defaults`` is a serialized DebugOptions."""
    set_to: dict[int, Any] = dict(fields(defaults))
    library = max(jaxlib.glob("*.so"), key=lambda path: path.stat().st_size)
    file = _descriptor(library, b"xla/xla.proto")
    message = next(m for n, m in file if n == 4 and field_at(m, (1,)) == b"DebugOptions")
    # Enums: within the message, and beside it.
    enums = {field_at(e, (1,)): e for n, e in [*fields(message), *file] if n in (4, 5) and isinstance(e, bytes)}
    found = []
    for number, described in fields(message):
        if number == 2 and isinstance(described, bytes):
            facts: dict[int, Any] = dict(fields(described))
            values = _values(facts, set_to.get(facts[3]), enums)
            found.append(Option(facts[3], facts[1].decode(), values))
    return sorted(found)


def _values(facts: dict[int, Any], default: Any, enums: dict[Any, Any]) -> tuple[Any, ...]:
    kind = facts[5]
    if kind == _MESSAGE:
        return ()
    if kind == _BOOL:
        return (not default,)
    if kind == _ENUM:
        enum = enums.get(facts[6].rpartition(b".")[2])
        members = [value for number, value in fields(enum) if number == 2] if enum else []
        named = [(field_at(m, (1,)), field_at(m, (2,)) or 0) for m in members if isinstance(m, bytes)]
        return tuple(name.decode() for name, value in named if isinstance(name, bytes) and value != (default or 0))
    if kind == _STRING:
        return _texts(facts[1].decode())
    if kind in _FLOATS:
        return (0.25,)
    known = default if isinstance(default, int) and default < 2**31 else 0
    return tuple(value for value in (0, 1, 2, known + 3, known * 2 + 64) if value != known)[:3]


def _texts(name: str) -> tuple[str, ...]:
    """Return values that each text option can understand."""
    if "isa" in name:
        return ("SSE4_2", "AVX")
    if "passes" in name:
        return ("fusion", "cpu-parallel-task-assigner", "algsimp", "dce")
    if name.endswith("extra_options"):
        return ("-unroll-threshold=2", "xla_cpu_disable_loop_unrolling")
    return ("nothing",)


def _descriptor(library: Path, name: bytes) -> list[tuple[int, Any]]:
    """Return the FileDescriptorProto of one .proto file, found in a library's data."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = b"\n" + bytes([len(name)]) + name
        at = data.find(start)
        while at >= 0:
            found = list(_fields_from(data, at))
            if any(number == 4 for number, _ in found):
                return found
            at = data.find(start, at + 1)
    raise AssertionError(f"{library} has no descriptor of {name.decode()}")


def _fields_from(data: Any, at: int) -> Iterator[tuple[int, Any]]:
    """Return the fields from ``at`` on, up to the first that no FileDescriptorProto can have."""
    while True:
        tag, at = varint(data, at)
        if tag & 7 != 2 or not 0 < tag >> 3 <= 14:
            return
        length, at = varint(data, at)
        yield tag >> 3, data[at : at + length]
        at += length


def environment_names(jaxlib: Path, compiler: Path) -> list[str]:
    """Return names that jax reads in Python, and all that look like variables in a compiler library's data."""
    names: set[str] = set()
    for package in (jaxlib, jaxlib.parent / "jax", jaxlib.parent / "jax_plugins"):
        for path in package.rglob("*.py"):
            names |= set(_READ_IN_PYTHON.findall(path.read_text("utf-8", "replace")))
    for library in compiler.glob("*.so"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            names |= {name.decode() for name in _VARIABLE.findall(data) if len(name) < 64}
    return sorted(name for name in names if not _LEFT_ALONE.match(name))
