"""Runs the programs of pairs: off, A then B on one store, B then A on another, and again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pairing import jax_files
from pairing.pair import Pair

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.conversation import talking
from support.places import Place, new_place  # noqa: F401

from xcache.wire import commands

SCRIPTS = Path(__file__).parents[1]
# Each step is the side; a new list begins with an empty store.
ORDERS = ("ABAB", "BA")
# Bounds a hang.
_SECONDS = 300


class Ran(NamedTuple):
    """The results of one run of one program."""

    where: str
    side: str
    result: Any
    counts: Mapping[str, int]


class Programs:
    """The programs of all pairs as files: all are there before the first process that may have to read one.

    A process takes a file that is newer than itself, or than the one that forked it, for code that it does not run.
    """

    def __init__(self, root: Path, pairs: Sequence[Pair]) -> None:
        self._root = root
        self.names = {pair.name: f"pair_{number}" for number, pair in enumerate(pairs)}
        for pair in pairs:
            self._write(pair, "A", root / "A")
            if pair.source_as_b or pair.modules:
                self._write(pair, "B", root / "B")

    def folders(self, side: str) -> list[Path]:
        """Return where a program is found: as B it may be another file."""
        return [self._root / "A"] if side == "A" else [self._root / "B", self._root / "A"]

    def edited(self, pair: Pair, side: str, folder: Path) -> Path:
        """Write a program where the other side's was, and return the folder; the process starts a moment later."""
        self._write(pair, side, folder)
        time.sleep(0.05)
        return folder

    def _write(self, pair: Pair, side: str, folder: Path) -> None:
        texts = {f"{self.names[pair.name]}.py": pair.text(side)}
        texts |= {name: pair.modules[name]["AB".index(side)] for name in pair.modules}
        for name, text in texts.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text() != text:
                path.write_text(text)


class Worker:
    """Runs one thing after the other at one place."""

    def __init__(self, place: Place, programs: Programs, *, keeps: bool = False) -> None:
        """``keeps`` has all printed that the programs say."""
        self._place = place
        self._programs = programs
        self._keeps = keeps
        self._zygote: subprocess.Popen[str] | None = None
        self._numbers = iter(range(10**9))
        self.files = jax_files.Overlay(place.root / "jax")

    def run(self, pairs: Sequence[Pair], orders: Sequence[str] = ORDERS) -> dict[str, list[Ran]]:
        """Run programs that may share a process off and in these orders; return all that each gave, by name."""
        found: dict[str, list[Ran]] = {pair.name: [] for pair in pairs}
        steps = [("off", side) for side in "AB"]
        for order in orders:
            steps += [(order[: at + 1], side) for at, side in enumerate(order)]
        for where, side in steps:
            if len(where) == 1:
                self._empty()
            told = self._once(pairs, side, is_on=where != "off")
            for pair in pairs:
                one = told.get(self._programs.names[pair.name], {"result": ["died", told.get("died")], "counts": {}})
                found[pair.name].append(Ran(where, side, one["result"], one["counts"]))
            if "died" in told and len(pairs) > 1:
                # Which of them it was shows when each runs alone.
                return {name: runs for pair in pairs for name, runs in self.run([pair], orders).items()}
        return found

    def close(self) -> None:
        """Stop the zygote."""
        if self._zygote is not None:
            with contextlib.suppress(BrokenPipeError):
                self._zygote.stdin.close()
            self._zygote.wait(_SECONDS)
            self._zygote.stdout.close()
            self._zygote = None

    def _empty(self) -> None:
        if self._place.answers():
            with talking(self._place) as talk:
                talk.ask(commands.Clear())

    def _once(self, pairs: Sequence[Pair], side: str, *, is_on: bool) -> dict[str, Any]:
        number, pair = next(self._numbers), pairs[0]
        told, said = self._place.root / f"told-{number}", self._place.root / f"said-{number}"
        folders = self._programs.folders(side)
        if pair.is_edited:
            folders = [self._programs.edited(pair, side, self._place.root / "edited"), *folders]
        request = {
            "programs": [self._programs.names[each.name] for each in pairs], "folders": list(map(str, folders)),
            "side": side, "told": str(told), "said": str(said), "seconds": _SECONDS,
            "environment": {**pair.environments["AB".index(side)], "XCACHE": "1" if is_on else "0"},
        }  # fmt: skip
        is_fresh = pair.is_fresh or pair.jax_files is not None
        code = self._fresh(pair, request) if is_fresh else self._forked(request)
        if told.exists():
            found = json.loads(told.read_text())
            told.unlink()
        else:
            found = {"died": f"exit code {code}: {said.read_text()[-600:] if said.exists() else ''}"}
        if not self._keeps:
            said.unlink(missing_ok=True)
        elif said.exists() and said.read_text().strip():
            print(f"-- {'on' if is_on else 'off'} {side}\n{said.read_text()}", flush=True)
        return found

    def _forked(self, request: dict[str, Any]) -> int:
        if self._zygote is None:
            self._zygote = subprocess.Popen(
                [sys.executable, "-P", "-m", "pairing.zygote"], env=self._environment(), cwd=self._place.root,
                text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            assert self._zygote.stdout.readline() == "ready\n"
        self._zygote.stdin.write(json.dumps(request) + "\n")
        self._zygote.stdin.flush()
        return int(self._zygote.stdout.readline())

    def _fresh(self, pair: Pair, request: dict[str, Any]) -> int:
        more = dict(request["environment"])
        if pair.jax_files is not None:
            more |= self.files.prepared(pair.jax_files["AB".index(request["side"])])
        asked = Path(request["told"]).with_suffix(".asked")
        asked.write_text(json.dumps(request))
        code = -signal.SIGALRM
        with open(request["said"], "w") as said, contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [sys.executable, "-P", "-m", "pairing.child", asked],
                env=self._environment(more), cwd=self._place.root, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                timeout=_SECONDS, check=False,
            )  # fmt: skip
            code = done.returncode
        asked.unlink()
        return code

    def _environment(self, more: Mapping[str, str] = {}) -> dict[str, str]:
        kept = {name: value for name, value in self._place.env.items() if not name.startswith(("JAX", "XLA", "PYTHON"))}
        kept |= {
            "PYTHONPATH": os.pathsep.join([self._place.env["PYTHONPATH"], str(SCRIPTS)]),
            "PYTHONHASHSEED": "0",
            "TMPDIR": str(self._place.root),
            "JAX_PLATFORMS": "cpu",
            # A thread of OpenBLAS's would not be in the children of the zygote.
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "XCACHE_TIMEOUT": "60s",
        }
        path = more.get("PYTHONPATH")
        kept |= more
        if path is not None:
            kept["PYTHONPATH"] = os.pathsep.join([path, self._place.env["PYTHONPATH"], str(SCRIPTS)])
        return kept
