"""A program that compiles many small functions, one after the other, and what it cost; run with and without xcache."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import Place, new_place

COUNT = 40
# Waiting for each compile would cost half a minute and more; what is allowed leaves room for a machine that is busy.
TIMEOUT = "1s"
LOST_AT_MOST = 10.0

# What befalls it, a test inserts: before the first compile, and between the compiles.
PROGRAM = """
import atexit, dataclasses, json, os, resource, signal, sys, time
# Last of all that is done at exit: what xcache meets there is counted, too.
atexit.register(lambda: print(json.dumps([results, seconds, dataclasses.asdict(xcache.stats())])))
import jax, numpy as np
import xcache
x = np.arange(8.0, dtype=np.float32)
jax.jit(lambda v: v)(x)
{before}
results, started = [], time.monotonic()
for k in range({count}):
    {between}
    results.append(np.asarray(jax.jit(lambda v: v * k + 1)(x)).tolist())
seconds = time.monotonic() - started
{after}
"""


@dataclasses.dataclass
class Ran:
    """What one run of the program came to."""

    results: list[list[float]]
    in_the_loop: float
    in_all: float
    stats: dict[str, Any]
    stderr: str


@dataclasses.dataclass
class Reference:
    """A run without xcache, and the store that one with it leaves."""

    without: Ran
    store: Path


class Running:
    """The program, while it runs."""

    def __init__(
        self, place: Place, before: str = "", between: str = "pass", after: str = "", **environment: str
    ) -> None:
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(count=COUNT, before=before, between=between, after=after)],
            # What happens between two compiles would make no difference to a program that has everything already.
            env=place.env | {"XCACHE": "1", "XCACHE_TIMEOUT": TIMEOUT, "XCACHE_PREFETCH": "0"} | environment,
            cwd=place.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def ended(self) -> Ran:
        """Wait for its end, and hear what it says."""
        try:
            out, err = self._process.communicate(timeout=120)
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise
        assert self._process.returncode == 0, err[-4000:]
        # One line: nothing else is on its stdout.
        (line,) = out.splitlines()
        results, seconds, stats = json.loads(line)
        return Ran(results, seconds, time.monotonic() - self._started, stats, err)


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    """Made once: a run without xcache and a store with everything in it."""
    with new_place() as place:
        without = Running(place, XCACHE="0").ended()
        filled = Running(place).ended()
        assert (filled.results, filled.stats["errors"]) == (without.results, {})
        place.stop()
        yield Reference(without, place.dir)


@pytest.fixture
def warm(place: Place, reference: Reference) -> Place:
    """A place whose store has everything in it; its daemon does not run."""
    shutil.copytree(reference.store, place.dir)
    return place


def hardly_noticed(ran: Ran, reference: Reference) -> dict[str, int]:
    """It is right, lost little, and said one line for each kind of trouble; what it counted as trouble."""
    assert ran.results == reference.without.results
    assert ran.in_the_loop - reference.without.in_the_loop < LOST_AT_MOST
    assert ran.in_all - reference.without.in_all < LOST_AT_MOST
    stats = ran.stats
    assert stats["hits"] + stats["misses"] + sum(stats["uncacheable"].values()) == stats["requests"] == COUNT + 1
    lines = [line for line in ran.stderr.splitlines() if line not in reference.without.stderr]
    assert len(lines) <= len(stats["errors"]), lines
    assert len(set(lines)) == len(lines)
    return stats["errors"]
