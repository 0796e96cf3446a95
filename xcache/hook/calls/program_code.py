"""What a code object does, and what it reads from outside of itself."""

from __future__ import annotations

import dis
import hashlib
import itertools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from xcache.hook.structure.encoding import CannotSkipError, Encoding


class Import(NamedTuple):
    """An import in a function's body: the number of dots, and the module's name."""

    level: int
    name: str


class Code(NamedTuple):
    """A code object, the digest of its content, and what it reads.

    Each of ``reads`` is a global's name or an import, and the names of the attributes that are read from it in turn.
    ``names`` are all names and texts in the code, which may be those of attributes.
    """

    held: types.CodeType
    digest: bytes
    reads: tuple[tuple[Any, ...], ...]
    names: frozenset[str]
    makes_sets: bool


# Attributes that lead from a value to what holds it, or to what the process has made: no value has all of that in it.
_DOORS = frozenset((
    "__globals__", "__builtins__", "__subclasses__", "f_globals", "f_builtins", "f_locals", "f_back", "tb_frame",
    "gi_frame", "cr_frame", "ag_frame",
))  # fmt: skip
# All other instructions with a name read a global, or may.
_ATTRIBUTES = ("ATTR", "METHOD", "STORE_", "DELETE_", "IMPORT_")
# By id; each holds its code object, whose id is in use as long.
_known: dict[int, Code] = {}


def code_of(value: types.CodeType) -> Code:
    """Return what a code object does and reads; raise CannotSkipError if it may read anything."""
    known = _known.get(id(value))
    if known is None:
        inner = [code_of(each) for each in value.co_consts if isinstance(each, types.CodeType)]
        steps = [step for step in dis.get_instructions(value) if step.opname != "EXTENDED_ARG"]
        texts = [*value.co_names, *(each for each in value.co_consts if type(each) is str)]
        # A text may be a path of names, such as operator.attrgetter takes.
        if doors := [door for door in _DOORS if any(door in each for each in texts)]:
            raise CannotSkipError(f"outside the program: {min(doors)}")
        reads = dict.fromkeys(itertools.chain(_reads(steps), *(each.reads for each in inner)))
        if value.co_name == "__hash__":
            # A hash serves to find things; the order of a set counts elsewhere.
            reads.pop(("hash",), None)
        makes_sets = any(map(_makes_set, steps, steps[1:])) or any(each.makes_sets for each in inner)
        names = frozenset(texts).union(*(each.names for each in inner))
        known = _known[id(value)] = Code(value, _digest(value), tuple(reads), names, makes_sets)
    return known


def _reads(steps: list[dis.Instruction]) -> Iterator[tuple[Any, ...]]:
    """Yield what each instruction reads from outside of the function, with the attributes that follow."""
    for number, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            yield from _imports(steps, number)
        elif step.opcode in dis.hasname and not any(part in step.opname for part in _ATTRIBUTES):
            following = itertools.takewhile(
                lambda step: step.opname in ("LOAD_ATTR", "LOAD_METHOD"), itertools.islice(steps, number + 1, None)
            )
            yield step.argval, *(step.argval for step in following)


def _imports(steps: list[dis.Instruction], number: int) -> Iterator[tuple[Any, ...]]:
    level, parts, name = steps[number - 2].argval, steps[number - 1].argval, steps[number].argval
    if parts:
        yield from ((Import(level, name), part) for part in parts)
        return
    yield (Import(level, name),)
    if steps[number + 1].opname != "IMPORT_FROM":
        # With ``import a.b`` the function has ``a``.
        yield (Import(level, name.partition(".")[0]),)


def _makes_set(step: dis.Instruction, following: dis.Instruction) -> bool:
    """Return whether an instruction makes a set, or takes a constant one that is not only searched."""
    return step.opname == "BUILD_SET" or (type(step.argval) is frozenset and following.opname != "CONTAINS_OP")


def _digest(value: types.CodeType) -> bytes:
    """Return a digest of what code does, and not of where it stands."""
    encoding = Encoding()
    encoding.encode_all((
        value.co_name, value.co_code, value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars,
        value.co_flags, value.co_argcount, value.co_kwonlyargcount, value.co_posonlyargcount, value.co_exceptiontable,
    ))  # fmt: skip
    encoding.encode_all(code_of(each).digest if isinstance(each, types.CodeType) else each for each in value.co_consts)
    return hashlib.blake2b(bytes.fromhex(encoding.digest()), digest_size=16).digest()
