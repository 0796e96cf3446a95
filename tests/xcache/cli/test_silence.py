"""Nothing that goes against what somebody set stays unsaid: by programs, by status, by the doctor."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys

import pytest
from support.command_line import LONG
from support.sharing import host
from support.users import ALICE, NOBODY, become

from xcache.client.client import Client

IGNORED = "XCACHE_MAX_SIZE, XCACHE_METRICS as given here do not count: the daemon runs with max_size='20G'"


def warnings_of(place, caplog, **settings) -> list[str]:
    """Return what a program with these settings says when it first talks to the daemon."""
    caplog.clear()
    with (
        caplog.at_level(logging.WARNING, "xcache"),
        contextlib.closing(Client(place.config(**settings), "test")) as one,
    ):
        one.report({"requests": 1.0})
        one.report({"requests": 1.0})
    return [record.getMessage() for record in caplog.records]


def test_what_of_its_settings_a_running_daemon_ignores(place, shell, caplog):
    place.start_daemon()
    later = {"XCACHE_MAX_SIZE": "1G", "XCACHE_METRICS": "127.0.0.1:9464"}
    place.env |= later
    (said,) = warnings_of(place, caplog)
    assert said.startswith(IGNORED) and "xcache restart" in said
    shell.env |= later
    assert IGNORED in shell.say("status")
    assert shell.json("status")["ignored"] == {"max_size": "21474836480", "metrics": ""}
    assert IGNORED in shell.say("doctor", "--no-compile")
    assert IGNORED in shell.say("gc")
    for name in later:
        del place.env[name], shell.env[name]
    assert warnings_of(place, caplog) == []
    assert "do not count" not in shell.say("status")
    assert warnings_of(place, caplog, max_size="20G") == []
    (said,) = warnings_of(place, caplog, max_size="1G")
    assert said.startswith("XCACHE_MAX_SIZE as given here does not count")


def test_where_a_limit_comes_from_and_that_a_restart_ended_it(place, shell):
    file = place.root / "config" / "xcache" / "config.toml"
    shell.env["XCACHE_MAX_SIZE"] = "1G"
    shell.say("start")
    del shell.env["XCACHE_MAX_SIZE"]
    said = shell.say("status")
    assert "has max_size from the environment in which it was started" in said
    assert f"a line in {file} keeps it" in said
    assert shell.json("status")["limits_from"]["max_size"] == "environment"
    said = shell.say("restart")
    assert "max_size was '1G', and is '20G' now (default)" in said
    assert str(file) in said
    assert shell.json("restart")["changed"] == {}
    file.parent.mkdir(parents=True)
    file.write_text('max_size = "2G"')
    assert shell.json("restart")["changed"] == {"max_size": ["21474836480", "2147483648"]}
    assert shell.json("status")["limits_from"]["max_size"] == str(file)


@pytest.mark.parametrize(
    ("option", "keys", "expected"),
    [
        ("", {"signer": None, "trusts": ()}, ["nothing of {} is used: ", "nothing is uploaded to {}: no key signs"]),
        ("", {"signer": None}, ["nothing is uploaded to {}: no key signs"]),
        ("", {"trusts": ()}, ["nothing of {} is used: "]),
        ("?readonly=1", {"signer": None}, []),
        ("?trust=tier", {"signer": None, "trusts": ()}, []),
        ("", {}, []),
    ],
)
def test_a_program_says_that_keys_are_missing_for_a_shared_folder(folder, caplog, option, keys, expected):
    address = f"file://{folder}"
    with host(f"{address}{option}", **keys) as place:
        said = warnings_of(place, caplog)
    assert len(said) == len(expected)
    assert all(each.format(address) in one for each, one in zip(expected, said, strict=True)), said


def as_user(uid: int, place, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, and setpriv, to become another user")
    return subprocess.run(
        [*become(uid), sys.executable, "-m", "xcache", *arguments],
        env=place.env | variables,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )


def test_status_says_that_no_store_can_be_made_in_a_home(place, tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    place.root.chmod(0o755)
    store = home / ".cache" / "xcache"
    done = as_user(ALICE, place, "status", XCACHE_DIR=str(store), HOME=str(home))
    assert f"programs run without the cache: {store} does not exist and cannot be made" in done.stderr


def test_nobody_is_told_to_run_programs_under_another_account(place, tmp_path):
    done = as_user(NOBODY, place, "doctor", "--no-compile", "--json", HOME=str(tmp_path))
    found = {each["name"]: each for each in json.loads(done.stdout)["checks"]}
    for name in ("socket", "daemon"):
        assert found[name]["state"] == "wrong"
        assert "under an account of their own" in found[name]["advice"]
        assert "Remove what is there" not in found[name]["advice"]


@pytest.mark.thorough
@pytest.mark.slow
def test_the_doctor_has_the_reason_why_nothing_is_stored(place, tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    place.root.chmod(0o755)
    store = home / "store"
    done = as_user(ALICE, place, "doctor", "--json", XCACHE="1", XCACHE_DIR=str(store), HOME=str(home))
    found = {each["name"]: each for each in json.loads(done.stdout)["checks"]}["compile"]
    assert found["state"] == "wrong"
    assert f"{store} cannot be made: Permission denied (store error)" in found["found"], found


def test_a_store_whose_making_was_cut_short_is_no_older_xcache_s(place, shell):
    place.dir.mkdir(mode=0o700)
    database = place.dir / "store.db"
    database.touch(mode=0o600)
    for command in ("why", "run"):
        assert shell.run(command).stderr == "xcache: no run is recorded\n"
    program = "import sqlite3, sys; from sqlite_utils import Database; from xcached.store.schema import migrations;"
    program += " migrations.apply(Database(sys.argv[1]), stop_before='m006_by_toolchain')"
    subprocess.run([sys.executable, "-c", program, str(database)], env=place.env, check=True, timeout=LONG)
    for command in ("why", "run"):
        assert shell.run(command).stderr == "xcache: no run is recorded\n"


def test_what_is_no_key_is_told_what_a_key_is(shell):
    said = shell.say("key", "trust", "nonsense", code=1)
    assert "'nonsense' names no key to trust" in said
    assert "xcache key show" in said
    assert "Errno" not in said
