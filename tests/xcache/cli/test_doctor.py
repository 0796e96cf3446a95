"""The doctor finds what is wrong, says what to do, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.command_line import LONG
from support.places import REPOSITORY
from support.users import ALICE, become

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to make files of another user, and mounts")


def checks(said: str) -> dict[str, dict[str, str]]:
    """Return the last check of each name."""
    return {each["name"]: each for each in json.loads(said)["checks"]}


def checked(shell, code=0, **environment):
    """Return the checks without the real compile."""
    shell.env |= environment
    return checks(shell.say("doctor", "--no-compile", "--json", code=code))


def assert_wrong(check, text, advice):
    assert (check["state"], text in check["found"], advice in check["advice"]) == ("wrong", True, True), check


@pytest.mark.slow
def test_a_sound_installation_is_found_sound_and_nothing_is_left(place, shell):
    place.start_daemon()
    done = shell.run("doctor", "--json", XCACHE="1")
    assert done.returncode == 0, done.stdout
    found = checks(done.stdout)
    assert {each["state"] for each in found.values()} == {"ok"}, found
    assert "the next one found it" in found["compile"]["found"]
    assert shell.json("runs") == {"runs": []}
    counted = shell.json("stats")
    assert (counted["requests"], counted["hits"], counted["misses"], counted["lowerings"]) == (0, 0, 0, {})
    assert shell.json("ls")["entries"] == []


@pytest.mark.thorough
@pytest.mark.slow
def test_a_file_that_forbids_compiles_does_not_forbid_the_one_of_the_check(shell, tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('on_miss = "fail"\non_miss_after = 0\n')
    found = checks(shell.run("doctor", "--json", XCACHE_CONFIG=str(file)).stdout)
    assert "the next one found it" in found["compile"]["found"]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_jax_that_goes_its_own_way_is_found_by_the_compile_too(shell):
    done = shell.run("doctor", XCACHE="1", JAX_ENABLE_COMPILATION_CACHE="off")
    assert done.returncode == 1
    assert "wrong jax: JAX_ENABLE_COMPILATION_CACHE=off" in done.stdout
    assert (
        "wrong compile: the first process could not use the cache: jax_enable_compilation_cache is off" in done.stdout
    )


@pytest.mark.slow
def test_a_python_without_jax_is_told_to_be_the_wrong_one(place, tmp_path):
    here = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(here)], check=True, timeout=LONG)
    there = next(here.glob("lib/python*/site-packages"))
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not each.name.lower().startswith(("jax", "xcache", "_editable", "__editable")) and each.suffix != ".pth":
            (there / each.name).symlink_to(each)
    done = subprocess.run(
        [str(here / "bin" / "python"), "-m", "xcache", "doctor", "--json"],
        env=place.env,
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    found = checks(done.stdout)
    assert_wrong(found["plugin"], "no entry point of xcache", "scripts/install --python")
    assert_wrong(found["compile"], "No module named 'jax'", "with the Python of your programs")


@pytest.mark.parametrize(
    ("old", "new", "state", "advice"),
    [
        (("xcache/_version.py", "__version__"), '__version__ = "0.0.1"', "note", "xcache restart"),
        (("xcache/wire/protocol.py", "VERSION ="), "VERSION = 1", "wrong", "xcache restart"),
    ],
)
def test_a_daemon_of_another_version_is_found(place, shell, tmp_path, old, new, state, advice):
    name, begins = old
    for folder in ("xcache", "daemon"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / name
    lines = [new if line.startswith(begins) else line for line in changed.read_text().splitlines()]
    changed.write_text("\n".join(lines) + "\n")
    place.start_daemon(PYTHONPATH=os.pathsep.join([str(tmp_path), str(tmp_path / "daemon")]))
    found = checked(shell, code=int(state == "wrong"))["daemon"]
    assert (found["state"], advice in found["advice"]) == (state, True), found
    assert "0.0.1" in found["found"] or "version 1 of the protocol" in found["found"]


@needs_root
def test_a_folder_of_the_socket_that_is_another_users_is_found(place, shell, tmp_path):
    folder = tmp_path / "sockets"
    folder.mkdir()
    os.chown(folder, ALICE, ALICE)
    found = checked(shell, code=1, XCACHE_SOCKET=str(folder / "s"))
    assert_wrong(found["socket"], f"belongs to another user (uid {ALICE})", "XCACHE_SOCKET")


@needs_root
def test_a_store_and_files_in_it_that_are_another_users_are_found(place, shell):
    place.dir.mkdir(mode=0o700)
    (place.dir / "store.db").touch()
    os.chown(place.dir / "store.db", ALICE, ALICE)
    listed = json.loads(shell.say("doctor", "--no-compile", "--json", code=1))["checks"]
    assert any("files of other users are in it: store.db" in each["found"] for each in listed)
    os.chown(place.dir, ALICE, ALICE)
    assert_wrong(checked(shell, code=1)["store"], "belongs to another user", "XCACHE_DIR")


def test_a_store_that_cannot_be_written_is_found(place, tmp_path):
    folder = tmp_path / "store"
    folder.mkdir(mode=0o500)
    command = [sys.executable, "-m", "xcache", "doctor", "--no-compile", "--json"]
    if os.getuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv")
        os.chown(folder, ALICE, ALICE)
        command = [*become(ALICE), *command]
    env = place.env | {"XCACHE_DIR": str(folder), "HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 1, done.stderr
    assert_wrong(
        checks(done.stdout)["store"], "cannot be written", f"belongs to uid {folder.stat().st_uid} with mode 500"
    )
    env["XCACHE_DIR"] = str(folder / "new")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LONG, check=False)
    assert_wrong(checks(done.stdout)["store"], f"{folder / 'new'} does not exist and cannot be made", f"in {folder},")


def test_a_store_that_is_a_file_is_said_once(shell, tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "store"):
        found = checked(shell, code=1, XCACHE_DIR=str(path))
        assert_wrong(found["store"], f"{tmp_path / 'file'} is not a directory", "Choose a folder")
        assert [each["name"] for each in found.values() if each["state"] == "wrong"] == ["store"]


@needs_root
def test_a_full_disk_is_found(place, tmp_path):
    script = 'mount -t tmpfs -o size=1m none "$0" && head -c 1000k /dev/zero > "$0/filling" && exec "$@"'
    doctor = [sys.executable, "-m", "xcache", "doctor", "--json"]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, str(tmp_path), *doctor],
        env=place.env | {"XCACHE_DIR": str(tmp_path / "store")},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 1, done.stderr
    found = checks(done.stdout)
    assert_wrong(found["store"], "free on its disk", "until there is room")
    assert found["compile"]["state"] == "note"
    assert "not tried" in found["compile"]["found"]


@pytest.mark.parametrize(
    ("variable", "value", "state"),
    [
        ("JAX_ENABLE_COMPILATION_CACHE", "off", "wrong"),
        ("JAX_ENABLE_PGLE", "yes", "wrong"),
        ("JAX_COMPILATION_CACHE_EXPECT_PGLE", "1", "wrong"),
        ("JAX_COMPILATION_CACHE_DIR", "/somewhere", "note"),
        ("XLA_FLAGS", "--xla_dump_to=/somewhere", "note"),
        ("JAX_ENABLE_COMPILATION_CACHE", "true", "ok"),
        ("JAX_ENABLE_PGLE", "0", "ok"),
    ],
)
def test_settings_of_jax_that_work_against_it_are_found(shell, variable, value, state):
    found = checked(shell, code=int(state == "wrong"), **{variable: value})["jax"]
    assert found["state"] == state, found
    assert state == "ok" or (value in found["found"] or "dumps" in found["found"])


def test_settings_that_cannot_be_used_are_found(shell):
    shell.env["XCACHE_TIMEOUT"] = "never"
    listed = json.loads(shell.say("doctor", "--no-compile", "--json", code=1))["checks"]
    wrong = [each for each in listed if each["state"] == "wrong"]
    assert any("XCACHE_TIMEOUT='never'" in each["found"] for each in wrong)
    assert [each["state"] for each in listed if each["name"] == "settings"] == ["wrong"]


@pytest.mark.parametrize(
    ("variable", "meant"), [("XCACHE_MAXSIZE", "did you mean XCACHE_MAX_SIZE"), ("XCACHE_FOO", "")]
)
def test_a_variable_that_is_no_setting_is_the_only_thing_said_of_settings(shell, variable, meant):
    shell.env[variable] = "1"
    listed = json.loads(shell.say("doctor", "--no-compile", "--json"))["checks"]
    (found,) = [each for each in listed if each["name"] == "settings"]
    assert found["state"] == "note"
    assert f"{variable} is no setting" in found["found"]
    assert meant in found["found"]
    assert meant or "did you mean" not in found["found"]


def test_a_switch_that_is_not_understood_is_found(shell):
    assert_wrong(checked(shell, code=1, XCACHE="perhaps")["switch"], "perhaps", "xcache config")


def test_what_programs_do_that_cannot_be_cached_is_said(shell):
    shell.report({"uncacheable:python callback": 3, "uncacheable:profile-guided optimization": 1})
    found = checked(shell)["programs"]
    assert found["state"] == "note"
    assert found["found"].endswith("python callback (3), profile-guided optimization (1)")


def test_the_last_errors_of_the_log_are_shown(place, shell):
    shell.put("jit_f")
    place.stop()
    with (place.dir / "daemon.log").open("a") as log:
        log.write("2099-01-01 00:00:00,000 7 ERROR something went wrong\n")
    assert "ERROR something went wrong" in checked(shell)["log"]["found"]


def test_a_bundle_that_is_not_there_yet_is_noted_and_is_no_trouble_of_programs(shell, tmp_path):
    path = tmp_path / "later.xcb"
    listed = checked(shell, XCACHE_BUNDLES=f"{path}?trust=tier")
    (found,) = (check for name, check in listed.items() if name.startswith("remote bundle:"))
    assert (found["state"], found["found"]) == ("note", f"{path} does not exist")
    assert "empty until the file is there" in found["advice"]
    script = "import jax, xcache; jax.jit(lambda x: x + 1)(1.0); print(dict(xcache.stats().causes))"
    environment = shell.env | {"XCACHE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=LONG, check=True
    )
    assert "remote trouble" not in done.stdout
    assert "new" in done.stdout
    assert done.stderr == ""
    said = shell.say("status")
    assert "the file does not exist, and counts as empty until it does" in " ".join(said.split())
    assert "failing" not in said
