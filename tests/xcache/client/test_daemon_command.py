"""The command that runs a daemon: never the program itself, and with nothing of it but where things are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from support.places import REPOSITORY

from xcache.client import daemon_command
from xcache.client.daemon_command import daemon_environment
from xcache.errors import UnavailableError

OTHER = 54321


@pytest.fixture
def no_installation(monkeypatch, tmp_path):
    """Neither an interpreter nor a command of this installation is to be found."""
    monkeypatch.setattr(sys, "exec_prefix", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:bin:")
    (tmp_path / "bin").mkdir(mode=0o755)
    return tmp_path / "bin"


def test_an_interpreter_runs_it():
    command = daemon_command.daemon_command()
    assert command[0] == sys.executable
    assert command[-3:] == ["-P", "-m", "xcached"]


@pytest.mark.parametrize("executable", [None, "", "/usr/bin/app", "/no/such/python3"])
def test_a_program_that_embeds_python_uses_that_of_its_installation(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    assert daemon_command.daemon_command()[0] == f"{sys.exec_prefix}/bin/python3.{sys.version_info.minor}"


@pytest.mark.parametrize("executable", [None, "", "/usr/bin/app"])
def test_without_any_interpreter_none_is_run(monkeypatch, no_installation, executable):
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(UnavailableError, match="no Python interpreter is known"):
        daemon_command.daemon_command()


def test_a_frozen_program_is_not_run_whatever_it_is_called(monkeypatch, no_installation):
    app = no_installation / "python3"
    shutil.copy("/bin/true", app)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", str(app))
    with pytest.raises(UnavailableError):
        daemon_command.daemon_command()
    monkeypatch.delattr(sys, "frozen")
    assert daemon_command.daemon_command()[0] == str(app)
    # Nuitka.
    monkeypatch.setattr(sys.modules["__main__"], "__compiled__", object(), raising=False)
    with pytest.raises(UnavailableError):
        daemon_command.daemon_command()


def test_a_command_on_the_path_is_run_if_nobody_else_can_have_put_it_there(monkeypatch, no_installation):
    monkeypatch.setattr(sys, "executable", None)
    script = no_installation / "xcached"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert daemon_command.daemon_command() == [str(script)]
    for wrong, right in ((0o644, 0o755), (0o757, 0o755)):
        script.chmod(wrong)
        with pytest.raises(UnavailableError):
            daemon_command.daemon_command()
        script.chmod(right)
    no_installation.chmod(0o777)
    with pytest.raises(UnavailableError):
        daemon_command.daemon_command()
    no_installation.chmod(0o755)
    if os.getuid() == 0:
        os.chown(script, OTHER, OTHER)
        with pytest.raises(UnavailableError):
            daemon_command.daemon_command()


def test_a_daemon_gets_where_things_are_and_no_tools_of_the_programs(monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    given = {
        "HOME": "/h",
        "PATH": "/bin",
        "LC_ALL": "C",
        "XDG_CACHE_HOME": "/c",
        "PYTHONPATH": "/p",
        "XCACHE_LOG": "info",
    }
    kept_back = {
        "NOTIFY_SOCKET": "/n",
        "WATCHDOG_USEC": "1",
        "LISTEN_PID": "1",
        "LD_PRELOAD": "x.so",
        "PYTHONINSPECT": "1",
        "PYTHONSTARTUP": "x.py",
        "COVERAGE_PROCESS_START": "x",
        "MALLOC_ARENA_MAX": "1",
    }
    assert daemon_environment(given | kept_back) == given
    # A setting may name the variable with the signing key.
    assert daemon_environment(given | {"MY_KEY": "secret"}, "MY_KEY") == given | {"MY_KEY": "secret"}
    # Credentials are only for a daemon that has a use for them.
    secrets = {"AWS_ACCESS_KEY_ID": "a", "AZURE_STORAGE_ACCOUNT_KEY": "b", "HTTPS_PROXY": "c", "SSL_CERT_FILE": "/d"}
    assert daemon_environment(given | secrets) == given
    assert daemon_environment(given | secrets, remotes=["s3://bucket/x"]) == given | {
        name: secrets[name] for name in ("AWS_ACCESS_KEY_ID", "HTTPS_PROXY", "SSL_CERT_FILE")
    }
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert daemon_environment(given) == given | {"PYTHONDONTWRITEBYTECODE": "1"}


def test_a_bundles_libraries_are_not_the_daemons(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    bundle = {"HOME": "/h", "LD_LIBRARY_PATH": "/tmp/bundle", "PYTHONPATH": "/bundle"}
    assert daemon_environment(bundle) == {"HOME": "/h"}
    assert daemon_environment(bundle | {"LD_LIBRARY_PATH_ORIG": "/lib"}) == {"HOME": "/h", "LD_LIBRARY_PATH": "/lib"}


PLANTED = """
import os, pathlib, sys
pathlib.Path({marks!r}, str(os.getpid())).touch()
"""
STARTS = """
import sys
sys.path[:0] = {path!r}
from xcache.config import config
from xcache.client.launcher import Launcher
launcher = Launcher(config.load())
assert launcher.start()
launcher.wait(30)
launcher.close()
"""


@pytest.mark.parametrize("flags", [("-I",), ("-E",), ()])
def test_the_daemon_runs_no_code_that_its_program_was_told_not_to_run(place, flags):
    planted, marks = place.root / "planted", place.root / "marks"
    planted.mkdir()
    marks.mkdir()
    (planted / "sitecustomize.py").write_text(PLANTED.format(marks=str(marks)))
    path = [str(REPOSITORY), str(REPOSITORY / "daemon")]
    place.env["PYTHONPATH"] = f"{planted}:{place.env['PYTHONPATH']}"
    command = [sys.executable, *flags, "-c", STARTS.format(path=path)]
    subprocess.run(command, env=place.env, check=True, timeout=60)
    ran = {path.name for path in marks.iterdir()}
    assert (str(place.daemon_pid()) in ran) == (not flags)


EMBEDS = """
import json, os, sys
sys.frozen = True
with open({runs!r}, "a") as runs:
    print(sys.argv, file=runs)
import jax
print(float(jax.jit(lambda v: v * 3 + 1)(2.0)))
"""


def test_a_frozen_program_runs_once_and_says_in_one_line_that_it_has_no_daemon(place):
    """The interpreter under another name, as an application that carries one; it would run itself again as a daemon."""
    app, runs = place.root / "app", place.root / "runs"
    app.mkdir()
    (app / "main.py").write_text(EMBEDS.format(runs=str(runs)))
    done = subprocess.run(
        [sys.executable, str(app / "main.py"), "argument"],
        env=place.env | {"XCACHE": "1", "PATH": "/nowhere", "LD_LIBRARY_PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "7.0\n"), done.stderr
    assert runs.read_text().count("\n") == 1
    assert done.stderr.count("\n") == 1
    assert "no Python interpreter is known that this process can run" in done.stderr
    assert not place.answers()
