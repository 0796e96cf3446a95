"""scripts/bench: runs everything side by side, keeps the raw samples, and writes the report from them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import figures
import fullness
import micro
import pieces
import report
import runs
from micro import KIB, MIB
from peers import BUILT_IN, JIT, LIMITED, NONE, XCACHE

ROOT = Path(__file__).parents[2]
# The stores are on a disk, which /tmp need not be.
ON_DISK = Path("/var/tmp")  # noqa: S108 - each run makes a folder of its own there
TEMPLATES = ROOT / ".venvs" / "bench-stores"
SIZES = [KIB, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
FULL = list(figures.PROGRAMS)
# The programs of which functions are jitted with ``xcache.jit`` for a peer of that name.
WITH_JIT = ("training", "serving", "training-24", "training-48")
# Cold and warm rounds of the short run: more for short programs, and for those that a bar is about.
QUICK_ROUNDS = {"many-small": (5, 7), "training": (5, 7), "library": (5, 7)}
# The programs that are started together, and how many at once.
CROWDS = [(name, size) for name in ("training", "many-small") for size in (4, 16)]
# Pairs of programs: a script was the first at its last run, and is the second now.
CHANGES = [("training", "serving"), ("serving", "training")]
Part = Callable[[Path, bool], Any]


def parts() -> dict[str, Part]:
    """Return all that there is to measure, by name."""

    def program(name: str) -> Part:
        # In the quick mode, built-in with a limit runs only the program that most bars are about.
        def run(folder: Path, full: bool) -> Any:
            names = [NONE, BUILT_IN, XCACHE, *([LIMITED] if full or name == "training" else [])]
            names += [JIT] if name in WITH_JIT else []
            long = name in ("training-24", "training-48")
            cold, warm = ((4 if long else 5), (5 if long else 11)) if full else QUICK_ROUNDS.get(name, (3, 5))
            return runs.program(name, folder, names, cold, warm)

        return run

    def changed(folder: Path, full: bool) -> Any:
        rounds = 11 if full else 5
        return {f"{before}, now {name}": runs.changed(before, name, folder, rounds) for before, name in CHANGES}

    def crowd(folder: Path, full: bool) -> Any:
        return {f"{size} {name}": runs.crowd(name, size, folder, (3 if full else 1), 3) for name, size in CROWDS}

    def micros(folder: Path, full: bool) -> Any:
        sizes = [*SIZES, 256 * MIB] if full else SIZES
        counts = [1000, 100_000, 1_000_000]
        limited = [1000, 10_000, 100_000] if full else [1000, 10_000]
        return {
            "pieces": pieces.pieces(folder),
            "sizes": micro.by_size(folder, sizes, 10.0 if full else 2.0),
            "clients": micro.by_clients(folder, [1, 8, 32], 3.0 if full else 1.0, 5 if full else 3),
            "entries": fullness.by_entries(folder, TEMPLATES, counts, 1000 if full else 300, 7 if full else 5),
            "limited": fullness.limited(folder, limited, 9 if full else 5),
        }

    return {
        "nothing": lambda folder, full: runs.nothing(folder, 101 if full else 51),
        **{name: program(name) for name in FULL},
        "changed": changed,
        "crowd": crowd,
        "micro": micros,
    }


def machine() -> dict[str, Any]:
    """Return the machine and the versions that the benchmark ran with."""
    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), ": unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    versions = {
        name: metadata.version(name)
        for name in ("jax", "jaxlib", "flax", "dm-haiku", "optax", "zstandard", "jax-xcache")
    }
    redis = shutil.which("redis-server")
    said = subprocess.run([redis, "--version"], capture_output=True, text=True).stdout.split() if redis else []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return {
        "processor": cpu.partition(":")[2].strip(),
        "processors": len(os.sched_getaffinity(0)),
        "memory GiB": round(memory, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "redis": said[2].removeprefix("v=") if len(said) > 2 else "not installed",
        "commit": commit.strip(),
        **versions,
    }


def measure(names: list[str], full: bool, output: Path, where: Path) -> None:
    """Measure the named parts, and write the samples to disk after each."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    found: dict[str, Any] = {
        "mode": "full" if full else "quick",
        "started": time.strftime("%Y-%m-%d %H:%M"),
        "machine": machine(),
        "load before": os.getloadavg()[0],
        "parts": {},
    }
    began = time.monotonic()
    every = parts()
    for name in names:
        folder = Path(tempfile.mkdtemp(prefix="xcache-bench-", dir=where))
        start = time.monotonic()
        print(f"{name} ...", end=" ", flush=True)
        try:
            found["parts"][name] = every[name](folder, full)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"{time.monotonic() - start:.0f} s", flush=True)
        found["minutes"] = (time.monotonic() - began) / 60
        found["load after"] = os.getloadavg()[0]
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(rounded(found), separators=(",", ":")) + "\n")


def rounded(found: Any) -> Any:
    """Return the same with six digits: more would say nothing, and the repository keeps a megabyte of them."""
    if isinstance(found, float):
        return float(f"{found:.6g}")
    if isinstance(found, dict):
        return {name: rounded(value) for name, value in found.items()}
    return [rounded(value) for value in found] if isinstance(found, list) else found


def show_profile(name: str, kind: str, where: Path) -> None:
    """Print where the time of a warm or a cold start goes, by the medians of each part."""
    folder = Path(tempfile.mkdtemp(prefix="xcache-bench-", dir=where))
    samples: dict[str, list[dict[str, Any]]] = {peer: [] for peer in runs.PROFILED[kind]}
    try:
        for peer, sample in runs.profiles(name, folder, kind, 5):
            samples[peer].append(sample)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{name}, {kind}: milliseconds, medians of {len(samples[XCACHE])}; of each part what none below it has")
    print(f"{'':36}", *(f"{peer:>10}" for peer in samples))
    phases = [report.phases_of(of_peer) for of_peer in samples.values()]
    for phase in dict.fromkeys([*phases[-1], *phases[-2]]):
        print(f"{phase:36}", *(f"{statistics.median(peer.get(phase, [0.0])) * 1e3:10.1f}" for peer in phases))


def main() -> None:
    """Measure, or write the report of what was measured."""
    known = list(parts())
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__.partition(": ")[2])
    parser.add_argument("--quick", action="store_true", help="half an hour (the default)")
    parser.add_argument("--full", action="store_true", help="more than an hour")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=known, help=f"some of: {', '.join(known)}")
    parser.add_argument("--profile", metavar="PROGRAM", choices=FULL, help="show where a start's time goes: warm ones")
    parser.add_argument("--cold", action="store_true", help="or, with --profile, cold ones")
    parser.add_argument("--report", type=Path, metavar="JSON", help="write the report anew from what was measured")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "performance.json", help="where raw samples go")
    parser.add_argument("--place", type=Path, default=ON_DISK, help="the disk to measure on (%(default)s)")
    options = parser.parse_args()
    # A stopped benchmark stops its daemons. SIGINT is set too: a shell has background jobs ignore it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit("scripts/bench: stopped"))
    if options.profile:
        os.environ["JAX_PLATFORMS"] = "cpu"
        show_profile(options.profile, "cold" if options.cold else "warm", options.place)
        return
    if options.report is None:
        names = options.only or [name for name in known if options.full or not name.startswith("training-")]
        measure(names, options.full, options.output, options.place)
    report.write(options.report or options.output, options.output.parent)


if __name__ == "__main__":
    try:
        main()
    except runs.WrongError as error:
        sys.exit(f"scripts/bench: {error}")
