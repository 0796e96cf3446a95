"""The one figure of the benchmark that is computed rather than measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "scripts" / "benchmark"


def cannot_be_hidden(ready, spans):
    source = f"import json, observe; print(json.dumps(observe.cannot_be_hidden({ready}, {spans})))"
    said = subprocess.run(
        [sys.executable, "-c", source], cwd=BENCHMARK, capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(said.stdout)


@pytest.mark.parametrize(
    ("spans", "left"),
    [
        ([], 0.0),
        # It is wanted 3 seconds after the backend, and takes 5.
        ([(13.0, 5.0)], 2.0),
        ([(13.0, 3.0)], 0.0),
        # The second is wanted the sooner, the less there was to wait for the first.
        ([(13.0, 5.0), (20.0, 9.0)], 4.0),
    ],
)
def test_a_load_cannot_be_hidden_when_it_is_wanted_too_soon(spans, left):
    assert cannot_be_hidden(10.0, spans) == pytest.approx(left)
