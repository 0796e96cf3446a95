"""Two machines that are network namespaces, with a link between them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

WIRE = "wire0"
# From the range for documentation.
HERE, THERE = "192.0.2.1", "192.0.2.2"


def ip(*arguments: str) -> None:
    """Run the command ``ip``."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


def inside(name: str) -> tuple[str, ...]:
    """Return what runs a command in a namespace."""
    return ("ip", "netns", "exec", name)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces with a link between them."""
    here, there = (f"xc{os.getpid()}{end}" for end in "ab")
    with contextlib.ExitStack() as stack:
        try:
            for name in (here, there):
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip("-n", here, "link", "add", "name", WIRE, "type", "veth", "peer", "name", WIRE, "netns", there)
            for name, address in ((here, HERE), (there, THERE)):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", WIRE)
                ip("-n", name, "link", "set", WIRE, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no namespaces can be made here: {error}")
        yield here, there
