"""Real virtual environments with different jaxlibs that share one daemon: upgraded, downgraded, deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.command_line import Shell
from support.jax_environment import JaxEnvironment
from support.places import until

pytestmark = pytest.mark.slow

# Both run on every Python that xcache supports.
FIRST, SECOND = "0.7.2", "0.7.1"
PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, xcache
assert jax.__file__.startswith(sys.prefix), jax.__file__
print(float(jax.jit(lambda x: (x * 3 + 1).sum())(jnp.arange(8.0))), file=sys.stderr)
print(json.dumps({"jaxlib": jax.lib.__version__, "hits": xcache.stats().hits, "misses": xcache.stats().misses}))
"""


def states(shell: Shell) -> dict[str, str]:
    return {row["jaxlib_version"]: row["state"] for row in shell.json("toolchains")["toolchains"]}


def why(shell: Shell) -> list[dict]:
    """Return what `why` tells of the last run's misses; the other jax may lower some programs otherwise."""
    return [miss for miss in shell.json("why")["misses"] if miss["cause"] != "other program"]


def rebuild(environment: JaxEnvironment) -> Path:
    """Give a native library other bytes in place, under the same version."""
    library = max((environment.packages / "jaxlib").glob("*.so"), key=lambda path: path.stat().st_size)
    with library.open("ab") as file:
        file.write(b"\0")
    return library


def test_nothing_of_a_jaxlib_is_found_by_another_one(place):
    environment = JaxEnvironment(place, "one", None, PROGRAM)
    hits, compiled = environment.run()
    assert (hits, compiled > 0) == (0, True)
    assert environment.run() == (compiled, 0)
    rebuild(environment)
    assert environment.run() == (0, compiled)


# 80 MB are fetched four times, or twice where pip keeps what it fetched.
@pytest.mark.timeout(900)
@pytest.mark.thorough
def test_environments_with_different_jaxlibs_share_a_daemon(place):
    shell = Shell(place)
    first, second = JaxEnvironment(place, "first", FIRST, PROGRAM), JaxEnvironment(place, "second", SECOND, PROGRAM)
    hits, compiled = first.run()
    assert hits == 0
    assert compiled > 0
    # The two environments neither find nor remove each other's entries.
    assert second.run() == (0, compiled)
    told = why(shell)
    assert {miss["cause"].rpartition("; ")[2] for miss in told} == {"other toolchain"}
    assert {miss["differences"][0]["text"] for miss in told} == {
        f"jaxlib is {SECOND} here, {FIRST} in the stored entry"
    }
    assert first.run() == second.run() == (compiled, 0)
    assert states(shell) == {FIRST: "live", SECOND: "live"}

    # Another version goes into the first, while the second has that version too.
    first.install(SECOND)
    assert until(lambda: states(shell)[FIRST] == "stale")
    assert states(shell)[SECOND] == "live"
    assert first.run() == (compiled, 0)
    assert f"{compiled} entr" in shell.say("stats")

    # And back again: nothing is compiled anew.
    first.install(FIRST)
    assert first.run() == (compiled, 0)
    assert states(shell) == {FIRST: "live", SECOND: "live"}

    # An environment that is deleted takes along what only it had.
    shutil.rmtree(first.root)
    assert until(lambda: states(shell) == {FIRST: "stale", SECOND: "live"})
    assert second.run() == (compiled, 0)

    # A native library that is rebuilt in place: another one of the same version.
    library = rebuild(second)
    assert until(lambda: states(shell) == {FIRST: "stale", SECOND: "stale"})
    assert second.run() == (0, compiled)
    told = why(shell)
    assert {miss["cause"] for miss in told} == {"stale"}
    says = f"{library.name} has other bytes here than in the stored entry, under the same jaxlib"
    assert {miss["differences"][0]["text"] for miss in told} == {says}
    assert sorted(row["state"] for row in shell.json("toolchains")["toolchains"]) == ["live", "stale", "stale"]
