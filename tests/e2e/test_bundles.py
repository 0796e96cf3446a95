"""A real program that finds all it needs in a bundle compiles nothing, and skips lowering, on its first run."""

from __future__ import annotations

import contextlib
import json

import pytest
from support.command_line import Shell
from support.marks import thorough
from support.places import PATIENCE
from support.sharing import host, remote_of, train

pytestmark = pytest.mark.once


@pytest.mark.parametrize("is_imported", thorough([True, False], usual=[True]), ids=["imported", "in place"])
def test_a_fresh_machine_starts_warm_from_a_bundle(tmp_path, is_imported):
    bundle = tmp_path / "cache.xcb"
    with host() as here:
        first = train(here)
        assert first["hits"] == 0
        Shell(here).say("export", "--run", "last", "-o", str(bundle))
    patient = {"XCACHE_REMOTE_TIMEOUT": f"{PATIENCE}s"}
    with host(**patient | ({} if is_imported else {"XCACHE_BUNDLES": str(bundle)})) as there:
        shell = Shell(there)
        if is_imported:
            # The compiler of this Python is known, though no program has run here.
            assert f"stored {first['misses']} entries" in shell.say("import", str(bundle))
        second = train(there)
        assert second["computed"] == first["computed"]
        assert (second["misses"], second["hits"]) == (0, first["misses"])
        counted = json.loads(shell.run("stats", "--json").stdout)
        assert counted["lowerings"]["skipped"] > 0
        if not is_imported:
            # All of it, and what the program wanted.
            assert remote_of(there)["found"] == first["misses"] + 1


@pytest.mark.thorough
def test_a_bundle_of_programs_shows_them(tmp_path):
    with contextlib.ExitStack() as stack:
        here, there = (stack.enter_context(host()) for _ in range(2))
        train(here)
        Shell(here).say("export", "--programs", "-o", str(tmp_path / "cache.xcb"))
        shell = Shell(there)
        shell.say("import", str(tmp_path / "cache.xcb"))
        assert "func.func public @main" in shell.say("hlo", "train_step")
