"""The workflow for GitHub's runners: its shell is run here, step by step, on runners that begin with empty disks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.places import REPOSITORY, Place

yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra test")

TEST = "import jax\n\n\ndef test_f():\n    assert jax.jit(lambda x: x {})(1.0) == 2.0\n"
_SECONDS = 120


def steps() -> list[dict[str, Any]]:
    found = yaml.safe_load((REPOSITORY / "deploy" / "github-actions.yaml").read_text())
    listed: list[dict[str, Any]] = found["jobs"]["tests"]["steps"]
    return listed


class Runner:
    """A fresh runner on the main branch; its cache is a folder that all of them share."""

    def __init__(self, root: Path, caches: Path, number: int) -> None:
        self.temp, self.caches = root / f"r{number}", caches
        self.temp.mkdir(mode=0o700)
        folder = Path(sys.executable).parent
        self.env = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(self.temp), "JAX_PLATFORMS": "cpu", "XCACHE": "1"}
        self.env["RUNNER_TEMP"] = str(self.temp)
        self.said: dict[str, str] = {}
        self._values = {"runner.temp": str(self.temp), "github.run_id": str(number), "github.run_attempt": "1"}

    def work(self, test: str) -> None:
        """Do what the workflow says, but for installing."""
        (self.temp / "test_f.py").write_text(test)
        for step in steps():
            uses = step.get("uses", "").partition("@")[0]
            if uses == "actions/cache/restore":
                path, prefix = self._with(step, "path"), self._with(step, "restore-keys")
                if found := sorted(self.caches.glob(f"{prefix}*")):
                    path.write_bytes(found[-1].read_bytes())
            elif uses == "actions/cache/save":
                if self._values.get("steps.export.outputs.is_new") == "true":
                    (self.caches / self._with(step, "key").name).write_bytes(self._with(step, "path").read_bytes())
            elif "run" in step and step["name"] != "Install":
                self._run(step)

    def _run(self, step: dict[str, Any]) -> None:
        # Text from outside must not become part of a shell's script.
        assert "${{" not in step["run"]
        files = {"GITHUB_ENV": self.temp / "env", "GITHUB_OUTPUT": self.temp / "output"}
        for path in files.values():
            path.write_text("")
        done = subprocess.run(
            ["/bin/bash", "-e", "-c", step["run"]],
            env=self.env | {name: str(path) for name, path in files.items()},
            cwd=self.temp,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.said[step["name"]] = done.stdout
        self.env |= dict(line.split("=", 1) for line in files["GITHUB_ENV"].read_text().splitlines())
        for line in files["GITHUB_OUTPUT"].read_text().splitlines():
            name, _, value = line.partition("=")
            self._values[f"steps.{step['id']}.outputs.{name}"] = value

    def _with(self, step: dict[str, Any], name: str) -> Path:
        return Path(re.sub(r"\${{ (\S+) }}", lambda found: self._values[found[1]], step["with"][name]))


def test_it_saves_where_it_restores():
    by_action = {step["uses"].partition("@")[0]: step["with"] for step in steps() if "with" in step}
    restored, saved = by_action["actions/cache/restore"], by_action["actions/cache/save"]
    assert (saved["path"], saved["key"]) == (restored["path"], restored["key"])
    assert restored["key"].startswith(restored["restore-keys"])


@pytest.mark.slow
@pytest.mark.thorough
def test_a_second_runner_compiles_nothing_and_a_third_one_what_is_new(place: Place):
    caches = place.root / "caches"
    caches.mkdir()
    first, second, third = (Runner(place.root, caches, number) for number in (1, 2, 3))
    first.work(TEST.format("+ 1"))
    assert "wrote " in first.said["Export"] and len([*caches.iterdir()]) == 1
    # The name holds the processor's name and features, on any processor.
    (name,) = (path.name for path in caches.iterdir())
    assert re.fullmatch(r"xcache-[\d.]+-[0-9a-f]{12}-1-1", name)
    second.work(TEST.format("+ 1"))
    assert "(100.0% of what can be cached)" in second.said["Export"] and len([*caches.iterdir()]) == 1
    third.work(TEST.format("* 2"))
    assert "wrote " in third.said["Export"] and len([*caches.iterdir()]) == 2
