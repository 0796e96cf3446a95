"""Programs whose lowering is skipped give the same results, and whoever asks for a module gets the real one."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3

import pytest
from support.command_line import Shell
from support.program_files import program_text
from support.programs import NEEDS, PROGRAMS, run

from xcache.client.client import Client
from xcache.wire.aliases import sealed

SKIP = {"XCACHE": "1", "XCACHE_LOWERING": "skip"}


# The others have nothing more that lowering reads.
CHOSEN = ("plain", "exported", "sharded", "callback", "partitioned", "laid out")


@pytest.mark.parametrize("name", CHOSEN)
def test_a_program_is_the_same_whether_it_is_lowered_or_not(place, name):
    needs = NEEDS.get(name, {})
    off = run(place, PROGRAMS[name], mode=None, **needs)
    cold, warm = (run(place, PROGRAMS[name], XCACHE_LOWERING="skip", **needs) for _ in range(2))
    checked = run(place, PROGRAMS[name], XCACHE_LOWERING="check", **needs)
    assert off.result == cold.result == warm.result == checked.result
    assert off.complaints == cold.complaints == warm.complaints == checked.complaints
    for ran in (cold, warm, checked):
        assert ran.stats["errors"] == {}
        assert not {"contradiction", "error"} & ran.stats["lowerings"].keys()
    assert warm.stats["misses"] == 0
    if cold.stats["lowerings"].get("no alias"):
        assert warm.stats["lowerings"]["skipped"] > 0
        assert checked.stats["lowerings"]["checked"] > 0
    assert "checked" not in cold.stats["lowerings"] | warm.stats["lowerings"]


def test_whoever_asks_for_a_module_gets_the_real_one(place):
    off, cold, warm = (
        json.loads(place.run(program_text("show_modules"), **settings).stdout.splitlines()[-1])
        for settings in ({}, SKIP, SKIP)
    )
    assert off["shown"] == cold["shown"] == warm["shown"]
    assert warm["lowerings"]["skipped"] >= 10
    assert warm["errors"] == cold["errors"] == {}


def test_checking_finds_a_wrong_alias_and_drops_it(place):
    program = "out = [float(jax.jit(lambda v: v * 3)(x).sum()), float(jax.jit(lambda v: v + 4)(x).sum())]"
    off, cold = run(place, program, mode=None), run(place, program, XCACHE_LOWERING="skip")
    with contextlib.closing(sqlite3.connect(place.dir / "store.db")) as database:
        noted = database.execute("SELECT structure, program, facts FROM aliases").fetchall()
    others = [program for _, program, _ in reversed(noted)]
    client = Client(place.config(), "test", None)
    client.remember_aliases([sealed(each[0], other, each[2]) for each, other in zip(noted, others, strict=True)])
    client.close()
    checked = run(place, program, XCACHE_LOWERING="check")
    wrong = sum(each[1] != other for each, other in zip(noted, others, strict=True))
    assert checked.result == cold.result == off.result
    assert checked.stats["lowerings"]["contradiction"] == wrong > 0
    complaints = "\n".join(checked.complaints)
    assert "please report it" in complaints
    # Both programs can be had.
    shown = re.findall(r"xcache show (\w+) --program", complaints)
    assert len(shown) == 2 * wrong
    for key in shown:
        assert "stablehlo" in Shell(place).say("show", key, "--program")
    after = run(place, program, XCACHE_LOWERING="skip")
    assert (after.result, after.stats["errors"]) == (off.result, {})
