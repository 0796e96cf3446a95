"""Compare the operations of two StableHLO programs, with advice for known causes."""

from __future__ import annotations

import difflib
import re
import struct
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xcache.cli.output import shortened
from xcache.cli.program_parts import Operation

# More differences than these help nobody.
_MOST_SHOWN = 3
# Comparing takes a time that grows with the square of the length; the first operations that differ tell most.
_MOST_COMPARED = 1500
_LONGEST, _LONGEST_VALUE = 160, 40
# Seconds before and after this moment in which a constant looks like a time.
_YEARS = 5 * 365 * 86400.0
# A moment may be in seconds, milliseconds or nanoseconds.
_PER_SECOND = (1.0, 1e3, 1e9)
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
_RANDOM = (
    "threefry",
    "random_bits",
    "rng_bit_generator",
    "random_wrap",
    "_normal",
    "_uniform",
    "_randint",
    "_bernoulli",
)

CODE = (
    "The arguments are the same, so the function itself does something else: its code, a static argument, or a Python"
    " value that it uses from outside has changed."
)
_SIZE = (
    "The arguments are the same, but an array inside the function has another size or dtype: a static argument, such as"
    " a shape, or a Python value that it uses from outside has changed. Keep it the same, or to a few sizes (buckets)."
)
_ORDER = (
    "The order comes from Python: a dict that was filled in another order, or a set, whose order is another one in each"
    " process. Go through sorted(...) instead."
)
_TIME = "It looks like a time. A program with the time in it is another one in each run; pass it as an argument."
_SEED = "It looks like a random seed. Pass the key as an argument: make jax.random.key(seed) outside of jit."
_NUMBER = (
    "A Python number was built into the program. Pass it as an argument of the function instead of closing over it or"
    " naming it in static_argnums, and all values share an executable. (For optimizers: optax.inject_hyperparams.)"
)
_ARRAY = (
    "An array was built into the program, such as a NumPy array that the function uses from outside. Pass it as an"
    " argument, and all values share an executable."
)
_PRECISION = "The precision of products differs: jax_default_matmul_precision, or the argument `precision`."
_X64 = "Only 32 and 64 bits differ: jax_enable_x64 (JAX_ENABLE_X64), or the dtype of something inside the function."
X64_OF_INPUT = "One of the runs uses jax_enable_x64 (JAX_ENABLE_X64) or another dtype of the input."
RNG = "Random numbers are made in another way: jax_default_prng_impl or jax_threefry_partitionable."
# A setting of jax changes programs of many functions.
OF_SETTINGS = frozenset((_PRECISION, _X64, X64_OF_INPUT, RNG))


_LOOP = (
    "It bounds a loop. The length of jax.lax.scan is a part of the program: keep it the same, or to a few lengths."
    " jax.lax.fori_loop and while_loop take bounds that are arguments of the function."
)
# The comparison that ends a loop, by jax's path to it.
_ENDS_LOOP = re.compile(r"\bwhile/cond/")
# Words of the ways to make random numbers.
_GENERATORS = ("threefry", "rng_bit_generator")


class Difference(NamedTuple):
    """Something in which two programs differ, and what to do about it, if that is known."""

    text: str
    advice: str = ""
    # The numbers and names of the arguments that it is about, if they have names.
    arguments: tuple[tuple[int, str], ...] = ()


def differences(here: Sequence[Operation], there: Sequence[Operation]) -> Iterator[Difference]:
    """Yield the parts in which the operations of two programs differ."""
    in_mine, in_theirs = _between_same_ends([each.essence for each in here], [each.essence for each in there])
    mine, theirs = here[in_mine], there[in_theirs]
    if not mine and not theirs:
        yield from _of_operands(here, there)
    elif Counter(each.essence for each in mine) == Counter(each.essence for each in theirs):
        yield Difference(f"the same operations come in another order{mine[0].at}", _ORDER)
    else:
        parts = [*_parts(mine[:_MOST_COMPARED], theirs[:_MOST_COMPARED])]
        counts = Counter(each for part in parts for each in _of_part(*part))
        found = [each._replace(text=f"{each.text}{_times(count)}") for each, count in counts.items()]
        differing = [each for part in parts for side in part for each in side]
        # Code that jax makes for random numbers calls functions of other names, too.
        generators = [_generators(each) for each in (here, there)]
        # The same operations of another size make more or fewer numbers, and in the same way.
        is_size = all([each.name for each in mine] == [each.name for each in theirs] for mine, theirs in parts)
        if (all(generators) and generators[0] != generators[1]) or (
            not is_size
            and any(map(_is_random, differing))
            and all(_is_random(each) or each.function != "main" for each in differing)
            and any(each.advice != _SIZE for each in found)
        ):
            found = [each._replace(advice=RNG) if each.advice in ("", _SIZE) else each for each in found]
        # The general advice is said once, and only if there is no better one.
        said = {CODE} if any(each.advice for each in found) else set()
        for each in found[:_MOST_SHOWN]:
            advice = each.advice or CODE
            yield each._replace(advice="" if advice in said else advice)
            said.add(advice)
        if max(len(mine), len(theirs)) > _MOST_COMPARED:
            yield Difference("and perhaps more: only the first operations that differ were compared")
        elif len(found) > _MOST_SHOWN:
            yield Difference(f"and {len(found) - _MOST_SHOWN} more parts of the program")


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


def _of_part(mine: Sequence[Operation], theirs: Sequence[Operation]) -> Iterator[Difference]:
    if [each.name for each in mine] == [each.name for each in theirs]:
        for one, other in zip(mine, theirs, strict=True):
            if one.essence != other.essence:
                yield _of_pair(one, other)
    elif not theirs:
        yield Difference(f"only here: {_listed(mine)}")
    elif not mine:
        yield Difference(f"only in the stored program: {_listed(theirs)}")
    else:
        yield Difference(f"{_listed(mine)} here, {_listed(theirs)} in the stored program")


def _of_pair(one: Operation, other: Operation) -> Difference:
    """Compare two operations of the same name."""
    if one.types != other.types:
        if _in_32_bits(one.types) == _in_32_bits(other.types):
            return Difference(f"{_named(one)} gives {one.types} here, {other.types} in the stored program", _X64)
        return Difference(f"{_named(one)} gives {one.types} here, {other.types} in the stored program", _SIZE)
    if one.is_constant:
        values = [_value(each.content, each.types) for each in (one, other)]
        if values[0] == values[1] and None not in (numbers := [_number(each.content) for each in (one, other)]):
            # Times of two runs have the first digits in common.
            values = [repr(number) for number in numbers]
        if values[0] == values[1]:
            text = f"a constant of type {one.types}{one.at} has other values here than in the stored program"
        else:
            text = f"a constant of type {one.types}{one.at} is {values[0]} here, {values[1]} in the stored program"
        return Difference(text, _on_constants(one, other))
    names = [name for name in {**one.attributes, **other.attributes}
             if one.attributes.get(name) != other.attributes.get(name)]  # fmt: skip
    mine, theirs = (
        shortened(", ".join(f"{name} = {each.attributes.get(name, 'none')}" for name in names), _LONGEST)
        for each in (one, other)
    )
    advice = _PRECISION if any("precision" in name or name == "algorithm" for name in names) else ""
    return Difference(f"{_named(one)} has {mine} here, {theirs} in the stored program", advice)


def _named(operation: Operation) -> str:
    return f"{operation.short_name}{operation.at}"


def _in_32_bits(types: str) -> str:
    return re.sub(r"\b(u?[fi])64\b", r"\g<1>32", types)


def _on_constants(one: Operation, other: Operation) -> str:
    numbers = [_number(each.content) for each in (one, other)]
    if None in numbers:
        if "seed" in one.path:
            return _SEED
        return _NUMBER if one.types.endswith("[]") else _ARRAY
    if all(_is_time(number) for number in numbers):
        return _TIME
    if _ENDS_LOOP.search(one.path):
        return _LOOP
    # Seeds of people's choice are small, those of programs large.
    if "seed" in one.path or all(number.is_integer() and abs(number) > 1e6 for number in numbers if number is not None):
        return _SEED
    return _NUMBER


def _generators(operations: Sequence[Operation]) -> set[str]:
    """Return in which ways a program makes random numbers."""
    return {
        word for word in _GENERATORS if any(word in f"{each.path} {each.function} {each.name}" for each in operations)
    }


def _is_random(operation: Operation) -> bool:
    return any(word in f"{operation.path} {operation.function} {operation.name}" for word in _RANDOM)


def _is_time(number: float | None) -> bool:
    return number is not None and any(abs(number / per - time.time()) < _YEARS for per in _PER_SECOND)


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
