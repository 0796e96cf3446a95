"""The reduced run of scripts/soundness: our programs and the hardest cases, under two hash seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import soundness_judge

SCRIPT = Path(soundness_judge.__file__).with_name("soundness_run.py")


@pytest.mark.thorough
@pytest.mark.slow
def test_no_structure_stands_for_two_programs(tmp_path):
    command = [sys.executable, SCRIPT, "--records", tmp_path, "--only", "hard_cases", "programs"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XCACHE", "JAX", "XLA"))}
    subprocess.run(command, env=environment, timeout=170, check=True)
    judged = soundness_judge.judge(tmp_path / jax.__version__)
    assert judged.lowerings > 700
    assert judged.eligible > 0.9 * judged.lowerings
    assert not judged.contradictions
    assert not judged.unstable
    # An alias of the first run would have spared every lowering of the second.
    assert judged.found == judged.repeated > 300
