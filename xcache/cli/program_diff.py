"""Compare two StableHLO programs: their arguments, results, meshes and names, with advice for known causes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from xcache.cli import operation_diff
from xcache.cli.operation_diff import Difference
from xcache.cli.output import counted, shortened
from xcache.cli.program_parts import Operation, Program, Value, read, without_numbers

__all__ = ["Difference", "differences", "from_shapes", "of_arguments", "read"]

# Names of arguments that one line lists.
_MOST_NAMED = 3
# Arguments that are given by number and name.
_MOST_GIVEN = 16
_LONGEST, _LONGEST_NAME = 160, 60
_DONATION = ("tf.aliasing_output", "jax.buffer_donor")
_SHARDING = ("sdy.sharding", "mhlo.sharding")
_MEMORY = ("mhlo.memory_kind",)
_LAYOUT = ("mhlo.layout_mode",)
_PARTITIONS, _REPLICAS = "mhlo.num_partitions", "mhlo.num_replicas"
_EMPTY_MESH = "#sdy.mesh<[]>"
_AXIS = re.compile(r'"([^"]+)"=(\d+)')
# As hook/stages.py writes them.
_SHAPES = re.compile(r"(?:(\d+) x )?([^\s,\[]+\[[\d,]*\])( weak)?")
_DIMENSION = re.compile(r"\{([^{}]*)\}")

NOT_OURS = "This should not have missed. Please report it, with the output of `xcache show KEY --program` of both."
_MESH = "Each mesh and number of devices needs an executable of its own; keep them the same in all runs."
_DONATED = "Give jax.jit the same donate_argnums and donate_argnames in all runs, and arrays that can be donated."
TYPED = (
    "Each type and shape of the arguments needs an executable of its own; what is compiled now serves the next runs."
)
# What says why, and not what to do.
EXPLANATIONS = (TYPED, operation_diff.CODE)
_SHARDED = "Place the arrays in the same way in all runs: jax.device_put, in_shardings, or the mesh in use."


class _Change(NamedTuple):
    """One argument or result that differs: in a way that several may share, and in words for it alone."""

    number: int
    name: str
    together: str
    alone: str
    advice: str


_Compare = Callable[[int, Value, Value], _Change | None]


def differences(here: Program, there: Program) -> list[Difference]:
    """Return in what two programs differ, the most telling first."""
    found = _apart_from_names(here, there) or [*_of_names(here, there)]
    return found or [Difference("no part of the two programs differs", NOT_OURS)]


def is_renamed(here: Program, there: Program) -> bool:
    """Return whether two programs do the same under other names."""
    return here.name != there.name and not _apart_from_names(here, there)


def _apart_from_names(here: Program, there: Program) -> list[Difference]:
    found = [*_of_meshes(here, there)]
    # Without axes with names, the text of a sharding has the number of devices in it.
    compared = _WITHOUT_SHARDINGS if found else _ALL
    of_arguments = _of_values("argument", here.arguments, there.arguments, compared)
    # A program that divides its data among the devices has other shapes on another number of them.
    is_divided = _device_count(here) != _device_count(there)
    found += [each._replace(advice="") for each in of_arguments] if is_divided else of_arguments
    if found:
        # Other arguments and meshes change the results and operations, too.
        return found
    if len(here.results) != len(there.results):
        found += _of_values("result", here.results, there.results, _ALL)
        return [*found, *operation_diff.differences(*map(_without_return, (here, there)), after=True)]
    of_types = _of_values("result", here.results, there.results, (_of_types,))
    found = [each._replace(advice="" if at else operation_diff.CODE) for at, each in enumerate(of_types)]
    is_all = not found and not [*_of_names(here, there)]
    found += operation_diff.differences(here.operations, there.operations, is_all=is_all, after=bool(found))
    return found or [*_of_values("result", here.results, there.results, _ALL)]


def of_arguments(here: Sequence[Value], there: Sequence[Value], without: Collection[int] = ()) -> list[Difference]:
    """Return in what the arguments of two programs differ, but for those of some numbers."""
    return [*_of_values("argument", here, there, _ALL, without)]


def _without_return(program: Program) -> list[Operation]:
    return [each for each in program.operations if (each.name, each.function) != ("func.return", "main")]


def _of_meshes(here: Program, there: Program) -> Iterator[Difference]:
    counts = [_device_count(each) for each in (here, there)]
    # The types of random keys bring an empty mesh along.
    meshes = [", ".join(_mesh(mesh) for mesh in each.meshes if mesh != _EMPTY_MESH) or "none" for each in (here, there)]
    if counts[0] != counts[1]:
        yield Difference(
            f"it runs on {counted(counts[0], 'device')} here, on {counted(counts[1], 'device')} in the stored program",
            _MESH,
        )
    elif meshes[0] != meshes[1]:
        yield Difference(f"its mesh is {meshes[0]} here, {meshes[1]} in the stored program", _MESH)


def _device_count(program: Program) -> int:
    counts = [program.settings.get(name, "1").partition(" ")[0] for name in (_PARTITIONS, _REPLICAS)]
    return math.prod(int(count) if count.isdecimal() else 1 for count in counts)


def _mesh(text: str) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in _AXIS.findall(text))
    return f"({axes})" if axes else text


def _of_values(
    what: str,
    here: Sequence[Value],
    there: Sequence[Value],
    compared: Sequence[_Compare],
    without: Collection[int] = (),
) -> Iterator[Difference]:
    if len(here) != len(there):
        advice = (
            "The structure of the arguments has changed, such as a field that is None in one run; or the function uses"
            " an argument in one run only: jax drops those that are not used."
        )
        if what == "result":
            advice = "The function returns another structure: return the same arrays in all runs."
        mine, theirs = _only("here", here, there), _only("there", there, here)
        text = f"it has {counted(len(here), what)} here{mine}, {len(there)} in the stored program{theirs}"
        yield Difference(text, advice)
        return
    for change in compared:
        pairs = (each for each in enumerate(zip(here, there, strict=True)) if each[0] not in without)
        yield from _grouped(what, [found for at, (one, other) in pairs if (found := change(at, one, other))])


def _only(where: str, values: Sequence[Value], others: Sequence[Value]) -> str:
    """Return the names that only one of two programs has, if both have names."""
    only = [each.name for each in values if each.name and each.name not in {other.name for other in others}]
    return f" (only {where}: {_listed(only)})" if only and any(each.name for each in others) else ""


def _grouped(what: str, changes: Sequence[_Change]) -> Iterator[Difference]:
    groups: defaultdict[str, list[_Change]] = defaultdict(list)
    for change in changes:
        groups[change.together].append(change)
    for together, group in groups.items():
        first, names = group[0], [each.name or str(each.number) for each in group]
        # jax calls the only result so.
        named = f" ({shortened(first.name, _LONGEST_NAME)})" if first.name not in ("", what) else ""
        text = f"{what} {first.number}{named} {first.alone}" if len(group) == 1 else (
            f"{len(group)} {what}s ({_listed(names)}) {together}"
        )  # fmt: skip
        of_them = tuple((each.number, each.name) for each in group if each.name) if what == "argument" else ()
        yield Difference(text, first.advice, of_them[:_MOST_GIVEN])


def _listed(names: Sequence[str]) -> str:
    shown = [shortened(name, _LONGEST_NAME) for name in names[:_MOST_NAMED]]
    return ", ".join(shown) + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")


def _of_types(number: int, one: Value, other: Value) -> _Change | None:
    if one.type == other.type:
        return None
    alone = f"is {one.type} here, {other.type} in the stored program"
    sizes = {*zip(one.shape, other.shape, strict=False)} - {(size, size) for size in one.shape}
    together = alone.replace("is", "are", 1)
    if one.shape == other.shape:
        together = f"have the type {one.kind} here, {other.kind} in the stored program"
    elif one.kind == other.kind and len(one.shape) == len(other.shape) and len(sizes) == 1:
        ((mine, theirs),) = sizes
        together = f"differ in a dimension: {mine} here, {theirs} in the stored program"
    return _Change(number, one.name, together, alone, TYPED)


def _of_facts(of: str, names: Sequence[str]) -> _Compare:
    """Return a function that compares certain attributes of two values."""
    advice = {"donation": _DONATED, "sharding": _SHARDED, "memory": _SHARDED}.get(of, "")

    def compare(number: int, one: Value, other: Value) -> _Change | None:
        mine, theirs = ([value.facts.get(name, "") for name in names] for value in (one, other))
        if of == "donation":
            mine, theirs = ([str(any(facts))] for facts in (mine, theirs))
        if mine == theirs:
            return None
        if of == "donation":
            alone = "is donated here, but not in the stored program"
            if mine == ["False"]:
                alone = "is donated in the stored program, but not here"
            return _Change(number, one.name, alone.replace("is", "are", 1), alone, advice)
        shown = [", ".join(map(_spec, filter(None, each))) or "none" for each in (mine, theirs)]
        alone = f"has the {of} {shown[0]} here, {shown[1]} in the stored program"
        return _Change(number, one.name, alone.replace("has", "have", 1), alone, advice)

    return compare


_WITHOUT_SHARDINGS = (
    _of_types, _of_facts("donation", _DONATION), _of_facts("memory", _MEMORY), _of_facts("layout", _LAYOUT)
)  # fmt: skip
_ALL = (*_WITHOUT_SHARDINGS, _of_facts("sharding", _SHARDING))


def _spec(text: str) -> str:
    """Return a sharding as jax writes partitions, P('x', None), if it is one of named axes."""
    if "<@" not in text:
        return shortened(text.strip('"'), _LONGEST)
    axes = [dimension.replace('"', "'").strip() for dimension in _DIMENSION.findall(text)]
    return f"P({', '.join(f'({each})' if ', ' in each else each or 'None' for each in axes)})"


def _of_names(here: Program, there: Program) -> Iterator[Difference]:
    """Yield the names in which two programs differ that do the same."""
    advice = "Names are a part of the program, so a new name costs one compile; the next runs have it again."
    if here.name != there.name:
        yield Difference(f"only the function's name has changed: {here.name} here, {there.name} before", advice)
    for number, (one, other) in enumerate(zip(here.results, there.results, strict=True)):
        if one.name != other.name:
            text = f"only the name of result {number} has changed: {one.name} here, {other.name} in the stored program"
            yield Difference(text, advice)
            break
    if here.symbols != there.symbols:
        mine, theirs = without_numbers(here.symbols), without_numbers(there.symbols)
        if sorted(mine) == sorted(theirs):
            yield Difference("only the numbers in the names of inner functions differ", NOT_OURS)
        else:
            only = [sorted(set(names) - set(others)) for names, others in ((mine, theirs), (theirs, mine))]
            text = f"only the names of inner functions have changed: {_listed(only[0])} here, {_listed(only[1])} before"
            yield Difference(text, advice)
    for name in sorted({*here.settings, *there.settings} - {_PARTITIONS, _REPLICAS}):
        values = [shortened(program.settings.get(name, "none"), _LONGEST) for program in (here, there)]
        if values[0] != values[1]:
            yield Difference(f"the module's {name} is {values[0]} here, {values[1]} in the stored program")


def from_shapes(shapes: str) -> list[Value]:
    """Return arguments from their types as the ledger has them; ``weak`` is a fact of those that are weakly typed."""
    found: list[Value] = []
    for count, kind, weak in _SHAPES.findall(shapes):
        found += [Value(kind, "", {"weak": weak} if weak else {})] * int(count or 1)
    return found
