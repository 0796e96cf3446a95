"""Measures what recording costs: small programs, found and compiled, with the ledger and without, in turns.

    measure_ledger.py [--rounds N] [--before CHECKOUT]

``--before`` adds a checkout of another version, such as one without a ledger. Each round runs all of them once, in an
order that rotates. A ratio is the median over the rounds of one figure divided by that of the same round without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent.parent
PROGRAMS = 100
WITHOUT = "without"

# Prints wall and processor seconds, until all is stored and reported, and how many were found.
PROGRAM = f"""
import json, os, time
import jax, jax.numpy as jnp
jax.devices()
import xcache
from xcache.process_cache import current
jax.jit(lambda v: v * 2).lower(jax.ShapeDtypeStruct((7,), jnp.float32)).compile()
salt = float(os.environ["SALT"])
def make(number):
    return jax.jit(lambda v: jnp.sin(v) * (number + salt) + jnp.sum(v))
wall, processor = time.perf_counter(), time.process_time()
for number in range({PROGRAMS}):
    make(number).lower(jax.ShapeDtypeStruct((number + 1,), jnp.float32)).compile()
looped = time.perf_counter() - wall
current().close()
print(json.dumps([looped, time.perf_counter() - wall, time.process_time() - processor, xcache.stats().hits]))
"""


class Way:
    """A checkout and its settings, with a store and a daemon of its own."""

    def __init__(self, name: str, checkout: Path, root: Path, **settings: str) -> None:
        self.name = name
        self.store = root / name
        self._env = os.environ | {
            "PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'daemon'}",
            "XCACHE": "1",
            "XCACHE_DIR": str(self.store),
            "XCACHE_SOCKET": str(root / f"{name}.sock"),
            "XCACHE_PREFETCH": "0",
            **settings,
        }

    def run(self, salt: int) -> list[float]:
        """Run the program; return wall seconds of the loop, of all, processor seconds, and those of the daemon."""
        before = self._daemons_seconds()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=self._env | {"SALT": str(salt)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=300,
        )
        *seconds, _ = json.loads(done.stdout)
        return [*seconds, self._daemons_seconds() - before]

    def stop(self) -> None:
        """Stop the daemon."""
        command = [sys.executable, "-m", "xcache", "stop"]
        subprocess.run(command, env=self._env, stdout=subprocess.DEVNULL, check=False)

    def _daemons_seconds(self) -> float:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.fsencode(f"XCACHE_DIR={self.store}") in (process / "environ").read_bytes().split(b"\0"):
                    fields = (process / "stat").read_text().rpartition(")")[2].split()
                    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def ledger_bytes(self) -> tuple[int, int]:
        """Return the rows of the ledger, and the bytes that the store counts for them and their runs."""
        with contextlib.closing(sqlite3.connect(self.store / "store.db")) as store:
            ((rows,),) = store.execute("SELECT count(*) FROM ledger")
            ((size,),) = store.execute("SELECT coalesce(sum(size), 0) FROM runs")
        return rows, size


def compare(what: str, ways: list[Way], rounds: int, salt: int, *, anew: bool) -> None:
    """Print the medians of each way, and the ratios to the one without a ledger."""
    found: dict[str, list[list[float]]] = {way.name: [] for way in ways}
    for number in range(rounds):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            found[way.name].append(way.run(salt + number if anew else salt))
    print(f"{what}, {PROGRAMS} small programs, {rounds} rounds:")
    for way in ways:
        # A quick daemon may use no hundredth of a second.
        pairs = list(zip(found[way.name], found[WITHOUT], strict=True))
        ratios = [statistics.median(one[n] / max(other[n], 0.01) for one, other in pairs) for n in range(4)]
        medians = [statistics.median(each[n] for each in found[way.name]) for n in range(4)]
        cells = "  ".join(
            f"{name} {seconds * 1e3 / PROGRAMS:7.3f} ms ({ratio:.3f})"
            for name, seconds, ratio in zip(("wall", "to the end", "processor", "daemon"), medians, ratios, strict=True)
        )
        print(f"  {way.name:10} {cells}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--before", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xc", dir="/tmp") as folder:
        root = Path(folder)
        ways = [Way("recorded", HERE, root), Way(WITHOUT, HERE, root, XCACHE_MAX_LEDGER="0")]
        if asked.before:
            ways.append(Way("before", asked.before.resolve(), root))
        try:
            for way in ways:
                way.run(0)
            compare("found", ways, asked.rounds, 0, anew=False)
            rows, size = ways[0].ledger_bytes()
            compare("compiled", ways, asked.rounds, 1, anew=True)
            more_rows, more_size = ways[0].ledger_bytes()
            print(f"the store's rows of 1,000 programs found: {size / rows * 1e3 / 1024:.0f} KiB")
            grown = (more_size - size) / (more_rows - rows) * 1e3 / 1024
            print(f"the store's rows of 1,000 programs compiled: {grown:.0f} KiB")
        finally:
            for way in ways:
                way.stop()


if __name__ == "__main__":
    main()
