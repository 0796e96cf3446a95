"""Settings as the commands show them, those that cannot be used, and where a service is installed."""

from __future__ import annotations

import json
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.command_line import LONG, NAMES
from support.places import REPOSITORY

from xcache.cli import main, service
from xcache.config.table import SETTINGS


def test_the_settings(shell, tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('max_size = "1536MiB"\nidle_exit = "2h"\n')
    shell.env |= {"XCACHE_CONFIG": str(file), "XCACHE_TIMEOUT": "500ms"}
    del shell.env["XCACHE_IDLE_EXIT"]
    shown = {one["name"]: one for one in shell.json("config")["settings"]}
    assert set(shown) == {"mode", *(setting.name for setting in SETTINGS)}
    assert (shown["max_size"]["value"], shown["max_size"]["source"]) == (1536 * 2**20, str(file))
    assert (shown["timeout"]["value"], shown["timeout"]["source"]) == (0.5, "environment")
    assert (shown["log"]["source"], shown["mode"]["value"]) == ("default", "off")
    assert shown["on_miss_after"]["value"] is None
    said = shell.say("config")
    for part in ("XCACHE_MAX_SIZE", "1.5 GiB", "0.5s", "2h", str(file), "debug, info, warning or error"):
        assert part in said


def test_a_variable_that_is_no_setting_is_named_with_the_setting_it_resembles(shell):
    said = shell.run("config", "--json", XCACHE_MAXSIZE="10G")
    assert said.returncode == 0
    assert said.stderr == (
        "xcache: XCACHE_MAXSIZE is not a setting, and nothing reads it; did you mean XCACHE_MAX_SIZE?\n"
    )
    assert json.loads(said.stdout)["unknown"] == ["XCACHE_MAXSIZE"]


@pytest.mark.parametrize(
    ("wrong", "name"),
    [("XCACHE_TIMEOUT=never", "timeout"), ("XCACHE_DAEMON_USER=no-such-one", "daemon_user"), ("XCACHE=maybe", "mode")],
)
def test_a_setting_that_cannot_be_used_does_not_hide_the_others(shell, wrong, name):
    variable, _, value = wrong.partition("=")
    said = shell.run("config", "--json", XCACHE_MAX_ENTRIES="7", **{variable: value})
    found = json.loads(said.stdout)
    shown = {one["name"]: one for one in found["settings"]}
    assert (shown["max_entries"]["value"], len(found["problems"]), said.returncode) == (7, 1, 2)
    assert found["problems"][0].startswith(f"{variable}={value!r} (environment)")
    assert shown[name]["value"] not in (value, None)
    assert said.stderr == f"xcache: {found['problems'][0]}\n"


@pytest.mark.parametrize("arguments", [["--python", "/no/such/python", "extra"], [""], ["extra"]])
def test_installing_refuses_what_it_does_not_know(arguments):
    said = subprocess.run(
        [REPOSITORY / "scripts" / "install", *arguments], capture_output=True, text=True, timeout=LONG, check=False
    )
    assert said.returncode == 1
    assert "is not understood; usage: scripts/install [--python PATH]" in said.stderr


def test_installing_prints_whole_paths(tmp_path):
    """The environment's pip installs nothing."""
    environment, home = tmp_path / "environment", tmp_path / "home"
    venv.create(environment, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (packages / "pip").mkdir()
    (packages / "pip" / "__main__.py").touch()
    (packages / "xcache.pth").write_text(str(REPOSITORY))
    home.mkdir()
    command = [REPOSITORY / "scripts" / "install", "--python", "../environment/bin/python"]
    said = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=LONG, check=True).stdout
    assert f"  XCACHE=1 {environment.resolve()}/bin/python train.py" in said.splitlines()
    assert ".." not in said


def test_without_systemd_service_says_so_and_that_none_is_needed(monkeypatch, tmp_path):
    monkeypatch.setattr(service.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(service, "_BOOTED", tmp_path / "none")
    for command in ("install", "status", "uninstall"):
        said = CliRunner().invoke(main, ["service", command])
        assert said.exit_code == 1
        assert "no systemd running" in said.output and "programs start the daemon themselves" in said.output


# These find and stop the daemon, or show the other settings, all the same.
@pytest.mark.parametrize("command", [name for name in NAMES if name not in ("status", "stop", "config", "doctor")])
def test_a_setting_that_cannot_be_used_is_one_line(shell, command):
    named = ("show", "hlo", "graph", "cost", "rm", "pin", "unpin", "compare", "key new", "key trust", "key revoke")
    named += ("remote rm", "import", "bundle inspect", "bundle verify", "preflight")
    given = {"export": ["-o", "12"], "prebuild": ["m:f", "--spec", "calls.json"]} | {name: ["12"] for name in named}
    arguments = [*command.split(), *given.get(command, [])]
    shell.env["XCACHE_TIMEOUT"] = "never"
    said = shell.say(*arguments, code=2)
    assert said.startswith("xcache: XCACHE_TIMEOUT='never'")
    assert said.count("\n") == 1


def test_a_directory_that_cannot_be_used_is_one_line(shell, tmp_path):
    (tmp_path / "file").write_text("")
    failed = shell.run("start", XCACHE_DIR=str(tmp_path / "file"))
    assert failed.returncode == 1
    assert failed.stderr.startswith("xcache: ")
    assert failed.stderr.count("\n") == 1


# Their names in JSON are data.
