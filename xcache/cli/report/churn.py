"""Functions that were compiled for many shapes, and the sizes that varied.

Nothing here says what to do: whether padding keeps a function's results, and what the added elements cost when it runs,
is not known.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from xcache.wire.ledger import LEFT_OUT

# More arguments that vary together are counted, not named.
_MOST_NAMED = 3
_SMALL_SECONDS = 0.1
_MOST_LEAVES = 10_000
_LEFT_OUT = re.compile(re.escape(LEFT_OUT).replace(r"\{\}", r"(\d+)"))
_TYPE = re.compile(r"(?:(\d+) x )?([^\[\], ]+)\[([\d,]*)\]( weak)?")

Position = tuple[int, int]


class Leaf(NamedTuple):
    """The type of one argument; ``dimensions`` is None if its text is not that of an array."""

    kind: str
    dimensions: tuple[int, ...] | None


class Use(NamedTuple):
    """A run got a function for some shapes: by a compile or from the cache."""

    run: int
    shapes: str
    is_compiled: bool
    seconds: float
    # The place of the program among those of its run.
    position: int = 0


class Axis(NamedTuple):
    """A size that varies: the dimensions that have it, those that grow with it, and the size for each shapes text."""

    places: tuple[Position, ...]
    followers: tuple[Position, ...]
    sizes: dict[str, int]

    def where(self, names: Mapping[int, str]) -> str:
        """Return words for the dimensions; ``names`` are those of arguments, as far as they are known."""
        leaves, dimensions = ({place[at] for place in self.places} for at in (0, 1))
        if 1 < len(leaves) <= _MOST_NAMED and len(dimensions) == 1 and not self.followers and leaves <= names.keys():
            numbers = sorted(leaves)
            return (
                f"dimension {self.places[0][1]} of {_listed([names[number] for number in numbers])}"
                f" (arguments {_listed([*map(str, numbers)])})"
            )
        leaf, dimension = next((place for place in self.places if place[0] in names), self.places[0])
        more = len(self.places) + len(self.followers) - 1
        others = f" and {more} more that {'vary' if more > 1 else 'varies'} with it" if more else ""
        name = f"{names[leaf]} (argument {leaf})" if leaf in names else f"argument {leaf}"
        return f"dimension {dimension} of {name}{others}"


class Churn(NamedTuple):
    """A function that was compiled for several shapes; what else had it compiled does not count."""

    program: str
    module_name: str
    site: str
    shapes: int
    compiled: tuple[Use, ...]
    # Compiles, and loads from the cache.
    uses: int
    seconds: float
    runs: int
    axes: tuple[Axis, ...]
    # By shapes text: seconds of all its uses.
    cost: dict[str, float]

    @property
    def is_small(self) -> bool:
        """Whether it is as quick to compile as a single operation, which is better put into a larger function."""
        return self.seconds < _SMALL_SECONDS * self.uses

    @property
    def compiles(self) -> int:
        """How often it was compiled."""
        return len(self.compiled)


def _listed(texts: Sequence[str]) -> str:
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def parse(shapes: str) -> tuple[Leaf, ...]:
    """Return the types that a row's text lists; counted ones are repeated."""
    leaves: list[Leaf] = []
    for piece in shapes.split(", "):
        found, left_out = _TYPE.fullmatch(piece), _LEFT_OUT.fullmatch(piece)
        if left_out:
            leaves += [Leaf("", None)] * min(int(left_out[1]), _MOST_LEAVES - len(leaves))
        elif found is None:
            leaves.append(Leaf(piece, None))
        else:
            dimensions = tuple(int(size) for size in found[3].split(",") if size)
            count = min(int(found[1] or 1), _MOST_LEAVES - len(leaves))
            leaves += [Leaf(found[2] + (found[4] or ""), dimensions)] * count
    return tuple(leaves)


def of_functions(functions: Mapping[tuple[str, str, str], Sequence[Use]]) -> list[Churn]:
    """Return the functions that were compiled for several shapes, the dearest first.

    ``functions`` holds the uses in the order of time, by program, module name and call site.
    """
    churns = []
    for (program, module_name, site), uses in functions.items():
        # Functions of other kinds and numbers of arguments share a name.
        by_structure: defaultdict[object, list[Use]] = defaultdict(list)
        parsed = {use.shapes: parse(use.shapes) for use in uses}
        for use in uses:
            leaves = parsed[use.shapes]
            structure = tuple((leaf.kind, None if leaf.dimensions is None else len(leaf.dimensions)) for leaf in leaves)
            by_structure[structure].append(use)
        churns += [
            _churn(program, module_name, site, alike, parsed)
            for alike in by_structure.values()
            if len({use.shapes for use in alike if use.is_compiled}) > 1
        ]
    return sorted(churns, key=lambda churn: -churn.seconds)


def _churn(
    program: str, module_name: str, site: str, uses: Sequence[Use], parsed: Mapping[str, tuple[Leaf, ...]]
) -> Churn:
    cost: defaultdict[str, float] = defaultdict(float)
    for use in uses:
        cost[use.shapes] += use.seconds
    variants = {shapes: parsed[shapes] for shapes in cost}
    compiled = tuple(use for use in uses if use.is_compiled)
    return Churn(
        *(program, module_name, site, len(cost), compiled, len(uses)),
        *(sum(cost.values()), len({use.run for use in uses}), axes_of(variants), dict(cost)),
    )


def axes_of(variants: Mapping[str, Sequence[Leaf]]) -> tuple[Axis, ...]:
    """Return the sizes that vary among shapes of one structure; those that vary together are one axis."""
    by_sizes: defaultdict[tuple[int, ...], list[Position]] = defaultdict(list)
    for number, leaves in enumerate(zip(*variants.values(), strict=True)):
        dimensions = [leaf.dimensions or () for leaf in leaves]
        for dimension, sizes in enumerate(zip(*dimensions, strict=True)):
            if len(set(sizes)) > 1:
                by_sizes[sizes].append((number, dimension))
    leading: list[tuple[tuple[int, ...], list[Position]]] = []
    # The one with most sizes leads.
    for sizes, places in sorted(by_sizes.items(), key=lambda item: -len(set(item[0]))):
        followers = next((others for leader, others in leading if _follows(sizes, leader)), None)
        if followers is None:
            leading.append((sizes, []))
        else:
            followers += places
    return tuple(
        Axis(tuple(by_sizes[sizes]), tuple(followers), dict(zip(variants, sizes, strict=True)))
        for sizes, followers in leading
    )


def _follows(sizes: Sequence[int], leading: Sequence[int]) -> bool:
    """Return whether sizes are known from the leading ones, and grow with them."""
    pairs = sorted(set(zip(leading, sizes, strict=True)))
    return len(pairs) == len(set(leading)) and all(a[1] <= b[1] for a, b in itertools.pairwise(pairs))
