"""The resources of a process as the kernel reports them, and those the daemon reports of itself."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from support.conversation import Conversation
from support.places import Place
from xcache.wire import protocol


@contextlib.contextmanager
def helping(place: Place, *command: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program that can import the tests' helpers; its forks end with it at the end of the block."""
    with subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=place.with_support | {"XCACHE_AUTOSTART": "0"} | environment,
        cwd=place.root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class Sample(NamedTuple):
    """The amount of each resource at one moment."""

    resident: int
    descriptors: int
    threads: int
    connections: int
    leases: int
    entries: int
    stored: int
    database: int


def sample(place: Place, talk: Conversation, pid: int) -> Sample:
    """Take a daemon's sample; ``talk`` is one of the connections."""
    status = talk.ask(protocol.AskStatus())
    assert isinstance(status, protocol.Status), status
    return Sample(
        memory_of(pid),
        sum(descriptors_of(pid).values()),
        _number(pid, "Threads"),
        int(status.facts["connections"]),
        len(status.compiles),
        int(status.facts["entries"]),
        int(status.facts["bytes"]),
        sum(path.stat().st_size for path in place.dir.glob("store.db*")),
    )


def memory_of(pid: int) -> int:
    """Return the bytes of a process in memory."""
    return 1024 * _number(pid, "VmRSS")


def descriptors_of(pid: int) -> Counter[str]:
    """Count a process's descriptors by target; all sockets are one target."""
    found: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        # It may be closed meanwhile.
        with contextlib.suppress(OSError):
            found[re.sub(r"(?<=socket:).*", "", str(link.readlink()))] += 1
    return found


def pipes() -> set[int]:
    """Return the descriptors of this process that are pipes."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith("pipe:"):
                found.add(int(link.name))
    return found


def complaints(place: Place) -> list[str]:
    """Return the daemon's log lines above the level of information."""
    return re.findall(r".* (?:WARNING|ERROR|CRITICAL) .*", (place.dir / "daemon.log").read_text())


def _number(pid: int, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found, name
    return int(found[1])
