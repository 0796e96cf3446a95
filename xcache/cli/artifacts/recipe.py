"""Rebuild the settings of a compile from the texts of a key's components: compile options, flags and client."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from xcache.cli import Failure
from xcache.cli.option_lines import options_at
from xcache.keys import flags, options
from xcache.keys.protobuf import varint_bytes
from xcache.warming.place import environment, facts
from xcache.wire.hashing import digest

# Fields of CompileOptionsProto: executable_build_options, its debug_options, and the device assignment.
_BUILD, _DEBUG, _ASSIGNMENT, _ASSIGNED = (3,), (3, 3), (3, 9), (3, 9, 3)
_DEVICES_OF_ASSIGNED = 1
# Wire types of protocol buffers.
_VARINT, _EIGHT_BYTES, _SIZED, _FOUR_BYTES = 0, 1, 2, 5
_NUMBERS = ("bool", "enum", "int32", "int64", "uint32", "uint64")
_SIZED_KINDS = ("text", "bytes", "message")
_FILES = "content of "
# A device of a GPU: its number, process and slice.
_PLACED = re.compile(r"(\d+)@\d+/\d+")
# Fields of DebugOptions: these have XLA write every pass as text, of all modules.
_DUMP_TO, _DUMP_PASSES, _DUMP_AS_TEXT, _MOST_MODULES, _MAY_DUMP = 109, 111, 112, 132, 253
# LLVM IR on a GPU; on CPU from jaxlib 0.12 on. To dump what other emitters do crashes XLA, which runs them in parallel.
_DUMP_LLVM, _DUMP_EMITTERS = 155, 433
_UNLIMITED = (1 << 64) - 1


class Recipe(NamedTuple):
    """The settings of a compile: serialized options, the devices' ids, and the environment."""

    options: bytes
    devices: tuple[int, ...]
    environment: dict[str, str]


class Client(NamedTuple):
    """The settings that an executable's client was made with."""

    devices: int
    # How many devices the executable runs on.
    used: int
    threads: int | None


def rebuilt(components: Mapping[str, tuple[str, str | None]], *, own: bool) -> Recipe:
    """Return the settings of an entry's compile, from the digest and description of each component.

    Raises Failure if they cannot be rebuilt. With ``own`` False, no file that another user's options name is read.
    """
    texts = {name: _whole(name, *components[name]) for name in ("options", "flags")}
    if not own and any(line.startswith(_FILES) for text in texts.values() for line in text.split("\n")):
        raise Failure("the options of this entry name files, which xcache does not read for another user's entry")
    try:
        serialized, devices = _options(texts["options"])
    except (IndexError, KeyError, ValueError):
        raise Failure("the compile options of this entry cannot be rebuilt: their description cannot be read") from None
    try:
        flags_of_environment = environment(texts["flags"])
    except ValueError as error:
        raise Failure(f"this entry cannot be compiled again: {error}") from None
    places = tuple((device, 0, None) for device in devices) if _PLACED.search(texts["options"]) else None
    read = options.canonical if own else options.lines_of
    if read(serialized, places=places).decode() != texts["options"]:
        raise Failure(_differs("compile options", texts["options"]))
    if own and flags.collect(flags_of_environment, ()).decode() != _of_the_environment(texts["flags"]):
        raise Failure(_differs("flags", texts["flags"]))
    return Recipe(serialized, devices, flags_of_environment)


def client(components: Mapping[str, tuple[str, str | None]]) -> Client:
    """Return what an entry's client was made with; raise Failure if it was one of several processes."""
    facts = dict(_facts(_whole("platform", *components["platform"])))
    try:
        processes, kinds, threads = int(facts.get("processes", 1)), len(facts["kinds"]), facts.get("threads")
        devices = int(facts["devices"][0]) if "devices" in facts else kinds
    except (KeyError, TypeError, ValueError, IndexError):
        raise Failure("the platform of this entry cannot be read") from None
    if processes != 1:
        raise Failure(f"this entry is for a job of {processes} processes, which xcache cannot start again")
    return Client(devices, kinds, threads)


def with_dumps(serialized: bytes, passes: str) -> bytes:
    """Return compile options that have XLA write into its current folder, also after passes that a pattern matches."""
    wanted = [
        _field(_DUMP_TO, _SIZED, b"."),
        _field(_DUMP_PASSES, _SIZED, passes.encode()) if passes else b"",
        _field(_DUMP_EMITTERS, _SIZED, b"llvm"),
        *(_field(number, _VARINT, 1) for number in (_DUMP_AS_TEXT, _DUMP_LLVM, _MAY_DUMP)),
        _field(_MOST_MODULES, _VARINT, _UNLIMITED),
    ]
    # Protocol buffers merge a message that comes twice.
    return serialized + _field(_BUILD[0], _SIZED, _field(_DEBUG[1], _SIZED, b"".join(wanted)))


def _whole(name: str, expected: str, text: str | None) -> str:
    """Return the text of a component; raise Failure if it is not all that was hashed."""
    if text is None or digest(text.encode()) != expected:
        raise Failure(f"the {name} of this entry cannot be rebuilt: the store has no complete description of them")
    return text


def _differs(what: str, text: str) -> str:
    files = re.findall(rf"^{_FILES}([^=]*)=", text, re.MULTILINE)
    named = f"a file that they name has changed ({', '.join(files)})" if files else "please report this"
    return f"the {what} of this entry cannot be rebuilt: {named}"


def _options(text: str) -> tuple[bytes, tuple[int, ...]]:
    """Return the serialized options of which these are the lines, and the ids of the devices."""
    messages: dict[tuple[int, ...], bytes] = {(): b"", _BUILD: b"", _DEBUG: b"", _ASSIGNMENT: b""}
    devices: list[int] = []
    for line in text.split("\n"):
        path, _, value = line.partition("=")
        if line.startswith(_FILES) or not line:
            continue
        numbers = tuple(map(int, path.split(".")))
        if numbers == _ASSIGNED:
            found = [int(number) for number in _PLACED.findall(value)] or options.device_numbers(bytes.fromhex(value))
            devices += found
            content = _field(_DEVICES_OF_ASSIGNED, _SIZED, b"".join(map(varint_bytes, found)))
            messages[_ASSIGNMENT] += _field(numbers[-1], _SIZED, content)
        else:
            messages[numbers[:-1]] += _scalar(path, numbers[-1], value)
    for path_of in (_DEBUG, _ASSIGNMENT, _BUILD):
        if messages[path_of]:
            messages[path_of[:-1]] += _field(path_of[-1], _SIZED, messages[path_of])
    return messages[()], tuple(devices)


def _scalar(path: str, number: int, value: str) -> bytes:
    kind = options_at(path.split("."))[-1].kind
    if kind in _NUMBERS:
        return _field(number, _VARINT, int(value))
    if kind in _SIZED_KINDS or kind.startswith("packed "):
        return _field(number, _SIZED, bytes.fromhex(value))
    if kind in ("float", "double"):
        return _field(number, _FOUR_BYTES if kind == "float" else _EIGHT_BYTES, bytes.fromhex(value))
    raise Failure(
        f"the compile options of this entry cannot be rebuilt: this xcache does not know option {path};"
        " a newer one may (scripts/option_names.py makes its table)"
    )


def _field(number: int, kind: int, value: int | bytes) -> bytes:
    tag = varint_bytes(number << 3 | kind)
    if isinstance(value, int):
        return tag + varint_bytes(value)
    return tag + (varint_bytes(len(value)) if kind == _SIZED else b"") + value


def _of_the_environment(text: str) -> str:
    """Return the lines without those of the program's arguments, which XLA does not read."""
    return "\n".join(line for line in text.split("\n") if not line.startswith(("argument ", "custom key")))


def _facts(text: str) -> Iterator[tuple[str, Any]]:
    try:
        yield from facts(text)
    except ValueError as error:
        raise Failure(f"this entry cannot be compiled again: {error}") from None
