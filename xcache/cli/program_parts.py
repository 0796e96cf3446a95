"""Read a StableHLO program into the parts that can be compared: arguments, results, meshes, operations and names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from xcache.cli.output import short_site
from xcache.keys import stablehlo

_TENSOR = re.compile(r"tensor<((?:\d+x)*)([^<>]+|complex<f\d+>)>")
_COMPLEX = {"complex<f32>": "c64", "complex<f64>": "c128"}
_PLACE = re.compile(r'"([^"]+)":(\d+):\d+')
# The innermost name of a location: an argument's.
_NAMED = re.compile(r'loc\("((?:[^"\\]|\\.)*)"')
# #stablehlo<precision HIGHEST>
_ENUM = re.compile(r"#stablehlo<\w+ ([A-Z]\w*)>")
_NUMBERED = re.compile(r"_\d+$")
_RESULT_NAME = "jax.result_info"


class Value(NamedTuple):
    """An argument or result of a program: its type as jax writes it, its name if it is known, and its attributes."""

    type: str
    name: str = ""
    facts: dict[str, str] = {}  # noqa: RUF012 - nobody changes it

    @property
    def kind(self) -> str:
        """The type of its elements."""
        return self.type.partition("[")[0]

    @property
    def shape(self) -> list[str]:
        """The sizes of its dimensions."""
        sizes = self.type.partition("[")[2].removesuffix("]")
        return sizes.split(",") if sizes else []


class Operation(NamedTuple):
    """An operation of a program, without the names of its operands."""

    name: str
    attributes: dict[str, str]
    types: str
    operands: str
    # Where the user's code asked for it; empty if that is not known.
    site: str
    # The function of the program that it is in, and the one that it calls.
    function: str
    callee: str
    # Whether it is a constant that only says when a loop ends.
    ends_loop: bool

    @property
    def essence(self) -> tuple[object, ...]:
        """The traits that two operations that do the same have in common."""
        return self.name, tuple(self.attributes.items()), self.types

    @property
    def is_constant(self) -> bool:
        """Whether it is a number or array in the program."""
        return self.name == "stablehlo.constant"

    @property
    def content(self) -> str:
        """The value of a constant."""
        return self.attributes.get("value", "")

    @property
    def short_name(self) -> str:
        """Its name without that of the dialect."""
        return self.name.removeprefix("stablehlo.")

    @property
    def at(self) -> str:
        """Words that say where the user's code asked for it, if that is known."""
        return f" ({self.site})" if self.site else ""


class Program(NamedTuple):
    """The parts of a program that are compared."""

    name: str
    arguments: list[Value]
    results: list[Value]
    settings: dict[str, str]
    meshes: list[str]
    operations: list[Operation]
    # The names of the functions in it.
    symbols: list[str]

    def distance(self, other: Program) -> int:
        """Return how much it differs from another program, to choose the nearest among several."""
        count = [Counter((each.name, *each.attributes.items()) for each in program.operations)
                 for program in (self, other)]  # fmt: skip
        operations = (count[0] - count[1]).total() + (count[1] - count[0]).total()
        return operations + distance(self.arguments, other.arguments)


def distance(here: Sequence[Value], there: Sequence[Value]) -> int:
    """Return how much the arguments of two programs differ."""
    more = abs(len(here) - len(there)) * 4
    return more + sum(_distance(one, another) for one, another in zip(here, there, strict=False))


def _distance(one: Value, other: Value) -> int:
    if len(one.shape) != len(other.shape):
        return 4
    # Numbers of another kind are further away than the same ones in other bits.
    kinds = [each.kind.rstrip("0123456789") for each in (one, other)]
    sizes = sum(a != b for a, b in zip(one.shape, other.shape, strict=True))
    return (one.kind != other.kind) + (kinds[0] != kinds[1]) + sizes


def read(bytecode: bytes) -> Program:
    """Return the parts of a program."""
    module = stablehlo.parse(bytecode)
    with module.context:
        main = next(each for each in module.body.operations if _symbol(each) == "main")
        arguments, results = _signature(main)
        top = [each.operation for each in module.body.operations]
        return Program(
            stablehlo.name(module),
            arguments,
            results,
            _attributes(module.operation),
            [str(each.attributes["mesh"]) for each in top if each.name == "sdy.mesh"],
            _operations(module),
            [_symbol(each) for each in top],
        )


def _operations(module: Any) -> list[Operation]:
    found: list[Operation] = []
    # The name that MLIR has for a value costs a pass over the whole program.
    numbers: dict[Any, int] = {}
    for each in stablehlo.operations(module):
        for value in each.results:
            numbers[value] = len(numbers)
        for block in (block for region in each.regions for block in region):
            for value in block.arguments:
                numbers[value] = len(numbers)
        if each.name not in ("func.func", "sdy.mesh"):
            found.append(_operation(each, numbers))
    return found


def without_numbers(symbols: Sequence[str]) -> list[str]:
    """Return names of functions without the numbers that tell several of one name apart."""
    return [_NUMBERED.sub("", symbol) for symbol in symbols]


def _signature(main: Any) -> tuple[list[Value], list[Value]]:
    """Return the arguments and results of a function."""
    from jaxlib.mlir import ir

    function_type = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    facts = []
    for attribute, types in (("arg_attrs", function_type.inputs), ("res_attrs", function_type.results)):
        there = attribute in main.attributes
        found = [_named(ir.DictAttr(each)) for each in ir.ArrayAttr(main.attributes[attribute])] if there else []
        facts.append(found + [{}] * (len(types) - len(found)))
    names = [_name_in(str(each.location)) for each in main.regions[0].blocks[0].arguments]
    arguments = [
        Value(_as_type(str(each)), name, fact)
        for each, name, fact in zip(function_type.inputs, names, facts[0], strict=True)
    ]
    results = [
        Value(_as_type(str(each)), fact.pop(_RESULT_NAME, "").strip('"'), fact)
        for each, fact in zip(function_type.results, map(dict, facts[1]), strict=True)
    ]
    return arguments, results


def _attributes(operation: Any) -> dict[str, str]:
    try:
        found = _named(operation.attributes)
    except TypeError:
        # MLIR's Python knows no array of complex numbers, but can print the operation that has it.
        found = {"value": str(operation).partition(f"{operation.name} ")[2]}
    return {name: text for name, text in found.items() if name != "sym_name"}


def _named(attributes: Any) -> dict[str, str]:
    """Return named attributes as texts; newer jaxlibs yield their names, older ones pairs."""
    return {
        each if isinstance(each, str) else each.name: _ENUM.sub(
            r"\1", str(attributes[each] if isinstance(each, str) else each.attr)
        )
        for each in attributes
    }


def _operation(operation: Any, numbers: Mapping[Any, int]) -> Operation:
    facts = _attributes(operation)
    # The names of functions are compared by themselves.
    callee = facts.pop("callee", "")
    if "value" in facts and operation.name == "stablehlo.constant":
        # Without its type, which stands beside it.
        facts["value"] = facts["value"].rpartition(" : ")[0] or facts["value"]
    types = ", ".join(_as_type(str(each.type)) for each in operation.results)
    operands = " ".join(str(numbers.get(each)) for each in operation.operands)
    # jax gives a constant the place of the whole program; the operation that takes it has a closer one.
    uses = list(operation.results[0].uses) if operation.name == "stablehlo.constant" else []
    location = str((uses[0].owner if uses else operation).location)
    function = operation
    while function.name != "func.func" and function.parent is not None:
        function = function.parent.operation
    site, name = _site(location), _symbol(function)
    return Operation(operation.name, facts, types, operands, site, name, callee, _ends_loop(uses))


def _ends_loop(uses: Sequence[Any]) -> bool:
    """Return whether all operations that use a value are among those that say whether a loop goes on."""
    owners = [use.owner for use in uses]
    loops = [owner.parent for owner in owners]
    return bool(owners) and all(
        loop is not None and loop.name == "stablehlo.while" and owner in [*loop.regions[0].blocks[0].operations]
        for owner, loop in zip(owners, loops, strict=True)
    )


def _site(location: str) -> str:
    """Return the innermost place in a location that is in the user's files, else in any file."""
    places = _PLACE.findall(location)
    own = [place for place in places if "-packages/" not in place[0]]
    return next((f"{short_site(file)}:{line}" for file, line in own or places), "")


def _name_in(location: str) -> str:
    found = _NAMED.match(location)
    # A place is a name that a line follows.
    return found[1] if found and not location[found.end() :].startswith(":") else ""


def _symbol(operation: Any) -> str:
    from jaxlib.mlir import ir

    return ir.StringAttr(operation.attributes["sym_name"]).value if "sym_name" in operation.attributes else ""


def _as_type(text: str) -> str:
    """Return an MLIR type as jax writes it: ``f32[8,128]``."""
    found = _TENSOR.fullmatch(text)
    return f"{_COMPLEX.get(found[2], found[2])}[{','.join(found[1].split('x')[:-1])}]" if found else text
