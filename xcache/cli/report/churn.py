"""The shape-churn advisor: functions that were compiled for many shapes, and what fewer shapes would have saved.

The answer comes from a replay of the ledger: each run gets each function for the sizes that a plan leaves, and pays
what the recorded runs paid for a compile or a load of that function.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from xcache.wire.ledger import LEFT_OUT

# A plan that adds more elements than this is proposed only if no other one saves anything.
_MOST_PADDING = 1 / 3
# Sizes that vary in more independent ways than this are a model's own; padding them makes no sense.
_MOST_AXES = 3
_MOST_SIZES = 4
# More arguments that vary together are counted, not named.
_MOST_NAMED = 3
_SMALL_SECONDS = 0.1
# Savings below this are noise.
_LEAST_SAVED = 0.05
# The cost of choosing sizes grows with the square of their number.
_MOST_CHOSEN_FROM = 250
_MOST_LEAVES = 10_000
_LEFT_OUT = re.compile(re.escape(LEFT_OUT).replace(r"\{\}", r"(\d+)"))
_TYPE = re.compile(r"(?:(\d+) x )?([^\[\], ]+)\[([\d,]*)\]( weak)?")

Position = tuple[int, int]
Assignment = Callable[[str], tuple[int, ...]]


class Leaf(NamedTuple):
    """The type of one argument; ``dimensions`` is None if its text is not that of an array."""

    kind: str
    dimensions: tuple[int, ...] | None


class Use(NamedTuple):
    """A run got a function for some shapes: by a compile or from the cache."""

    run: int
    shapes: str
    is_compiled: bool
    # Whether it was compiled because these shapes were new, and not for a reason that fewer shapes would not remove.
    is_new: bool
    seconds: float
    # The cost if the executable had been in the store.
    seconds_if_found: float


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


class Plan(NamedTuple):
    """A choice of sizes to pad to, and what it would have done in the recorded runs."""

    name: str
    # For each axis.
    sizes: tuple[tuple[int, ...], ...]
    programs: int
    saved_seconds: float
    # Elements added, as a share of those there are, each shape counted once.
    padding: float


class Churn(NamedTuple):
    """A function that was compiled for several shapes."""

    program: str
    module_name: str
    site: str
    shapes: int
    compiles: int
    # Compiles, and loads from the cache.
    uses: int
    seconds: float
    runs: int
    axes: tuple[Axis, ...]
    # By shapes text: seconds of all its uses.
    cost: dict[str, float]
    plans: tuple[Plan, ...]
    best: Plan | None

    @property
    def is_small(self) -> bool:
        """Whether it is as quick to compile as a single operation, which is better put into a larger function."""
        return self.seconds < _SMALL_SECONDS * self.uses


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


def advise(functions: Mapping[tuple[str, str, str], Sequence[Use]]) -> list[Churn]:
    """Return the functions that were compiled for several shapes, the dearest first.

    ``functions`` holds the uses in the order of time, by program, module name and call site.
    """
    found = []
    for (program, module_name, site), uses in functions.items():
        # Functions of other kinds and numbers of arguments share a name; no padding makes one of them.
        by_structure: defaultdict[object, list[Use]] = defaultdict(list)
        parsed = {use.shapes: parse(use.shapes) for use in uses}
        for use in uses:
            leaves = parsed[use.shapes]
            structure = tuple((leaf.kind, None if leaf.dimensions is None else len(leaf.dimensions)) for leaf in leaves)
            by_structure[structure].append(use)
        found += [
            _churn(program, module_name, site, alike, parsed)
            for alike in by_structure.values()
            if len({use.shapes for use in alike if use.is_compiled}) > 1
        ]
    return sorted(found, key=lambda churn: -churn.seconds)


def _churn(
    program: str, module_name: str, site: str, uses: Sequence[Use], parsed: Mapping[str, tuple[Leaf, ...]]
) -> Churn:
    cost: defaultdict[str, float] = defaultdict(float)
    for use in uses:
        cost[use.shapes] += use.seconds
    variants = {shapes: parsed[shapes] for shapes in cost}
    axes = axes_of(variants)
    plans = plans_for(uses, variants, axes) if 0 < len(axes) <= _MOST_AXES else ()
    return Churn(
        *(program, module_name, site, len(cost), sum(use.is_compiled for use in uses), len(uses)),
        *(sum(cost.values()), len({use.run for use in uses}), axes, dict(cost), plans, best_of(plans)),
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


def plans_for(uses: Sequence[Use], variants: Mapping[str, Sequence[Leaf]], axes: Sequence[Axis]) -> tuple[Plan, ...]:
    """Return what some choices of sizes would have saved, those that save most first."""
    choices: dict[tuple[tuple[int, ...], ...], str] = {}

    def add(name: str, choose: Callable[[list[int]], tuple[int, ...]]) -> None:
        sizes = tuple(choose(sorted(set(axis.sizes.values()))) for axis in axes)
        # These would change nothing.
        if any(set(chosen) != set(axis.sizes.values()) for axis, chosen in zip(axes, sizes, strict=True)):
            choices.setdefault(sizes, name)

    add("pad to the largest", lambda sizes: (sizes[-1],))
    for count in range(2, _MOST_SIZES + 1):
        add(f"{count} sizes" + (" of each" if len(axes) > 1 else ""), lambda sizes, count=count: buckets(sizes, count))  # type: ignore[misc]
    add("powers of two", powers_of_two)
    found = []
    for sizes, name in choices.items():
        places = {shapes: _padded(shapes, axes, sizes) for shapes in variants}
        after = replayed(uses, places.__getitem__)
        saved = sum(use.seconds for use in uses) - after
        padding = _padding(variants, axes, places)
        found.append(Plan(name, sizes, len(set(places.values())), saved, padding))
    return tuple(sorted(found, key=lambda plan: -plan.saved_seconds))


def best_of(plans: Iterable[Plan]) -> Plan | None:
    """Return the plan to propose: the one that saves most without much padding; None if none saves anything."""
    saving = [plan for plan in plans if plan.saved_seconds >= _LEAST_SAVED]
    cheap = [plan for plan in saving if plan.padding <= _MOST_PADDING]
    if cheap:
        return max(cheap, key=lambda plan: (plan.saved_seconds, -plan.padding))
    return min(saving, key=lambda plan: plan.padding, default=None)


def replayed(uses: Sequence[Use], place_of: Assignment) -> float:
    """Return the seconds that the runs would have taken, had each used the padded shapes."""
    by_place: defaultdict[tuple[int, ...], list[Use]] = defaultdict(list)
    for use in uses:
        by_place[place_of(use.shapes)].append(use)
    total = 0.0
    for alike in by_place.values():
        # A padded program costs what the dearest of those it replaces did.
        to_find = max(use.seconds_if_found for use in alike)
        to_compile = max((use.seconds for use in alike if use.is_compiled), default=to_find)
        is_stored = False
        for _, in_run in itertools.groupby(alike, key=lambda use: use.run):
            these = list(in_run)
            # A run that compiled the same shapes several times had other reasons, which padding does not remove.
            programs = max(Counter(use.shapes for use in these).values())
            is_stored |= not all(use.is_compiled for use in these)
            is_found = is_stored and all(use.is_new or not use.is_compiled for use in these)
            total += programs * (to_find if is_found else to_compile)
            is_stored = True
    return total


def buckets(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Return at most ``count`` of the ascending sizes, so that padding each to the next of them adds least."""
    if len(sizes) <= count:
        return tuple(sizes)
    if len(sizes) > _MOST_CHOSEN_FROM:
        step = math.ceil(len(sizes) / _MOST_CHOSEN_FROM)
        # From the end, so that the largest stays.
        sizes = sizes[::-1][::step][::-1]
    sums = [0, *itertools.accumulate(sizes)]

    def added(first: int, last: int) -> int:
        return sizes[last] * (last - first + 1) - (sums[last + 1] - sums[first])

    # By the last size in it: least padding of the sizes up to there, and the buckets.
    best: list[tuple[int, tuple[int, ...]]] = [(added(0, last), (last,)) for last in range(len(sizes))]
    for _ in range(count - 1):
        best = [
            min(
                [best[last]]
                + [
                    (best[first - 1][0] + added(first, last), (*best[first - 1][1], last))
                    for first in range(1, last + 1)
                ]
            )
            for last in range(len(sizes))
        ]
    return tuple(sizes[place] for place in best[-1][1])


def powers_of_two(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the powers of two that the ascending sizes need; the largest size ends them."""
    largest = sizes[-1]
    return tuple(sorted({min(largest, 1 << max(0, size - 1).bit_length()) for size in sizes}))


def _padded(shapes: str, axes: Sequence[Axis], sizes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the size in each axis that shapes are padded to."""
    return tuple(
        next(size for size in chosen if size >= axis.sizes[shapes]) for axis, chosen in zip(axes, sizes, strict=True)
    )


def _padding(
    variants: Mapping[str, Sequence[Leaf]], axes: Sequence[Axis], places: Mapping[str, tuple[int, ...]]
) -> float:
    """Return the share of elements that padding adds to the arguments whose size varies."""
    varying = {leaf for axis in axes for leaf, _ in (*axis.places, *axis.followers)}
    # A size that follows another one is padded to the largest in its bucket.
    largest: defaultdict[tuple[int, int, Position], int] = defaultdict(int)
    for shapes, leaves in variants.items():
        for number, axis in enumerate(axes):
            for leaf, dimension in axis.followers:
                at = number, places[shapes][number], (leaf, dimension)
                largest[at] = max(largest[at], (leaves[leaf].dimensions or ())[dimension])
    before = after = 0
    for shapes, leaves in variants.items():
        padded = {leaf: [*(leaves[leaf].dimensions or ())] for leaf in varying}
        before += sum(math.prod(each) for each in padded.values())
        for number, axis in enumerate(axes):
            size = places[shapes][number]
            for leaf, dimension in axis.places:
                padded[leaf][dimension] = size
            for leaf, dimension in axis.followers:
                padded[leaf][dimension] = largest[number, size, (leaf, dimension)]
        after += sum(math.prod(each) for each in padded.values())
    return after / before - 1 if before else 0.0
