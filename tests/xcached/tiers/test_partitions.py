"""Machines that are network namespaces, with a link between them that is cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest
from support.conversation import talking
from support.engines import running
from support.leasing import begin_to_wait, outcome
from support.places import get_message, until
from support.sharing import BOUND, CONTENT, KEY, host, remote_of

from xcache.wire import protocol

PORT, WIRE = 6390, "wire0"
# Of the holder's namespace, where the Redis is, and of the other one; from the range for documentation.
HERE, THERE = "192.0.2.1", "192.0.2.2"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


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


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("redis-server"), reason="there is no Redis: apt-get install redis-server")
def test_a_machine_that_is_cut_off_compiles(namespaces, tmp_path):
    inside = [("ip", "netns", "exec", name) for name in namespaces]

    def answers() -> bool:
        command = [*inside[1], "redis-cli", "-h", HERE, "-p", str(PORT), "ping"]
        return b"PONG" in subprocess.run(command, capture_output=True, timeout=5, check=False).stdout

    server = ["redis-server", "--port", str(PORT), "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""]  # noqa: S104 - in a namespace
    server += ["--set-proc-title", "no"]
    tier = f"redis://{HERE}:{PORT}"
    with (
        running([*inside[0], *server], tmp_path, answers),
        host(tier, under=inside[0], XCACHE_REMOTE_TIMEOUT=f"{BOUND}s") as here,
        host(tier, under=inside[1], XCACHE_REMOTE_TIMEOUT=f"{BOUND}s") as there,
        talking(here) as holder,
        talking(there) as other,
    ):
        lease = outcome(holder, holder.say(get_message(KEY, 60.0)))
        assert isinstance(lease, protocol.Missing)
        assert lease.lease
        waiting = begin_to_wait(other, KEY)
        ip("-n", namespaces[1], "link", "set", WIRE, "down")
        since = time.monotonic()
        answer = outcome(other, waiting)
        assert isinstance(answer, protocol.Missing)
        assert answer.lease
        # A look at the lease, and the answer that does not come.
        assert time.monotonic() - since < 2 * BOUND
        assert other.put(KEY, CONTENT) == protocol.Stored(True)
        # The holder does not notice.
        assert holder.put(KEY, CONTENT) == protocol.Stored(True)
        assert until(lambda: not remote_of(here)["waiting"])
        ip("-n", namespaces[1], "link", "set", WIRE, "up")
        assert until(lambda: not remote_of(there)["waiting"])
        assert remote_of(there)["state"] == "ok"
