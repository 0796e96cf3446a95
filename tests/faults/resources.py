"""What a process has in hand, by the kernel's word, and what the daemon says of itself."""

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

from conversation import Conversation
from places import REPOSITORY, Place

from xcache import protocol

_HELPERS = [REPOSITORY / "tests" / folder for folder in (".", "client", "daemon", "faults")]


@contextlib.contextmanager
def helping(place: Place, *command: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A program that imports what tests do; whatever it forked is gone with it when the block ends."""
    search = os.pathsep.join([*map(str, _HELPERS), place.env["PYTHONPATH"]])
    with subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=place.env | {"PYTHONPATH": search, "XCACHE_AUTOSTART": "0"} | environment,
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
    """How much of everything there is at one moment."""

    resident: int
    descriptors: int
    threads: int
    connections: int
    leases: int
    entries: int
    stored: int
    database: int


def sample(place: Place, talk: Conversation, pid: int) -> Sample:
    """Look at a daemon; ``talk`` is one of the connections."""
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
    """Bytes of a process that are in memory."""
    return 1024 * _number(pid, "VmRSS")


def descriptors_of(pid: int) -> Counter[str]:
    """Where a process's descriptors lead, and how many lead there; sockets are alike."""
    found: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        # It may be closed while it is looked at.
        with contextlib.suppress(OSError):
            found[re.sub(r"(?<=socket:).*", "", str(link.readlink()))] += 1
    return found


def complaints(place: Place) -> list[str]:
    """What the daemon's log has that is worse than information."""
    return re.findall(r".* (?:WARNING|ERROR|CRITICAL) .*", (place.dir / "daemon.log").read_text())


def _number(pid: int, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found, name
    return int(found[1])
