"""Virtual environments with a jax of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


class JaxEnvironment:
    """A virtual environment with a jax of its own; everything else is that of these tests."""

    def __init__(self, place, name: str, version: str | None, program: str) -> None:
        """``program`` is what ``run()`` runs; it prints its hits and misses. Without a version the jax is a copy."""
        self.place = place
        self.program = program
        self.root = place.root / name
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.root], check=True, timeout=60)
        (self.packages / "others.pth").write_text(sysconfig.get_paths()["purelib"])
        if version is None:
            for package in ("jax", "jaxlib"):
                source = Path(sysconfig.get_paths()["purelib"]) / package
                shutil.copytree(source, self.packages / package, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            self.install(version)

    @property
    def packages(self) -> Path:
        return next(self.root.glob("lib/python3*/site-packages"))

    def install(self, version: str) -> None:
        """Install jax and jaxlib with pip, as a user does, but without their dependencies: those are there already."""
        wanted = [f"jax=={version}", f"jaxlib=={version}"]
        pip = [sys.executable, "-m", "pip", "--python", self.root / "bin" / "python", "install", "--quiet", "--no-deps"]
        # Most of it is never imported.
        pip.append("--no-compile")
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True, timeout=300, check=False)
        if "No matching distribution" in done.stderr or "Could not find a version" in done.stderr:
            pytest.skip(f"there is no jax {version} to be had here: {done.stderr.splitlines()[-1]}")
        assert done.returncode == 0, done.stderr

    def run(self) -> tuple[int, int]:
        """Hits and misses of a program that runs in it."""
        done = subprocess.run(
            [self.root / "bin" / "python", "-c", self.program],
            env=self.place.env | {"XCACHE": "1", "JAX_PLATFORMS": "cpu"},
            cwd=self.place.root,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        said = json.loads(done.stdout)
        return said["hits"], said["misses"]
