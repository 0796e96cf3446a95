"""Run a program without xcache, with an empty store and with a full one, and compare the outcomes."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.places import Place

HEAD = """
import sys
sys.path[:0] = {path!r}
import json, os, signal, threading, time
import jax, numpy as np
x = np.arange(8.0, dtype=np.float32)
def work(k):
    return float(jax.jit(lambda v: (v * k + 1).sum())(x))
"""
# This bound finds hangs; the cost of xcache is measured elsewhere.
PATIENCE = 300.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """A program's exit status and output."""

    code: int
    stdout: str
    stderr: str


def write(place: Place, source: str, name: str = "program.py") -> Path:
    """Write the program to a file, so that tracebacks show its lines and multiprocessing can import it."""
    path = place.root / name
    search = place.env["PYTHONPATH"].split(":")
    path.write_text(HEAD.format(path=search) + source)
    return path


@contextlib.contextmanager
def running(command: Sequence[str | Path], place: Place, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process, and kill it at the end of the block."""
    with subprocess.Popen(
        command,
        env=place.env | environment,
        cwd=place.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> Ended:
    """Wait for the process to end."""
    stdout, stderr = process.communicate(timeout=PATIENCE)
    return Ended(process.returncode, stdout, _comparable(stderr))


def makes_no_difference(
    place: Place, source: str, *flags: str, command: Sequence[str | Path] | None = None, **environment: str
) -> Ended:
    """Run it without xcache, with an empty and with a full store, assert equal outcomes, and return the first."""
    command = command or (sys.executable, *flags, write(place, source))
    with running(command, place, **environment) as off, running(command, place, XCACHE="1", **environment) as on:
        without, cold = ended(off), ended(on)
    assert cold == without, f"{without}\nwith an empty store: {cold}"
    with running(command, place, XCACHE="1", **environment) as on:
        warm = ended(on)
    assert warm == without, f"{without}\nwith a full store: {warm}"
    return without


def _comparable(stderr: str) -> str:
    """Remove addresses, times and thread numbers, which differ between runs."""
    stderr = re.sub(r"^([EWIF])\d{4} [\d:.]+ +\d+", r"\1", stderr, flags=re.MULTILINE)
    return re.sub(r"\b0x[0-9a-f]+\b", "0x", stderr)
