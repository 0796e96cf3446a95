"""A lock file of a real run, checked on another host, and fetched there before the program runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import Shell
from support.engines import Engine
from support.engines import folder_engine as folder_engine
from support.engines import redis_engine as redis_engine
from support.marks import thorough
from support.places import PATIENCE, Place, until
from support.program_files import program_path
from support.sharing import host

pytestmark = pytest.mark.once


@pytest.fixture(scope="session", params=thorough(["folder", "redis"], usual=["folder"]))
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in turn."""
    found: Engine = request.getfixturevalue(f"{request.param}_engine")
    return found


def train(place: Place, lock: Path) -> dict[str, object]:
    """Run the training program on a host; return what it says."""
    done = subprocess.run(
        [sys.executable, program_path("train_a_little")],
        env=place.env | {"XCACHE": "1", "JAX_PLATFORMS": "cpu", "XCACHE_LOCK": str(lock)},
        cwd=place.root,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said: dict[str, object] = json.loads(done.stdout)
    assert said["errors"] == {}
    return said


def test_what_another_host_compiled_is_found_before_the_run_and_fetched(engine, tmp_path):
    tier = engine.at("preflight")
    settings = {"XCACHE_REMOTE_TIMEOUT": f"{PATIENCE}s"} | tier.environment
    lock = tmp_path / "run.lock"
    with host(tier.url, **settings) as here:
        compiled = train(here, lock)
        assert until(lambda: not here.query("SELECT 1 FROM uploads"), 3 * PATIENCE)
        assert Shell(here).json("preflight", str(lock))["here"] == compiled["misses"]
    with host(tier.url, **settings) as there:
        shell = Shell(there)
        found = shell.json("preflight", str(lock))
        assert (found["programs"], found["here"], found["remote"]) == (compiled["misses"], 0, compiled["misses"])
        assert [fit["differs"] for fit in found["toolchains"]] == [False]
        found = shell.json("preflight", str(lock), "--fetch")
        assert (found["here"], found["fetched"]) == (compiled["misses"], compiled["misses"])


@pytest.mark.thorough
def test_a_run_after_the_fetch_needs_no_remote_store(folder_engine, tmp_path):
    tier, lock, again = folder_engine.at("fetched"), tmp_path / "run.lock", tmp_path / "again.lock"
    with host(tier.url) as here:
        compiled = train(here, lock)
        assert until(lambda: not here.query("SELECT 1 FROM uploads"), 3 * PATIENCE)
    with host(tier.url) as there:
        Shell(there).json("preflight", str(lock), "--fetch")
        there.stop()
        there.env["XCACHE_REMOTE"] = ""
        there.start_daemon()
        ran = train(there, again)
        assert (ran["misses"], ran["hits"], ran["computed"]) == (0, compiled["misses"], compiled["computed"])
        assert again.read_bytes() == lock.read_bytes()
        # Another program needs more.
        source = program_path("train_a_little").read_text().replace("0.1 * g", "0.2 * g")
        on = {"XCACHE": "1", "JAX_PLATFORMS": "cpu", "XCACHE_LOCK": str(again)}
        assert there.run(source, **on).returncode == 0
    with host() as third:
        missing = Shell(third).json_with_status("preflight", str(again), code=1)
        assert missing["missing"] == missing["programs"] == compiled["misses"]
        assert missing["compile_seconds"] > 0
