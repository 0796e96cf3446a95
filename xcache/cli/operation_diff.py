"""Compare the operations of two StableHLO programs, with advice for known causes."""

from __future__ import annotations

import difflib
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from xcache.cli.output import counted, shortened
from xcache.cli.program_parts import Operation

# More differences than these help nobody.
_MOST_SHOWN = 3
# Comparing takes a time that grows with the square of the length; the first operations that differ tell most.
_MOST_COMPARED = 1500
_LONGEST, _LONGEST_VALUE = 160, 40
_SCALAR = re.compile(r"dense<([^\[\]\"<>]+)>")
# MLIR writes large arrays so, in the order of bytes of the processor.
_BYTES = re.compile(r'dense<"0x((?:[0-9A-Fa-f]{2})+)">')
_MOST_VALUES = 4
_FORMATS = {
    "f16": "e", "f32": "f", "f64": "d",
    "i8": "b", "i16": "h", "i32": "i", "i64": "q", "ui8": "B", "ui16": "H", "ui32": "I", "ui64": "Q",
}  # fmt: skip
_FLOAT = re.compile(r"-?\d\.\d+E[+-]\d+", re.IGNORECASE)
# MLIR writes numbers that are not finite as their bits.
_NOT_FINITE = {
    **dict.fromkeys(("0x7FC00000", "0x7FF8000000000000", "0x7FC0", "0x7E00"), "nan"),
    **dict.fromkeys(("0x7F800000", "0x7FF0000000000000", "0x7F80", "0x7C00"), "inf"),
    **dict.fromkeys(("0xFF800000", "0xFFF0000000000000", "0xFF80", "0xFC00"), "-inf"),
}
# How operands and dimensions are numbered tells users nothing, nor does what is usual.
_HIDDEN = re.compile("dimension|DEFAULT")

CODE = (
    "The arguments are the same, so the function itself does something else: its code, a static argument (such as a"
    " shape), a Python value that it uses from outside, or a setting of jax has changed."
)
_ORDER = (
    "Python code puts them in this order: it was changed, or goes through a dict that was filled in another order, or"
    " through a set, whose order is another one in each process. sorted(...) keeps the order of a dict or set."
)
_NUMBER = (
    "Nothing else differs. A number that is built into the program is a part of it; one that is an argument of the"
    " function is not, and all its values share an executable. (For optimizers: optax.inject_hyperparams.)"
)
_ARRAY = (
    "Nothing else differs. An array that is built into the program, such as one that the function uses from outside, is"
    " a part of it; one that is an argument of the function is not, and all its values share an executable."
)
_LOOP = (
    "Nothing else differs. The number ends a loop: the length of jax.lax.scan is a part of the program, but the bounds"
    " of jax.lax.fori_loop and while_loop may be arguments of the function."
)
_PRECISION = (
    "Nothing else differs: jax_default_matmul_precision (or jax.default_matmul_precision), or the argument `precision`"
    " of an operation, has changed."
)
_PRECISION_NAMES = frozenset(("precision_config", "algorithm"))


class Difference(NamedTuple):
    """Something in which two programs differ, and what to do about it, if that is known."""

    text: str
    advice: str = ""
    # The numbers and names of the arguments that it is about, if they have names.
    arguments: tuple[tuple[int, str], ...] = ()


def differences(
    here: Sequence[Operation], there: Sequence[Operation], *, is_all: bool = False, after: bool = False
) -> Iterator[Difference]:
    """Yield the parts in which the operations of two programs differ.

    ``is_all``: nothing else of the programs differs. ``after``: other differences are told before, so that those of
    sizes alone, and that the function has changed, need not be told.
    """
    in_mine, in_theirs = _between_same_ends([each.essence for each in here], [each.essence for each in there])
    mine, theirs = here[in_mine], there[in_theirs]
    if not mine and not theirs:
        yield from _of_operands(here, there)
    elif Counter(each.essence for each in mine) == Counter(each.essence for each in theirs):
        yield Difference(f"the same operations come in another order{mine[0].at}", _ORDER)
    else:
        parts = [*_parts(mine[:_MOST_COMPARED], theirs[:_MOST_COMPARED])]
        is_cut = max(len(mine), len(theirs)) > _MOST_COMPARED
        is_all &= not is_cut and [(each.operands, each.callee) for each in here] == [
            (each.operands, each.callee) for each in there
        ]
        advice = (_on_all(parts) if is_all else "") or ("" if after else CODE)
        counts = Counter(each for part in parts if not (after and _is_of_sizes(*part)) for each in _of_part(*part))
        found = [f"{text}{_times(count)}" for text, count in counts.items()]
        for at, text in enumerate(found[:_MOST_SHOWN]):
            yield Difference(text, "" if at else advice)
        if is_cut:
            yield Difference("and perhaps more: only the first operations that differ were compared")
        elif len(found) > _MOST_SHOWN:
            yield Difference(f"and {counted(len(found) - _MOST_SHOWN, 'more part')} of the program")


def _on_all(parts: Iterable[tuple[Sequence[Operation], Sequence[Operation]]]) -> str:
    """Return the advice that holds if nothing but these parts differs; nothing if each calls for another one."""
    found = set()
    for mine, theirs in parts:
        if [(each.name, each.types) for each in mine] != [(each.name, each.types) for each in theirs]:
            return ""
        found |= {_on_pair(*pair) for pair in zip(mine, theirs, strict=True) if pair[0].essence != pair[1].essence}
    return found.pop() if len(found) == 1 else ""


def _is_of_sizes(mine: Sequence[Operation], theirs: Sequence[Operation]) -> bool:
    """Return whether two parts have the same operations, of other types, and constants that may follow from these."""
    return [each.name for each in mine] == [each.name for each in theirs] and any(
        one.types != other.types for one, other in zip(mine, theirs, strict=True)
    )


def _on_pair(one: Operation, other: Operation) -> str:
    """Return the advice on two operations of one name and type that differ."""
    if one.is_constant:
        if one.ends_loop and other.ends_loop:
            return _LOOP
        is_array = None in map(_number, (one.content, other.content)) and not one.types.endswith("[]")
        return _ARRAY if is_array else _NUMBER
    return _PRECISION if set(_changed(one, other)) <= _PRECISION_NAMES else ""


def _changed(one: Operation, other: Operation) -> list[str]:
    """Return the names of the attributes that differ."""
    return [name for name in {**one.attributes, **other.attributes}
            if one.attributes.get(name) != other.attributes.get(name)]  # fmt: skip


def _times(count: int) -> str:
    return f" ({count} times)" if count > 1 else ""


def _of_operands(here: Sequence[Operation], there: Sequence[Operation]) -> Iterator[Difference]:
    for one, other in zip(here, there, strict=True):
        if one.operands != other.operands:
            yield Difference(f"the operations are the same, but {_named(one)} takes other values", CODE)
            return


def _parts(
    here: Sequence[Operation], there: Sequence[Operation]
) -> Iterator[tuple[Sequence[Operation], Sequence[Operation]]]:
    """Yield the parts of two sequences that differ."""
    essences = [each.essence for each in here], [each.essence for each in there]
    for kind, a, b, c, d in difflib.SequenceMatcher(None, *essences, autojunk=False).get_opcodes():
        if kind != "equal":
            yield here[a:b], there[c:d]


def _between_same_ends(here: Sequence[object], there: Sequence[object]) -> tuple[slice, slice]:
    """Return the parts of two sequences between the beginnings and ends that are the same."""
    least = min(len(here), len(there))
    start = next((at for at in range(least) if here[at] != there[at]), least)
    end = next((at for at in range(least - start) if here[-1 - at] != there[-1 - at]), least - start)
    return slice(start, len(here) - end), slice(start, len(there) - end)


def _of_part(mine: Sequence[Operation], theirs: Sequence[Operation]) -> Iterator[str]:
    if [each.name for each in mine] == [each.name for each in theirs]:
        for one, other in zip(mine, theirs, strict=True):
            if one.essence != other.essence:
                yield _of_pair(one, other)
    elif not theirs:
        yield f"only here: {_listed(mine)}"
    elif not mine:
        yield f"only in the stored program: {_listed(theirs)}"
    else:
        yield f"{_listed(mine)} here, {_listed(theirs)} in the stored program"


def _of_pair(one: Operation, other: Operation) -> str:
    """Compare two operations of the same name."""
    if one.types != other.types:
        return f"{_named(one)} gives {one.types} here, {other.types} in the stored program"
    if one.is_constant:
        values = [_value(each.content, each.types) for each in (one, other)]
        if values[0] == values[1] and None not in (numbers := [_number(each.content) for each in (one, other)]):
            # Times of two runs have the first digits in common.
            values = [repr(number) for number in numbers]
        if values[0] == values[1]:
            return f"a constant of type {one.types}{one.at} has other values here than in the stored program"
        return f"a constant of type {one.types}{one.at} is {values[0]} here, {values[1]} in the stored program"
    mine, theirs = (
        shortened(", ".join(f"{name} = {each.attributes.get(name, 'none')}" for name in _changed(one, other)), _LONGEST)
        for each in (one, other)
    )
    return f"{_named(one)} has {mine} here, {theirs} in the stored program"


def _named(operation: Operation) -> str:
    return f"{operation.short_name}{operation.at}"


def _value(content: str, types: str = "") -> str:
    """Return a constant as one would write it in Python, or the beginning of one that is long."""
    if found := _BYTES.match(content):
        return _unpacked(found[1], types.partition("[")[0])
    number = _number(content)
    if number is not None:
        return f"{number:g}" if abs(number) < 1e6 or not number.is_integer() else f"{number:.0f}"
    numbers = _FLOAT.sub(lambda found: f"{float(found[0]):g}", content.removeprefix("dense<").removesuffix(">"))
    return shortened(numbers, _LONGEST_VALUE)


def _unpacked(digits: str, kind: str) -> str:
    """Return the first values of an array whose bytes stand in the program, as that of more than a hundred values."""
    if kind not in _FORMATS:
        return f"an array of bytes {digits[:8]}..."
    item = struct.Struct(f"<{_FORMATS[kind]}")
    most = item.size * _MOST_VALUES
    numbers = [number for (number,) in item.iter_unpack(bytes.fromhex(digits[: 2 * most]))]
    return f"[{', '.join(f'{number:g}' if isinstance(number, float) else str(number) for number in numbers)}, ...]"


def _number(content: str) -> float | None:
    found = _SCALAR.fullmatch(content)
    try:
        return float(_NOT_FINITE.get(found[1], found[1])) if found else None
    except ValueError:
        return None


def _listed(operations: Sequence[Operation]) -> str:
    shown = ", ".join(f"{_in_words(each)}{each.at}" for each in operations[:2])
    return f"{shown} and {len(operations) - 2} more" if len(operations) > 2 else shown


def _in_words(operation: Operation) -> str:
    """Return an operation with its attributes and types."""
    if operation.is_constant:
        shown = _value(operation.content, operation.types)
    else:
        named = operation.attributes.items()
        shown = ", ".join(f"{name} = {text}" for name, text in named if not _HIDDEN.search(f"{name} {text}"))
    types = f" : {operation.types}" if operation.types else ""
    return shortened(f"{operation.short_name}{shown and ' '}{shown}{types}", _LONGEST)
