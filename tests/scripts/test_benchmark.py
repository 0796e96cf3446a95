"""The parts of the benchmark that no other run of the tests uses still work with the code that they measure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import LONG

BENCHMARK = Path(__file__).parents[2] / "scripts" / "benchmark"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCHMARK:
            del sys.modules[name]


def test_the_pieces_of_a_hit_are_measured(benchmark, tmp_path, monkeypatch):
    import pieces

    monkeypatch.setattr(pieces, "_TURNS", 2)
    monkeypatch.setattr(pieces, "_TURNS_OF_LARGE", 2)
    for times in pieces.pieces(tmp_path).values():
        assert len(times) >= 4
        assert all(len(seconds) == 2 for seconds in times.values())


def test_a_measured_program_is_served_from_the_cache(place):
    def ran(*options):
        command = [sys.executable, str(BENCHMARK / "observe.py"), *options]
        env = place.env | {"XCACHE": "1", "PROGRAM": "many-small"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LONG, check=True)
        return json.loads(done.stdout)

    cold, warm, profiled = ran("--phases"), ran(), ran("--phases")
    assert cold["compiled"] == cold["asked"] > 50
    assert cold["serialize"] > 0
    assert cold["calls"]["compile"] == cold["compiled"]
    for each in warm, profiled:
        assert (each["asked"], each["compiled"], each["stats"]["misses"]) == (cold["asked"], 0, 0)
        assert each["digest"] == cold["digest"]
    assert profiled["calls"]["deserialize"] >= profiled["asked"]
