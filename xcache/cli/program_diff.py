"""Compare two StableHLO programs: their arguments, results, meshes and operations, with advice for known causes."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from xcache.keys import stablehlo

# More differences than these help nobody.
_MOST_SHOWN = 5
_LONGEST = 160
# Seconds before and after this moment in which a constant looks like a time.
_YEARS = 5 * 365 * 86400.0
_NUMBERED = re.compile(r"_\d+$")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)([^>]+)>")
_PLACE = re.compile(r'"([^"]+)":(\d+):\d+')
_DONATION = ("tf.aliasing_output", "jax.buffer_donor")
_SHARDING = ("sdy.sharding", "mhlo.sharding")


class Operation(NamedTuple):
    """An operation of a program, without the names of its operands."""

    name: str
    attributes: str
    types: str
    operands: str
    # Where the user's code asked for it; empty if that is not known.
    site: str

    @property
    def is_constant(self) -> bool:
        """Whether it is a number or array in the program."""
        return self.name == "stablehlo.constant"

    def __str__(self) -> str:
        attributes = f" {self.attributes}" if self.attributes else ""
        return _short(f"{self.name.removeprefix('stablehlo.')}{attributes} : {self.types}")

    @property
    def at(self) -> str:
        """Words that say where the user's code asked for it, if that is known."""
        return f" ({self.site})" if self.site else ""


class Program(NamedTuple):
    """The parts of a program that are compared."""

    arguments: list[tuple[str, dict[str, str]]]
    results: list[tuple[str, dict[str, str]]]
    settings: dict[str, str]
    meshes: list[str]
    operations: list[Operation]
    symbols: list[str]


class Difference(NamedTuple):
    """Something in which two programs differ, and what to do about it, if that is known."""

    text: str
    advice: str = ""


def read(bytecode: bytes) -> Program:
    """Return the parts of a program."""
    module = stablehlo.parse(bytecode)
    with module.context:
        main = next(each for each in module.body.operations if _symbol(each) == "main")
        arguments, results = _signature(main)
        top = [each.operation for each in module.body.operations]
        return Program(
            arguments,
            results,
            _attributes(module.operation),
            [str(each.attributes["mesh"]) for each in top if each.name == "sdy.mesh"],
            [_operation(each) for each in stablehlo.operations(module) if each.name not in ("func.func", "sdy.mesh")],
            [_symbol(each) for each in top],
        )


def differences(here: Program, there: Program) -> list[Difference]:
    """Return in what two programs differ, the most telling first."""
    found = [*_of_meshes(here, there), *_of_values("argument", here.arguments, there.arguments)]
    # Other arguments and meshes change the results and operations, too.
    if not found:
        found += _of_values("result", here.results, there.results)
        found += _of_operations(here.operations, there.operations)
    if not found and here.symbols != there.symbols:
        advice = "This should not have missed; please report it with the output of `xcache show KEY --program` of both."
        found.append(Difference("only the names of functions in the program differ", advice))
    return found


def _of_meshes(here: Program, there: Program) -> Iterator[Difference]:
    counts = [each.settings.get("mhlo.num_partitions", "1").partition(" ")[0] for each in (here, there)]
    if counts[0] != counts[1]:
        yield Difference(f"it runs on {counts[0]} devices here, on {counts[1]} in the stored one", _MESH_ADVICE)
    elif here.meshes != there.meshes:
        yield Difference(
            f"mesh {', '.join(here.meshes)} here, {', '.join(there.meshes)} in the stored one", _MESH_ADVICE
        )


_MESH_ADVICE = "Each mesh and number of devices needs an executable of its own; keep them the same between runs."


def _of_values(
    what: str, here: Sequence[tuple[str, dict[str, str]]], there: Sequence[tuple[str, dict[str, str]]]
) -> Iterator[Difference]:
    if len(here) != len(there):
        advice = "The structure of the arguments has changed, such as a field that is None in one run."
        yield Difference(f"{len(here)} {what}s here, {len(there)} in the stored program", advice)
        return
    for number, ((one, facts), (other, others)) in enumerate(zip(here, there, strict=True)):
        if one != other:
            yield Difference(
                f"{what} {number} is {one} here, {other} in the stored program", _advice_on_types(one, other)
            )
        for names, of in ((_DONATION, "donation"), (_SHARDING, "sharding")):
            mine, theirs = ([facts_of.get(name, "") for name in names] for facts_of in (facts, others))
            if mine != theirs:
                shown = [", ".join(filter(None, each)) or "none" for each in (mine, theirs)]
                yield Difference(f"the {of} of {what} {number} is {shown[0]} here, {shown[1]} in the stored program")


def _advice_on_types(one: str, other: str) -> str:
    (shape, kind), (other_shape, other_kind) = _parts(one), _parts(other)
    if kind != other_kind and shape == other_shape:
        if {kind, other_kind} in ({"f32", "f64"}, {"i32", "i64"}):
            return "One of the runs uses jax_enable_x64 or another dtype of the input."
        return "Convert the input to one dtype before the call."
    changed = [number for number, (a, b) in enumerate(zip(shape, other_shape, strict=False)) if a != b]
    if len(shape) == len(other_shape) and len(changed) == 1 and kind == other_kind:
        return (
            f"Only dimension {changed[0]} has changed. Pad it to a fixed size, or to one of a few sizes (buckets), so"
            " that the runs share an executable."
        )
    return ""


def _parts(text: str) -> tuple[list[str], str]:
    kind, _, shape = text.partition("[")
    return (shape.removesuffix("]").split(",") if shape.removesuffix("]") else []), kind


def _of_operations(here: Sequence[Operation], there: Sequence[Operation]) -> Iterator[Difference]:
    matcher = difflib.SequenceMatcher(None, [each[:3] for each in here], [each[:3] for each in there], autojunk=False)
    changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
    for _, begin, end, begin_there, end_there in changes[:_MOST_SHOWN]:
        mine, theirs = here[begin:end], there[begin_there:end_there]
        yield _of_part(mine, theirs)
    if len(changes) > _MOST_SHOWN:
        yield Difference(f"and {len(changes) - _MOST_SHOWN} more parts of the program")
    if not changes and [each.operands for each in here] != [each.operands for each in there]:
        yield Difference("the operations are the same, but some take other values")


def _of_part(mine: Sequence[Operation], theirs: Sequence[Operation]) -> Difference:
    if len(mine) == len(theirs) == 1 and mine[0].is_constant and theirs[0].is_constant:
        values = [each[0].attributes for each in (mine, theirs)]
        if mine[0].types == theirs[0].types:
            text = f"a constant{mine[0].at} is {_short(values[0])} here, {_short(values[1])} in the stored program"
            return Difference(text, _advice_on_constants(*values))
    if not theirs:
        return Difference(f"only here: {_listed(mine)}")
    if not mine:
        return Difference(f"only in the stored program: {_listed(theirs)}")
    return Difference(f"{_listed(mine)} here, {_listed(theirs)} in the stored program", _advice_on_parts(mine, theirs))


def _advice_on_constants(one: str, other: str) -> str:
    numbers = [_number(each) for each in (one, other)]
    if all(number is not None and abs(number - time.time()) < _YEARS for number in numbers):
        return "It looks like a time. A program with the time in it is another one in each run; pass it as an argument."
    if all(number is not None and number.is_integer() and abs(number) > 1e6 for number in numbers):
        return "It looks like a random seed. Pass it as an argument, as jax.random.key(seed) outside of jit does."
    return (
        "A Python number was built into the program. Pass it as an argument of the function instead of closing over it"
        " or naming it in static_argnums, and all values share an executable."
    )


def _advice_on_parts(mine: Sequence[Operation], theirs: Sequence[Operation]) -> str:
    if [each.name for each in mine] != [each.name for each in theirs]:
        return ""
    if any("precision" in each.attributes for each in (*mine, *theirs)) and [each.types for each in mine] == [
        each.types for each in theirs
    ]:
        return "The precision of products differs: jax_default_matmul_precision, or the argument `precision`."
    return ""


def _number(attributes: str) -> float | None:
    found = re.search(r"dense<(-?[\d.eE+-]+)>", attributes)
    try:
        return float(found[1]) if found else None
    except ValueError:
        return None


def _listed(operations: Sequence[Operation]) -> str:
    shown = ", ".join(f"{each}{each.at}" for each in operations[:2])
    return f"{shown} and {len(operations) - 2} more" if len(operations) > 2 else shown


def _signature(main: Any) -> tuple[list[tuple[str, dict[str, str]]], list[tuple[str, dict[str, str]]]]:
    """Return the types of a function's arguments and results, each with its attributes."""
    from jaxlib.mlir import ir

    function_type = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    both = []
    for name, types in (("arg_attrs", function_type.inputs), ("res_attrs", function_type.results)):
        facts = (
            [_named(ir.DictAttr(each)) for each in ir.ArrayAttr(main.attributes[name])]
            if name in main.attributes
            else []
        )
        facts += [{}] * (len(types) - len(facts))
        both.append([(_as_type(str(each)), fact) for each, fact in zip(types, facts, strict=True)])
    return both[0], both[1]


def _attributes(operation: Any) -> dict[str, str]:
    return {name: text for name, text in _named(operation.attributes).items() if name != "sym_name"}


def _named(attributes: Any) -> dict[str, str]:
    """Return named attributes as texts; newer jaxlibs yield their names, older ones pairs."""
    return {
        each if isinstance(each, str) else each.name: str(attributes[each] if isinstance(each, str) else each.attr)
        for each in attributes
    }


def _operation(operation: Any) -> Operation:
    facts = _attributes(operation)
    if operation.name in ("func.call", "call"):
        facts = {name: _NUMBERED.sub("", text) for name, text in facts.items()}
    shown = ", ".join(
        text if operation.name == "stablehlo.constant" else f"{name} = {text}" for name, text in facts.items()
    )
    types = ", ".join(_as_type(str(each.type)) for each in operation.results)
    operands = " ".join(_operand(each) for each in operation.operands)
    # jax gives a constant the place of the whole program; the operation that takes it has a closer one.
    uses = list(operation.results[0].uses) if operation.name == "stablehlo.constant" else []
    at = uses[0].owner if uses else operation
    return Operation(operation.name, shown, types, operands, _site(str(at.location)))


def _site(location: str) -> str:
    """Return the innermost place in a location that is in the user's files, else in any file."""
    places = [f"{file}:{line}" for file, line in _PLACE.findall(location)]
    own = [place for place in places if "-packages/" not in place]
    return next(iter(own or places), "")


def _operand(value: Any) -> str:
    return str(value.get_name()) if hasattr(value, "get_name") else ""


def _symbol(operation: Any) -> str:
    from jaxlib.mlir import ir

    return ir.StringAttr(operation.attributes["sym_name"]).value if "sym_name" in operation.attributes else ""


def _as_type(text: str) -> str:
    """Return an MLIR type as jax writes it: ``f32[8,128]``."""
    found = _TENSOR.fullmatch(text)
    return f"{found[2]}[{','.join(found[1].split('x')[:-1])}]" if found else text


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}\N{HORIZONTAL ELLIPSIS}"
