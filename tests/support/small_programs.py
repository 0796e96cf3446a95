"""A program that compiles many small functions in turn, and its costs with and without xcache."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.places import Place

COUNT = 24
TIMEOUT = "1s"
# By the client's own account. A wait for each compile would cost more than twice as much.
LOST_AT_MOST = 10.0

# A test inserts faults before the first compile and between the compiles.
PROGRAM = """
import atexit, dataclasses, json, os, resource, signal, sys, time
# This runs last at exit, so that it counts what xcache meets there.
atexit.register(lambda: print(json.dumps([results, dataclasses.asdict(xcache.stats())])))
import jax, numpy as np
import xcache
x = np.arange(8.0, dtype=np.float32)
jax.jit(lambda v: v)(x)
{before}
results = []
for k in range({count}):
    {between}
    results.append(np.asarray(jax.jit(lambda v: v * k + 1)(x)).tolist())
{after}
"""


@dataclasses.dataclass
class Ran:
    """The results of one run."""

    results: list[list[float]]
    stats: dict[str, Any]
    stderr: str


@dataclasses.dataclass
class Reference:
    """A run without xcache, and the store that a run with it leaves."""

    without: Ran
    store: Path


class Running:
    """The program, while it runs."""

    def __init__(
        self, place: Place, before: str = "", between: str = "pass", after: str = "", **environment: str
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(count=COUNT, before=before, between=between, after=after)],
            # Faults between two compiles would not matter to a program that has loaded everything ahead.
            env=place.env | {"XCACHE": "1", "XCACHE_TIMEOUT": TIMEOUT, "XCACHE_PREFETCH": "0"} | environment,
            cwd=place.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def runs(self) -> bool:
        """Return whether it is still running."""
        return self._process.poll() is None

    def ended(self) -> Ran:
        """Wait for its end, and return its results."""
        try:
            out, err = self._process.communicate(timeout=120)
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise
        assert self._process.returncode == 0, err[-4000:]
        # One line: nothing else is on its stdout.
        (line,) = out.splitlines()
        results, stats = json.loads(line)
        return Ran(results, stats, err)


def hardly_noticed(ran: Ran, reference: Reference) -> dict[str, int]:
    """Assert that it is right, lost little and warned once for each kind of trouble; return the trouble it counted."""
    assert ran.results == reference.without.results
    stats = ran.stats
    assert stats["lost_seconds"] < LOST_AT_MOST
    assert stats["hits"] + stats["misses"] + sum(stats["uncacheable"].values()) == stats["requests"] == COUNT + 1
    lines = [line for line in ran.stderr.splitlines() if line not in reference.without.stderr]
    assert len(lines) <= len(stats["errors"]), lines
    assert len(set(lines)) == len(lines)
    return stats["errors"]
