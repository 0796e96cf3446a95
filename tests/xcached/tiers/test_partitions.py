"""Machines that are network namespaces, with a link between them that is cut."""

from __future__ import annotations

import shutil
import subprocess
import time

import pytest
from support.conversation import talking
from support.engines import running
from support.leasing import begin_to_wait, outcome
from support.namespaces import HERE, WIRE, inside, ip
from support.namespaces import namespaces as namespaces
from support.places import get_message, until
from support.sharing import BOUND, CONTENT, KEY, host, remote_of

from xcache.wire import protocol

PORT = 6390


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("redis-server"), reason="there is no Redis: apt-get install redis-server")
def test_a_machine_that_is_cut_off_compiles(namespaces, tmp_path):
    here_runs, there_runs = map(inside, namespaces)

    def answers() -> bool:
        command = [*there_runs, "redis-cli", "-h", HERE, "-p", str(PORT), "ping"]
        return b"PONG" in subprocess.run(command, capture_output=True, timeout=5, check=False).stdout

    server = ["redis-server", "--port", str(PORT), "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""]  # noqa: S104 - in a namespace
    server += ["--set-proc-title", "no"]
    tier = f"redis://{HERE}:{PORT}"
    with (
        running([*here_runs, *server], tmp_path, answers),
        host(tier, under=here_runs, XCACHE_REMOTE_TIMEOUT=f"{BOUND}s") as here,
        host(tier, under=there_runs, XCACHE_REMOTE_TIMEOUT=f"{BOUND}s") as there,
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
