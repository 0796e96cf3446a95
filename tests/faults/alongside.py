"""The same program without xcache, with it, and with everything found in the store: it must not make a difference."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from places import Place

HEAD = """
import sys
sys.path[:0] = {path!r}
import json, os, signal, threading, time
import jax, numpy as np
x = np.arange(8.0, dtype=np.float32)
def work(k):
    return float(jax.jit(lambda v: (v * k + 1).sum())(x))
"""
# A hang is what this is for; what xcache may cost is measured elsewhere.
PATIENCE = 90.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a program ended, and what it said."""

    code: int
    stdout: str
    stderr: str


def write(place: Place, source: str, name: str = "program.py") -> Path:
    """The program as a file: a traceback shows its lines, and multiprocessing can import it."""
    path = place.root / name
    search = place.env["PYTHONPATH"].split(":")
    path.write_text(HEAD.format(path=search) + source)
    return path


@contextlib.contextmanager
def running(command: Sequence[str | Path], place: Place, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is not left behind."""
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
    """Wait for the end."""
    stdout, stderr = process.communicate(timeout=PATIENCE)
    return Ended(process.returncode, stdout, _comparable(stderr))


def makes_no_difference(
    place: Place, source: str, *flags: str, command: Sequence[str | Path] | None = None, **environment: str
) -> Ended:
    """Run it without xcache, with an empty store, and with a full one; it ends and says the same. How it did."""
    command = command or (sys.executable, *flags, write(place, source))
    with running(command, place, **environment) as off, running(command, place, XCACHE="1", **environment) as on:
        without, cold = ended(off), ended(on)
    assert cold == without, f"{without}\nwith an empty store: {cold}"
    with running(command, place, XCACHE="1", **environment) as on:
        warm = ended(on)
    assert warm == without, f"{without}\nwith a full store: {warm}"
    return without


def _comparable(stderr: str) -> str:
    """Without the addresses, times and threads that differ from one run to the next."""
    stderr = re.sub(r"^([EWIF])\d{4} [\d:.]+ +\d+", r"\1", stderr, flags=re.MULTILINE)
    return re.sub(r"\b0x[0-9a-f]+\b", "0x", stderr)
