"""Programs that wait for another one's compile, which never ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal

import pytest
from support.marks import thorough
from support.places import Place, until
from support.together import PROGRAM, begin, end

pytestmark = pytest.mark.slow


def compiling(place: Place) -> list[tuple[int, int]]:
    """Return the pid of each process that has long been compiling the large program, and how many wait for it."""
    with contextlib.suppress(OSError):
        result = place.run("import sys; from xcache.cli import main; sys.argv = ['xcache', 'status', '--json']; main()")
        # A busy machine's daemon may not answer in time.
        compiles = json.loads(result.stdout).get("compiles", [])
        return [(c["pid"], c["waiting"]) for c in compiles if c["module_name"] == "jit_f" and c["seconds"] > 0.6]
    return []


@pytest.mark.parametrize("number", thorough([signal.SIGKILL, signal.SIGSTOP], usual=[signal.SIGKILL]))
def test_when_the_one_that_compiles_is_killed_or_stopped_the_others_go_on(place, number):
    children = [begin(place, PROGRAM, XCACHE_TIMEOUT="60s", XCACHE_LOG="debug") for _ in range(3)]
    assert until(lambda: [waiting for _, waiting in compiling(place)] == [2], 60)
    ((pid, _),) = compiling(place)
    os.kill(pid, number)
    (held,) = [child for child in children if child.pid == pid]
    others = [end(child) for child in children if child is not held]
    held.kill()
    held.communicate()
    assert others[0][0][0] == others[1][0][0]
    said = "".join(stderr for _, stderr in others)
    # One of the two compiles and the other gets its result; both get the killed process's if it had just stored it.
    assert said.count("miss: jit_f ") <= 1
    assert f"waiting for process {pid} (-c), which has been compiling jit_f for" in said
    assert "waited " in said
