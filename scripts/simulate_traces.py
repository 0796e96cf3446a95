"""Requests to replay, made up from a seed."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Request(NamedTuple):
    """A program asks for a key; where nothing is stored it compiles for ``seconds`` and stores ``size`` bytes."""

    key: str
    size: int
    seconds: float


class Program(NamedTuple):
    """A program that people run again and again: each run asks for the same keys in the same order."""

    requests: tuple[Request, ...]


class Makers:
    """Makes up requests and programs. Sizes and times are spread as widely as those recorded from real programs."""

    def __init__(self, seed: str) -> None:
        self.choose = random.Random(seed)
        self._numbers = itertools.count()

    def small(self) -> Request:
        """Make an operation: some tens of kilobytes, some tens of milliseconds."""
        return self._request(14_000 * self.choose.lognormvariate(0, 0.7), 2.5e-6, 0.6)

    def large(self) -> Request:
        """Make a step function: hundreds of kilobytes to tens of megabytes, seconds to minutes."""
        return self._request(1_200_000 * self.choose.lognormvariate(0, 1.2), 4e-6, 0.9)

    def huge(self) -> Request:
        """Make an unrolled one, or one full of constants: hundreds of megabytes that compile no longer than others."""
        return self._request(150_000_000 * self.choose.lognormvariate(0, 0.6), 1.5e-7, 0.8)

    def program(self, small: int, large: int, huge: float = 0.0) -> Program:
        """Make a program that asks for about so many of each."""
        made = [self.small() for _ in range(self._about(small))] + [self.large() for _ in range(self._about(large))]
        if self.choose.random() < huge:
            made.append(self.huge())
        self.choose.shuffle(made)
        return Program(tuple(made))

    def popular(self, count: int, slope: float) -> Callable[[], int]:
        """Return a function that draws numbers below ``count``, the first ones most often (Zipf)."""
        weights = list(itertools.accumulate((n + 1) ** -slope for n in range(count)))
        return lambda: bisect.bisect(weights, self.choose.random() * weights[-1])

    def _request(self, size: float, seconds_for_each_byte: float, spread: float) -> Request:
        seconds = 0.01 + size * seconds_for_each_byte * self.choose.lognormvariate(0, spread)
        return Request(f"{next(self._numbers):x}", max(1000, int(size)), round(seconds, 4))

    def _about(self, count: int) -> int:
        return max(1, round(count * self.choose.lognormvariate(0, 0.4)))


def mixed(makers: Makers) -> Iterator[Request]:
    """Many small and few huge: programs of all kinds, some run every hour, most once in a while."""
    programs = [makers.program(25, 3, huge=0.08) for _ in range(250)]
    makers.choose.shuffle(programs)
    which = makers.popular(len(programs), 0.9)
    for _ in range(2600):
        yield from programs[which()].requests


def scans(makers: Makers) -> Iterator[Request]:
    """A working set, and sweeps over thousands of variants of which none is ever asked for again."""
    programs = [makers.program(25, 3) for _ in range(60)]
    which = makers.popular(len(programs), 0.7)
    for number in range(1800):
        yield from programs[which()].requests
        if number % 200 == 150:
            for _ in range(80):
                yield from makers.program(20, 3).requests


def shifting(makers: Makers) -> Iterator[Request]:
    """Projects come and go: each is edited, which changes some of its keys, and after some weeks is left alone."""
    projects = [makers.program(25, 3, huge=0.1) for _ in range(8)]
    for number in range(2400):
        if number % 75 == 74:
            projects[makers.choose.randrange(len(projects))] = makers.program(25, 3, huge=0.1)
        which = min(makers.popular(len(projects), 0.8)(), len(projects) - 1)
        if makers.choose.random() < 0.3:
            edited = list(projects[which].requests)
            for position in makers.choose.sample(range(len(edited)), 2):
                edited[position] = makers.large() if edited[position].size > 200_000 else makers.small()
            projects[which] = Program(tuple(edited))
        yield from projects[which].requests


def upgrades(makers: Makers) -> Iterator[Request]:
    """Every so often jaxlib is upgraded: all keys change, though some programs stay with the old one for a while."""
    shapes = [(makers.choose.randrange(10, 40), makers.choose.randrange(1, 6)) for _ in range(80)]
    current = [makers.program(*shape, huge=0.05) for shape in shapes]
    which = makers.popular(len(shapes), 0.7)
    late: dict[int, Program] = {}
    for number in range(2400):
        if number % 480 == 479:
            late = {n: current[n] for n in makers.choose.sample(range(len(shapes)), len(shapes) // 4)}
            current = [_again(makers, program) for program in current]
        if number % 480 == 160:
            late = {}
        n = which()
        yield from late.get(n, current[n]).requests


def _again(makers: Makers, program: Program) -> Program:
    """Return the same program under another toolchain: other keys, much the same sizes and times."""
    return Program(
        tuple(
            request._replace(
                key=f"{makers.small().key}",
                size=int(request.size * makers.choose.uniform(0.9, 1.1)),
                seconds=request.seconds * makers.choose.uniform(0.8, 1.2),
            )
            for request in program.requests
        )
    )


MADE_UP: dict[str, Callable[[Makers], Iterator[Request]]] = {
    "mixed": mixed,
    "scans": scans,
    "shifting": shifting,
    "upgrades": upgrades,
}


def make(name: str, seed: int) -> list[Request]:
    """Make a trace by its name, the same for the same seed."""
    return list(MADE_UP[name](Makers(f"{name} {seed}")))
