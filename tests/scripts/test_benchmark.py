"""The parts of the benchmark that no other run of the tests uses still work with the code that they measure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

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
