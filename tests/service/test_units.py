"""The units as they are written, judged by systemd's own tools; no service manager is needed for that."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xcache.cli.service import _check_python as check_python
from xcache.cli.units import NAMES, SERVICE, SOCKET, Scope, scope_of
from xcache.config import config
from xcache.errors import ConfigError, UnavailableError

# "OK" is below 5; these are what was measured, so that a change for the worse is noticed.
EXPOSURE = {"system": 1.0, "user": 4.3}


def scope(kind: str, directory: str = "/var/cache/xcache") -> Scope:
    settings = config.load({"HOME": "/h"}, dir=directory, daemon_user="daemon" if kind == "system" else "")
    folder = Path("/etc/systemd/system" if kind == "system" else "/h/.config/systemd/user")
    homes = {"XDG_CACHE_HOME": '/a 100% "quoted" $HOME'} if kind == "user" else {}
    return Scope(kind, folder, ("systemctl",), settings, "%t/xcache/xcached.sock", homes)


def written(made: Scope, folder: Path, python: str = sys.executable) -> Path:
    for unit in NAMES:
        (folder / unit).write_text(made.filled(unit, python))
    return folder


def nothing(systemctl: tuple[str, ...]) -> dict[str, str]:
    """The variables of a service manager that has none."""
    return {}


needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze")


@needs_systemd
@pytest.mark.parametrize("kind", ["system", "user"])
def test_its_exposure_is_ok(kind, tmp_path):
    unit = written(scope(kind), tmp_path) / SERVICE
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found = re.search(r"Overall exposure level for xcached.service: ([\d.]+) (\w+)", said.stdout)
    assert found, said
    assert found[2] in ("OK", "SAFE"), said.stdout
    assert float(found[1]) <= EXPOSURE[kind], said.stdout


@needs_systemd
@pytest.mark.parametrize(
    ("kind", "directory"),
    [("system", "/var/cache/xcache"), ("system", '/a 100% "quoted" \\ $HOME folder'), ("user", "/a b")],
)
def test_systemd_understands_every_line(tmp_path, kind, directory):
    """Some folders have characters in them that mean something to systemd."""
    python = tmp_path / "a b 5% $HOME" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    units = written(scope(kind, directory), tmp_path, str(python))
    command = [
        "systemd-analyze",
        "verify",
        "--man=no",
        "--recursive-errors=no",
        str(units / SERVICE),
        str(units / SOCKET),
    ]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    ours = [line for line in said.stderr.splitlines() if "xcached" in line]
    assert (said.returncode, ours) == (0, []), said.stderr


def test_a_program_that_systemd_would_not_run_is_refused():
    with pytest.raises(ConfigError, match="systemd cannot run a program of this name"):
        scope("user").filled(SERVICE, '/opt/a "b"/python')
    for directory in ("/a\nEnvironment=B=c", "/a\\", "/a "):
        with pytest.raises(ConfigError, match="a systemd unit cannot hold this path"):
            scope("user", directory).filled(SERVICE, sys.executable)


def test_a_package_that_pip_installed_for_a_user_is_found(tmp_path, monkeypatch):
    """The service manager knows the home, and nothing else of the caller's environment."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "at home in $HOME$PYTHONPATH" >&2\n[ "$HOME" = /home/of/user ]\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    check_python(scope("user")._replace(homes={"HOME": "/home/of/user"}))
    with pytest.raises(UnavailableError, match=r"the service manager cannot run .*: at home in /another$"):
        check_python(scope("user")._replace(homes={"HOME": "/another"}))


@pytest.mark.parametrize("kind", ["system", "user"])
def test_nothing_is_left_to_be_filled_in(kind):
    for unit in NAMES:
        text = scope(kind).filled(unit, "/opt/python")
        assert not re.search(r"@[A-Z]+@", text)
        assert f"xcache service install --{kind}" in text


@pytest.mark.parametrize("kind", ["system", "user"])
def test_it_leaves_processors_disks_and_the_journal_to_others(kind):
    text = scope(kind).filled(SERVICE, "/opt/python")
    for line in ("CPUWeight=50", "IOWeight=50", "LogRateLimitIntervalSec=30s", "LogRateLimitBurst=300"):
        assert f"\n{line}\n" in text
    assert "\nPrivateMounts=yes\n" in text


def test_the_users_socket_is_where_programs_look():
    text = scope("user").filled(SOCKET, "/opt/python")
    assert "\nListenStream=%t/xcache/xcached.sock\nSocketMode=0600\nDirectoryMode=0700\n" in text
    assert "\nSocketMode=0666\n" in scope("system").filled(SOCKET, "/opt/python")


def test_a_users_own_is_refused_where_the_machine_has_one(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "xcache").mkdir()
    (tmp_path / "xcache" / "config.toml").write_text(f"daemon_user = {os.getuid()}")
    with pytest.raises(ConfigError, match="one daemon for all users"):
        scope_of("user", nothing)
    # One that was there before can be looked at and removed.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert scope_of("user", nothing, to_serve=False).settings.dir == tmp_path / "xcache"
    (tmp_path / "xcache" / "config.toml").write_text("")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR is not set"):
        scope_of("user", nothing)


def test_the_daemon_looks_where_the_users_programs_look(monkeypatch, tmp_path):
    """The service manager knows nothing of the folders in a shell's environment, and looks for units in its own."""
    for name in ("HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, f"{tmp_path}/{name}" if name != "XDG_RUNTIME_DIR" else "/run")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    made = scope_of("user", lambda _: {"HOME": f"{tmp_path}/HOME", "XDG_CONFIG_HOME": f"{tmp_path}/theirs"})
    assert made.folder == tmp_path / "theirs" / "systemd" / "user"
    assert made.homes == {"XDG_CACHE_HOME": f"{tmp_path}/XDG_CACHE_HOME", "XDG_CONFIG_HOME": f"{tmp_path}/HOME/.config"}
    assert f'"XDG_CACHE_HOME={tmp_path}/XDG_CACHE_HOME" "XDG_CONFIG_HOME=' in made.filled(SERVICE, "/opt/python")
    assert made.settings.dir == tmp_path / "XDG_CACHE_HOME" / "xcache"
