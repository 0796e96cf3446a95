"""Finds what a test leaves behind: descriptors, threads and children of its own process, and temporary files."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

from support.places import until

# The daemon's threads that live as long as its process.
_LASTING = frozenset({"xcached-closer", "xcached-undertaker"})
# Threads and children may still be ending when the test is over.
_SETTLE_SECONDS = 5.0


class Held(NamedTuple):
    """The descriptors of a process with their targets, its threads, its children, and its folder's temporary files."""

    descriptors: frozenset[str]
    threads: frozenset[threading.Thread]
    children: frozenset[str]
    files: frozenset[str]

    def beyond(self, before: Held) -> list[str]:
        """Return a line for each thing that was not held before."""
        return [
            *(f"descriptor {each}" for each in sorted(self.descriptors - before.descriptors)),
            *(f"thread {each.name}" for each in self.threads - before.threads),
            *(f"child {each}" for each in sorted(self.children - before.children)),
            *(f"file {each}" for each in sorted(self.files - before.files)),
        ]


def held() -> Held:
    """Return what this process holds now."""
    threads = frozenset(thread for thread in threading.enumerate() if thread.name not in _LASTING)
    return Held(frozenset(_descriptors()), threads, frozenset(_children()), frozenset(_files()))


def left_since(before: Held) -> list[str]:
    """Return what is held beyond ``before``, after giving threads, children and the garbage collector time to end."""
    if until(lambda: not held().beyond(before), _SETTLE_SECONDS):
        return []
    left = held().beyond(before)
    gc.collect()
    still = held().beyond(before)
    return [each if each in still else f"{each} (until the collector came)" for each in left]


def _descriptors() -> list[str]:
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        # The descriptor of the listing itself is closed by now.
        with contextlib.suppress(OSError):
            found.append(f"{descriptor.name} on {descriptor.readlink()}")
    return found


def _files() -> list[str]:
    # pytest removes its own folders, after some runs.
    return [each.name for each in Path(tempfile.gettempdir()).iterdir() if not each.name.startswith("pytest-of-")]


def _children() -> list[str]:
    found: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            for pid in (task / "children").read_text().split():
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                    found.append(f"{pid} {command.decode(errors='replace').strip()}")
    return found
