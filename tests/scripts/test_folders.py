"""The tests' own folders have short paths, for the sockets in them, whatever TMPDIR the user has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import Place

# A Unix socket's path has at most 107 bytes.
_LONGEST = 80


def test_the_paths_are_short(place: Place, tmp_path: Path):
    assert max(len(str(each)) for each in (place.root, tmp_path)) < _LONGEST


@pytest.mark.thorough
def test_they_are_as_short_where_the_users_folder_has_a_long_path(tmp_path):
    long = tmp_path / ("a-folder-of-a-batch-system" * 4)
    long.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "1", f"{__file__}::{test_the_paths_are_short.__name__}"],
        env=os.environ | {"TMPDIR": str(long)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
