"""Whole programs, each in a process of its own: cold and warm, one peer after the other, round by round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import programs
from peers import BUILT_IN, JIT, LIMITED, NONE, XCACHE, Peer, rotated

HERE = Path(__file__).parent
LONGEST = 1800.0
Sample = dict[str, Any]
PROFILED = {"warm": [BUILT_IN, XCACHE], "cold": [NONE, BUILT_IN, XCACHE]}
CHANGED, UNCHANGED, NOTHING_AHEAD = "changed", "unchanged", "nothing loaded ahead"


class WrongError(Exception):
    """A program failed, or computed something else than with another cache."""


class Process:
    """One program that is running."""

    def __init__(self, name: str, environment: dict[str, str], *options: str) -> None:
        devices = programs.DEVICES.get(name)
        if devices:
            environment = environment | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        self._name = name
        # Files, because pipes would have to be emptied while the clock runs; finish() closes them.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._complained = tempfile.TemporaryFile()  # noqa: SIM115
        self._spawned = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, HERE / "observe.py", *options],
            env=environment | {"PROGRAM": name},
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._complained,
        )

    def finish(self) -> Sample:
        """Wait for the program; return its times by the wall and by the processors, and its own report."""
        with self._said as said, self._complained as complained:
            _, status, usage = os.wait4(self._process.pid, 0)
            ended = time.perf_counter()
            self._process.returncode = os.waitstatus_to_exitcode(status)
            said.seek(0)
            complained.seek(0)
            if self._process.returncode:
                raise WrongError(f"{self._name} failed:\n{complained.read().decode(errors='replace')[-3000:]}")
            report = json.loads(said.read().splitlines()[-1])
        times = {
            "wall": ended - self._spawned,
            "cpu": usage.ru_utime + usage.ru_stime,
            # All processes share the machine's clock; only the time between two moments is kept.
            "interpreter": report.pop("first line") - self._spawned,
            "exit": ended - report.pop("ended"),
        }
        return report | times

    def end(self) -> None:
        """Kill the program if the measurement is stopped."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()


def run(name: str, peer: Peer, *options: str, **settings: str) -> Sample:
    """Run a program once; the daemon's processor time is part of its cost."""
    before = peer.daemon.cpu() if peer.daemon else 0.0
    process = Process(name, peer.environment() | settings, *options)
    try:
        sample = process.finish()
    except BaseException:
        process.end()
        raise
    sample["daemon cpu"] = (peer.daemon.cpu() if peer.daemon else 0.0) - before
    return sample


class Field:
    """All peers, in one folder on one disk."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.peers: dict[str, Peer] = {}
        for name in names:
            self.peers[name] = Peer(name, folder)

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self.peers.values():
            peer.end()


def program(name: str, folder: Path, names: Sequence[str], cold: int, warm: int) -> dict[str, dict[str, list[Sample]]]:
    """Run cold rounds, each with an empty store, and warm rounds with the store of the last cold one."""
    found: dict[str, dict[str, list[Sample]]] = {kind: {peer: [] for peer in names} for kind in ("cold", "warm")}
    with Field(folder, names) as field:
        for turn in range(cold):
            for peer in rotated(names, turn):
                # One cold run fills the stores of those that differ from their namesakes only when warm.
                if peer in (LIMITED, JIT) and turn < cold - 1:
                    continue
                field.peers[peer].begin()
                found["cold"][peer].append(run(name, field.peers[peer], "--phases"))
        cached = [peer for peer in names if peer != NONE]
        # The first round is dropped, so that the files of all peers are in memory.
        for turn in range(warm + 1):
            for peer in rotated(cached, turn):
                sample = run(name, field.peers[peer])
                if turn:
                    found["warm"][peer].append(sample)
    check(name, found)
    return found


def check(name: str, found: dict[str, dict[str, list[Sample]]]) -> None:
    """Raise WrongError unless all computed the same, and no warm run of xcache compiled anything."""
    digests = {sample["digest"] for kinds in found.values() for samples in kinds.values() for sample in samples}
    if len(digests) > 1:
        raise WrongError(f"{name} did not compute the same with each cache: {found}")
    for sample in (*found["warm"].get(XCACHE, []), *found["warm"].get(JIT, [])):
        stats = sample["stats"]
        if sample["compiled"] or stats["errors"]:
            raise WrongError(f"a warm {name} was not warm with xcache: {stats}")


def nothing(folder: Path, rounds: int) -> dict[str, list[Sample]]:
    """Run a program that only starts jax, with xcache off and on."""
    found: dict[str, list[Sample]] = {NONE: [], XCACHE: []}
    with Field(folder, list(found)) as field:
        for turn in range(rounds + 1):
            for peer in rotated(list(found), turn):
                sample = run("nothing", field.peers[peer])
                if turn:
                    found[peer].append(sample)
    return found


def changed(before: str, name: str, folder: Path, rounds: int) -> dict[str, list[Sample]]:
    """Run a warm program whose script was another one at its last run, beside unchanged ones: all have one name."""
    kinds = (CHANGED, UNCHANGED, NOTHING_AHEAD, BUILT_IN)
    found: dict[str, list[Sample]] = {kind: [] for kind in kinds}
    with Field(folder, [BUILT_IN, XCACHE]) as field:
        for peer in field.peers.values():
            run(name, peer)
        run(before, field.peers[XCACHE])
        for turn in range(rounds + 1):
            for kind in rotated(kinds, turn):
                if kind == CHANGED:
                    run(before, field.peers[XCACHE])
                settings = {"XCACHE_PREFETCH": "0"} if kind == NOTHING_AHEAD else {}
                sample = run(name, field.peers[BUILT_IN if kind == BUILT_IN else XCACHE], **settings)
                if turn:
                    found[kind].append(sample)
    ours = [*found[CHANGED], *found[UNCHANGED], *found[NOTHING_AHEAD]]
    check(name, {"warm": {XCACHE: ours, BUILT_IN: found[BUILT_IN]}})
    return found


def crowd(name: str, size: int, folder: Path, cold: int, warm: int) -> dict[str, dict[str, list[Sample]]]:
    """Run processes of one program that start at once, cold and then warm; and one alone, cold, beside them."""
    names = [BUILT_IN, XCACHE]
    found: dict[str, dict[str, list[Sample]]] = {kind: {p: [] for p in names} for kind in ("alone", "cold", "warm")}
    with Field(folder, names) as field:
        for turn in range(cold):
            for peer in rotated(names, turn):
                field.peers[peer].begin()
                found["alone"][peer].append(together(name, 1, field.peers[peer]))
                field.peers[peer].begin()
                found["cold"][peer].append(together(name, size, field.peers[peer]))
        for turn in range(warm):
            for peer in rotated(names, turn):
                found["warm"][peer].append(together(name, size, field.peers[peer]))
    return found


def together(name: str, size: int, peer: Peer) -> Sample:
    """Run some processes at once: from the first one's start to the last one's end, and the processor time of all."""
    before = peer.daemon.cpu() if peer.daemon else 0.0
    started = time.perf_counter()
    processes = [Process(name, peer.environment()) for _ in range(size)]
    try:
        samples = [process.finish() for process in processes]
    except BaseException:
        for process in processes:
            process.end()
        raise
    wall = time.perf_counter() - started
    if len({sample["digest"] for sample in samples}) > 1:
        raise WrongError(f"{size} of {name} did not all compute the same")
    daemon = (peer.daemon.cpu() if peer.daemon else 0.0) - before
    compiled = sum(sample["compiled"] for sample in samples)
    cpu = sum(sample["cpu"] for sample in samples) + daemon
    return {"wall": wall, "cpu": cpu, "daemon cpu": daemon, "compiled": compiled}


def profiles(name: str, folder: Path, kind: str, rounds: int) -> Iterator[tuple[str, Sample]]:
    """Yield warm or cold runs with their parts measured."""
    with Field(folder, PROFILED[kind]) as field:
        if kind == "warm":
            for peer in field.peers.values():
                run(name, peer)
                run(name, peer)
        for turn in range(rounds):
            for peer in rotated(PROFILED[kind], turn):
                if kind == "cold":
                    field.peers[peer].begin()
                yield peer, run(name, field.peers[peer], "--phases")
