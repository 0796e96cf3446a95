"""Cgroups with limits, made for a test and gone after it."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
# Less than one processor, less memory than most machines have, one processor; for cgroups' first and second form.
_LIMITS = {
    "cpu": ({"cpu.cfs_quota_us": "90000"}, {"cpu.max": "90000 100000"}),
    "memory": ({"memory.limit_in_bytes": "3000000000"}, {"memory.max": "3000000000"}),
    "cpuset": ({"cpuset.cpus": "0", "cpuset.mems": "0"}, {"cpuset.cpus": "0"}),
}


@contextlib.contextmanager
def limited(controller: str) -> Iterator[str]:
    """Make a cgroup with a limit of this kind and return its folder, or raise OSError."""
    first, second = _LIMITS[controller]
    whole = (_ROOT / "cgroup.controllers").is_file()
    folder = _ROOT / ("" if whole else controller) / f"xcache-keys-{uuid.uuid4().hex[:12]}"
    folder.mkdir()
    try:
        for name, value in (second if whole else first).items():
            (folder / name).write_text(value)
        yield str(folder)
    finally:
        folder.rmdir()


def enter(folder: str) -> None:
    """Move this process into a cgroup."""
    Path(folder, "cgroup.procs").write_text("0")
