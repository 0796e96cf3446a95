"""The scripts for Slurm, run as Slurm runs them, for two jobs on a disk that is emptied between them; without Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import REPOSITORY, Place

SCRIPTS = REPOSITORY / "deploy" / "slurm"
PROGRAM = "import jax; jax.jit(lambda x: x * 3)(1.0)"
_SECONDS = 120


class Node:
    """A node whose scripts name folders of the test's own, with an account's home among them."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "slurm"
        self.stores, self.shared = root / "local", root / "home" / ".cache" / "xcache-shared"
        self.folder.mkdir()
        (root / "home").mkdir()
        ours = {
            "/etc/slurm/": f"{self.folder}/",
            "/opt/xcache/bin/": f"{Path(sys.executable).parent}/",
            "/local/xcache": str(self.stores),
            '$(getent passwd "$SLURM_JOB_USER" | cut -d : -f 6)': str(root / "home"),
        }
        for path in SCRIPTS.iterdir():
            text = path.read_text()
            for theirs, our in ours.items():
                text = text.replace(theirs, our)
            (self.folder / path.name).write_text(text)

    def run(self, script: str, job: int) -> str:
        """Run a script of a job; return what it prints."""
        env = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "SLURM_JOB_ID": str(job)}
        env |= {"SLURM_JOB_USER": "root", "SLURM_JOB_UID": "0"}
        return self._said(["/bin/sh", str(self.folder / script)], env)

    def compile(self, job: int) -> str:
        """Run a program with what the job's tasks are told; return what it says."""
        told = [line.removeprefix("export ").split("=", 1) for line in self.run("task-prolog.sh", job).splitlines()]
        env = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "XCACHE": "1", "XCACHE_LOG": "info"} | dict(told)
        return self._said([sys.executable, "-c", PROGRAM], env)

    def _said(self, command: list[str], env: dict[str, str]) -> str:
        done = subprocess.run(
            command, env=env, cwd=self.root, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="Slurm runs prolog and epilog as root")
def test_what_one_job_compiled_is_there_for_the_next_one(place: Place):
    node = Node(place.root)
    assert "started: " in node.run("prolog.sh", 1)
    assert (node.shared.stat().st_mode & 0o777, (node.stores / "1").stat().st_mode & 0o777) == (0o700, 0o700)
    assert " 0 hits" in node.compile(1)
    said = node.run("epilog.sh", 1)
    assert "wait still" not in said and "stopped: " in said
    assert not any(node.stores.iterdir()) and any(path.is_file() for path in node.shared.rglob("*"))
    node.run("prolog.sh", 2)
    assert " 0 misses" in node.compile(2)
    node.run("epilog.sh", 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="Slurm runs prolog and epilog as root")
def test_scripts_never_fail_so_that_the_node_is_not_drained(place: Place):
    node = Node(place.root)
    settings = node.folder / "xcache-settings.sh"
    settings.write_text(settings.read_text().replace(str(Path(sys.executable).parent), "/nowhere"))
    node.run("prolog.sh", 1)
    node.run("epilog.sh", 1)
    assert not any(node.stores.iterdir())
    node.run("epilog.sh", 2)
