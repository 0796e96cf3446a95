"""Real virtual environments with different jaxlibs that share one daemon: upgraded, downgraded, deleted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.command_line import Shell
from support.places import until

# 80 MB are fetched four times, or twice where pip keeps what it fetched.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Both run on every Python that xcache supports.
FIRST, SECOND = "0.7.2", "0.7.1"
PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, xcache
assert jax.__file__.startswith(sys.prefix), jax.__file__
print(float(jax.jit(lambda x: (x * 3 + 1).sum())(jnp.arange(8.0))), file=sys.stderr)
print(json.dumps({"jaxlib": jax.lib.__version__, "hits": xcache.stats().hits, "misses": xcache.stats().misses}))
"""


class Environment:
    """A virtual environment with a jax of its own; everything else is that of these tests."""

    def __init__(self, place, name: str, version: str) -> None:
        self.place = place
        self.root = place.root / name
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.root], check=True, timeout=60)
        (self.packages / "others.pth").write_text(sysconfig.get_paths()["purelib"])
        self.install(version)

    @property
    def packages(self) -> Path:
        return next(self.root.glob("lib/python3*/site-packages"))

    def install(self, version: str) -> None:
        """Install jax and jaxlib with pip, as a user does, but without their dependencies: those are there already."""
        wanted = [f"jax=={version}", f"jaxlib=={version}"]
        pip = [sys.executable, "-m", "pip", "--python", self.root / "bin" / "python", "install", "--quiet", "--no-deps"]
        # Most of it is never imported.
        pip.append("--no-compile")
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True, timeout=300, check=False)
        if "No matching distribution" in done.stderr or "Could not find a version" in done.stderr:
            pytest.skip(f"there is no jax {version} to be had here: {done.stderr.splitlines()[-1]}")
        assert done.returncode == 0, done.stderr

    def run(self) -> tuple[int, int]:
        """Hits and misses of a program that runs in it."""
        done = subprocess.run(
            [self.root / "bin" / "python", "-c", PROGRAM],
            env=self.place.env | {"XCACHE": "1", "JAX_PLATFORMS": "cpu"},
            cwd=self.place.root,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        said = json.loads(done.stdout)
        return said["hits"], said["misses"]


def states(shell: Shell) -> dict[str, str]:
    return {row["jaxlib_version"]: row["state"] for row in shell.json("toolchains")["toolchains"]}


def why(shell: Shell) -> list[dict]:
    """Return what `why` tells of the last run's misses; the other jax may lower some programs otherwise."""
    return [miss for miss in shell.json("why")["misses"] if miss["cause"] != "other program"]


def test_environments_with_different_jaxlibs_share_a_daemon(place):
    shell = Shell(place)
    first, second = Environment(place, "first", FIRST), Environment(place, "second", SECOND)
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
    library = max((second.packages / "jaxlib").glob("*.so"), key=lambda path: path.stat().st_size)
    with library.open("ab") as file:
        file.write(b"\0")
    assert until(lambda: states(shell) == {FIRST: "stale", SECOND: "stale"})
    assert second.run() == (0, compiled)
    told = why(shell)
    assert {miss["cause"] for miss in told} == {"stale"}
    says = f"{library.name} has other bytes here than in the stored entry, under the same jaxlib"
    assert {miss["differences"][0]["text"] for miss in told} == {says}
    assert sorted(row["state"] for row in shell.json("toolchains")["toolchains"]) == ["live", "stale", "stale"]
