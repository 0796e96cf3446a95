"""The short form of scripts/pairs: programs that differ in one thing never get each other's results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pairing import page
from support.places import REPOSITORY

SCRIPTS = Path(page.__file__).parents[1]


@pytest.mark.once
@pytest.mark.timeout(400)
def test_no_program_gets_the_results_of_another(tmp_path):
    paths = (REPOSITORY, REPOSITORY / "daemon", SCRIPTS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XCACHE", "JAX", "XLA"))}
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "pairing.run", "--sample", "12", "--seed", "0"],
        env=environment | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        cwd=tmp_path, capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " 12 pairs " in ran.stdout.splitlines()[-1]
