"""Runs demo_model.py with each cache, each time in a process of its own; compares the results and times them."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
TEXTS = ("LICENSE", "README.md", "pyproject.toml")
# Should the demo be killed, its daemon leaves by itself.
IDLE_EXIT = "5m"
LONGEST_RUN = 600  # seconds


class CheckFailedError(Exception):
    """Something that xcache promises did not hold."""


@dataclass(frozen=True)
class Run:
    """One run of the model: its report, its wall time and its processor time."""

    name: str
    seconds: float
    processor_seconds: float
    report: dict[str, Any]

    @property
    def stats(self) -> dict[str, Any]:
        """The counts of xcache in this run."""
        return self.report["stats"]


def run_model(name: str, text: Path, layers: int, variables: dict[str, str]) -> Run:
    """Run the model in a process of its own with these variables set."""
    print(f"  {name} ...", flush=True)
    started, used = time.perf_counter(), processor_seconds_of_children()
    process = subprocess.run(
        [sys.executable, HERE / "demo_model.py", text, str(layers)],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LONGEST_RUN,
    )
    seconds, used = time.perf_counter() - started, processor_seconds_of_children() - used
    if process.returncode:
        raise CheckFailedError(f"the run {name!r} ended with status {process.returncode}")
    return Run(name, seconds, used, json.loads(process.stdout.splitlines()[-1]))


def processor_seconds_of_children() -> float:
    """Return the seconds that all ended children used; a daemon lives on and is not among them."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def check(runs: list[Run], cold: Run, warm: Run) -> None:
    """Raise CheckFailedError unless all results are bitwise equal and the warm run compiled nothing."""
    for run in runs[1:]:
        for part in ("digest", "losses"):
            if run.report[part] != runs[0].report[part]:
                raise CheckFailedError(
                    f"{run.name!r} gave another {part} than {runs[0].name!r}: "
                    f"{run.report[part]} instead of {runs[0].report[part]}"
                )
    if not cold.stats["misses"]:
        raise CheckFailedError(f"the cold run should have compiled: {cold.stats}")
    # The cold run's own report may miss the last store; the warm run's hits prove it.
    if warm.stats["misses"] or not 0 < warm.stats["hits"] == warm.stats["requests"]:
        raise CheckFailedError(f"the warm run should have compiled nothing: {warm.stats}")
    for run in (cold, warm):
        if run.stats["errors"] or run.stats["uncacheable"]:
            raise CheckFailedError(f"{run.name!r} counted errors or what cannot be cached: {run.stats}")


def show(runs: list[Run]) -> None:
    """Print the table of times."""
    table = Table(title="one training script, each time in a new process")
    table.add_column("cache")
    for column in ("first step done after", "whole program", "processor time"):
        table.add_column(column, justify="right")
    for run in runs:
        times = (run.report["first_step_seconds"], run.seconds, run.processor_seconds)
        table.add_row(run.name, *(f"{seconds:.1f} s" for seconds in times))
    # As wide as it needs, whatever the terminal.
    Console(width=100).print(table)
    print(
        "Each ran once, so the times are noisy: other work on the machine changes every one of them."
        " docs/performance.md has\nthe ratios of runs that were repeated.\n"
    )


def demonstrate(place: Path, layers: int) -> None:
    """Run, check and show everything, with all files in ``place``."""
    # A copy, so that an edit during the demo cannot change the result.
    text = place / "text"
    text.write_bytes(b"".join((HERE.parent / name).read_bytes() for name in TEXTS))
    built_in = {
        "JAX_COMPILATION_CACHE_DIR": str(place / "built-in"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    on = {"XCACHE": "1"}
    # Untimed, so that the first run does not pay for reading jax from disk.
    subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], check=True)
    print("running the model:")
    runs = [
        run_model("none", text, layers, {}),
        run_model("JAX's built-in, cold", text, layers, built_in),
        run_model("JAX's built-in, warm", text, layers, built_in),
        run_model("xcache, cold", text, layers, on),
        run_model("xcache, warm", text, layers, on),
    ]
    cold, warm = runs[-2:]
    check(runs, cold, warm)
    show(runs)
    report = warm.report
    print(
        f"""A transformer with {report["parameters"]:,} parameters, {len(report["losses"])} steps of Adam.
In all {len(runs)} runs, bit for bit the same: losses {", ".join(f"{loss:.3f}" for loss in report["losses"])}
  and parameters sha256 {report["digest"]}
xcache, cold: {cold.stats["misses"]} programs compiled and stored, {cold.stats["hits"]} hits.
xcache, warm: {warm.stats["misses"]} compiled, {warm.stats["hits"]} hits of {warm.stats["requests"]} requests.

xcache stats:""",
        flush=True,
    )
    subprocess.run(["xcache", "stats"], check=True)


def main() -> int:
    """Give the demo a store and a daemon of its own, and take both away again."""
    parser = argparse.ArgumentParser(prog="scripts/demo")
    parser.add_argument("--layers", type=int, default=24, help="of the transformer; fewer compile sooner")
    layers = parser.parse_args().layers
    # /tmp, whatever TMPDIR says: a socket's path must be short.
    place = Path(tempfile.mkdtemp(prefix="xcache-demo-", dir="/tmp"))
    # No setting of the user's or of the machine's is to matter.
    os.environ |= {
        "XDG_CONFIG_HOME": str(place),
        "XCACHE_DIR": str(place / "store"),
        "XCACHE_SOCKET": str(place / "socket"),
        "XCACHE_MAX_SIZE": "0",
        "XCACHE_AUTOSTART": "1",
        "XCACHE_IDLE_EXIT": IDLE_EXIT,
    }
    try:
        demonstrate(place, layers)
    except (CheckFailedError, subprocess.SubprocessError) as error:
        print(f"scripts/demo: failed: {error}", file=sys.stderr)
        return 1
    finally:
        stopped = subprocess.run(["xcache", "stop"], capture_output=True, text=True)
        shutil.rmtree(place, ignore_errors=True)
        if stopped.returncode:
            print(f"scripts/demo: xcache stop: {stopped.stderr or stopped.stdout}", file=sys.stderr)
    return stopped.returncode


if __name__ == "__main__":
    sys.exit(main())
