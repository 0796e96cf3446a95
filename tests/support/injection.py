"""Faults at a chosen system call of a daemon, by strace: a kill, or an error."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from support.places import until

# Calls that change, open or make files; a read does no harm.
CALLS = ("pwrite64", "write", "fsync", "fdatasync", "rename", "unlink", "openat", "mkdir", "ftruncate")
KILL = "signal=KILL"


@functools.cache
def why_not() -> str | None:
    """Return why strace cannot be used here, or None."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        with attached(child.pid, "-e", "trace=none"):
            return None
    except ConnectionError as error:
        return f"strace may not be used here: {error}"
    finally:
        child.communicate(b"\n")


def skip_without_strace() -> None:
    """Skip the test where system calls cannot be watched."""
    if reason := why_not():
        pytest.skip(reason)


def fault(call: str, number: int | str, what: str) -> list[str]:
    """Return strace's options for a fault at the nth call of a kind, counted in each thread."""
    return ["-e", f"trace={call}", "-e", f"inject={call}:{what}:when={number}"]


@contextlib.contextmanager
def attached(pid: int, *options: str, log: Path | None = None) -> Iterator[None]:
    """Have strace trace a process with these options, for the length of the block or until the process ends."""
    command = ["strace", "-f", "-qq", "-o", str(log or "/dev/null"), "-p", str(pid), *options]
    strace = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        until(lambda: strace.poll() is not None or _holds(strace.pid, pid))
        if strace.poll() is not None:
            raise ConnectionError(strace.stderr.read().decode().strip())
        yield
    finally:
        # strace detaches, and the process goes on; strace may wait for ever for threads of a process it has killed.
        strace.send_signal(signal.SIGTERM if _goes_on(pid) else signal.SIGKILL)
        try:
            strace.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            strace.kill()
            strace.communicate(timeout=5)


def _goes_on(pid: int) -> bool:
    """Return whether a process is neither gone nor a zombie."""
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill a daemon, and any strace that still traces it."""
    child.kill()
    try:
        child.wait(1)
    except subprocess.TimeoutExpired:
        tracer = re.search(r"TracerPid:\t(\d+)", Path(f"/proc/{child.pid}/status").read_text())
        if tracer and int(tracer[1]):
            os.kill(int(tracer[1]), signal.SIGKILL)
        child.wait(10)


def _holds(tracer: int, pid: int) -> bool:
    """Return whether strace traces all threads of a process."""
    with contextlib.suppress(OSError):
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return all(f"TracerPid:\t{tracer}\n" in (thread / "status").read_text() for thread in threads)
    return False


def from_the_start(directory: Path, log: Path, *options: str) -> list[str]:
    """Return a command that starts a daemon under strace, which traces it from the beginning."""
    paths = [directory / name for name in ("store.db", "store.db-wal", "store.db-shm", "store.db-journal", "blobs")]
    paths += [directory / "blobs" / "unfinished", directory, directory / "daemon.lock", directory / "daemon.log"]
    # Files that are already there could be swept.
    paths += list((directory / "blobs").glob("*/*"))
    watched = [argument for path in paths for argument in ("-P", str(path))]
    # -D: the daemon is the child, and strace beside it.
    return ["strace", "-D", "-f", "-qq", "-o", str(log), *watched, *options]


def calls_made(log: Path) -> Counter[str]:
    """Return how often each call occurs in strace's output, in the thread that made it most often."""
    # Each thread is counted by itself, by strace as well as here.
    text = log.read_text(errors="replace") if log.exists() else ""
    by_thread = Counter(re.findall(r"^(\d+) +(\w+)\(", text, re.MULTILINE))
    most: Counter[str] = Counter()
    for (_, call), count in by_thread.items():
        most[call] = max(most[call], count)
    return most


def points(calls: Counter[str], kinds: Iterable[str]) -> list[tuple[str, int]]:
    """Return every call made, as its kind and its number within the kind."""
    return [(call, number) for call in kinds for number in range(1, calls[call] + 1)]


def settled(path: Path) -> None:
    """Wait until strace has written everything."""
    size = -1
    while path.exists() and path.stat().st_size != size:
        size = path.stat().st_size
        time.sleep(0.05)
