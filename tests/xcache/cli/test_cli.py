"""The commands that read, on real stores; the executables in them are random bytes."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from support.command_line import LONG, NAMES, Shell, names
from support.places import until

from xcache import lock_file
from xcache.cli import config, main, output
from xcache.config.parsing import parse_duration
from xcache.wire import protocol


def test_with_no_store_there_is_nothing_and_no_daemon_is_started(shell):
    assert "the store is empty" in shell.say("ls")
    assert "the store is empty" in shell.say("stats")
    assert "the store is empty" in shell.say("clear")
    assert "0 entries" in shell.say("status")
    assert shell.json("ls") == {"matched": 0, "entries": []}
    assert shell.json("clear") == {"removed": 0, "bytes": 0}
    counted = shell.json("stats")
    assert (counted["requests"], counted["hit_rate"], counted["errors"], counted["since"]) == (0, None, {}, None)
    for command in ("show", "rm"):
        assert "the store is empty" in shell.say(command, "1234", code=1)
    assert not shell.directory.exists()


def test_a_store_that_is_a_file_is_not_just_empty(shell):
    shell.directory.touch()
    for command in ("ls", "stats", "status", "toolchains", "runs", "run", "clear", "monitor --once"):
        said = shell.run(*command.split())
        assert (said.returncode, said.stdout) == (1, "")
        assert said.stderr == f"xcache: {shell.directory} is not a directory, so that there is no store\n"


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_store_that_programs_cannot_use_is_not_just_empty(shell, mode):
    shell.directory.mkdir()
    shell.directory.chmod(mode)
    for command in ("ls", "stats", "toolchains", "clear"):
        said = shell.run(command)
        assert (said.returncode, said.stdout) == (0, "the store is empty\n")
        assert (
            said.stderr == f"xcache: programs run without the cache: {shell.directory} can be written by other users\n"
        )


def test_reading_needs_no_daemon_and_starts_none(shell):
    key = shell.put("jit_f")
    shell.say("stop")
    assert names(shell.json("ls")) == ["jit_f"]
    assert shell.json("show", key[:8])["key"] == key
    assert shell.json("stats")["stores"] == 1
    found = shell.json("status")
    assert (found["running"], found["entries"]) == (False, 1)
    assert not shell.held()


def test_a_folder_that_cannot_be_written_can_be_read(shell):
    shell.put("jit_f")
    shell.say("stop")
    for leftover in shell.directory.glob("store.db-*"):
        leftover.unlink()
    shell.directory.chmod(0o500)
    try:
        assert names(shell.json("ls")) == ["jit_f"]
    finally:
        shell.directory.chmod(0o700)


def test_counts_that_the_daemon_has_not_written_yet_are_shown(shell):
    key = shell.put("jit_f")
    shell.get(key)
    shell.report(
        {"requests": 3, "hits": 1, "misses": 1, "uncacheable:callback": 1, "errors:odd": 2, "saved_seconds": -0.5}
    )
    assert shell.json("ls")["entries"][0]["hits"] == 1
    counted = shell.json("stats")
    assert (counted["requests"], counted["hit_rate"], counted["saved_seconds"]) == (3, 0.5, -0.5)
    assert (counted["uncacheable"], counted["errors"], counted["other"]) == ({"callback": 1}, {"odd": 2}, {})
    said = shell.say("stats")
    for part in ("50.0%", "callback", "odd", "-500 ms"):
        assert part in said
    assert "the statistics were reset" in shell.say("stats", "--zero")
    counted = shell.json("stats")
    assert (counted["requests"], counted["uncacheable"]) == (0, {})
    assert abs(counted["since"] - time.time()) < LONG


def test_zero_starts_a_daemon_when_none_runs(shell):
    assert shell.json("stats", "--zero")["requests"] == 0
    assert shell.json("status")["running"] is True


@pytest.fixture
def filled(shell):
    """Five entries that differ in everything one can sort or choose by."""
    made = {
        "jit_alpha": {"seconds": 5.0, "raw": random.randbytes(100), "jaxlib": "0.10.2"},
        "jit_Beta": {"seconds": 1.0, "raw": random.randbytes(50_000), "jaxlib": "0.10.3"},
        "jit_gamma[x]": {"seconds": 3.0, "raw": random.randbytes(300), "jaxlib": "0.1.9", "platform": "tpu"},
        "pmap_delta": {"seconds": 2.0, "raw": random.randbytes(400), "platform": "cuda", "device_kind": "H200 [80G]"},
        "jit_epsilon": {"seconds": 4.0, "raw": random.randbytes(500), "jaxlib": "0.12.0"},
    }
    now = time.time()
    for age, (name, fields) in enumerate(made.items()):
        key = shell.put(name, **fields)
        shell.change(
            "UPDATE entries SET created_at = ?, last_used_at = ?, hits = ? WHERE key = ?",
            now - age * 3600 - 1800,
            now - (4 - age) * 60,
            (age * 2) % 5,
            key,
        )
    return shell


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("used", ["jit_epsilon", "pmap_delta", "jit_gamma[x]", "jit_Beta", "jit_alpha"]),
        ("created", ["jit_alpha", "jit_Beta", "jit_gamma[x]", "pmap_delta", "jit_epsilon"]),
        ("size", ["jit_Beta", "jit_epsilon", "pmap_delta", "jit_gamma[x]", "jit_alpha"]),
        ("hits", ["jit_gamma[x]", "jit_epsilon", "jit_Beta", "pmap_delta", "jit_alpha"]),
        ("compile", ["jit_alpha", "jit_epsilon", "jit_gamma[x]", "pmap_delta", "jit_Beta"]),
        ("name", ["jit_alpha", "jit_Beta", "jit_epsilon", "jit_gamma[x]", "pmap_delta"]),
    ],
)
def test_sorting(filled, order, expected):
    assert names(filled.json("ls", "--sort", order)) == expected
    assert names(filled.json("ls", "--sort", order, "--reverse")) == expected[::-1]


def test_choosing(filled):
    for arguments, expected in {
        ("--name", "ALPHA"): {"jit_alpha"},
        ("--name", "[x]"): {"jit_gamma[x]"},
        ("--name", "pmap_*"): {"pmap_delta"},
        ("--name", "jit_[ab]*"): {"jit_alpha", "jit_Beta"},
        ("--name", "%"): set(),
        ("--platform", "CUDA"): {"pmap_delta"},
        ("--jaxlib", "0.10"): {"jit_alpha", "jit_Beta", "pmap_delta"},
        ("--jaxlib", "0.10.3"): {"jit_Beta"},
        ("--jaxlib", "0.1"): {"jit_gamma[x]"},
        ("--newer-than", "2h"): {"jit_alpha", "jit_Beta"},
        ("--older-than", "2h"): {"jit_gamma[x]", "pmap_delta", "jit_epsilon"},
        ("--older-than", "1h", "--newer-than", "3h"): {"jit_Beta", "jit_gamma[x]"},
    }.items():
        listed = filled.json("ls", *arguments)
        assert (set(names(listed)), listed["matched"]) == (expected, len(expected)), arguments
    assert "none of 5 entries match" in filled.say("ls", "--name", "nowhere")
    assert "not a duration" in filled.say("ls", "--older-than", "soon", code=2)


def test_the_limit_is_the_table_s_and_says_what_is_left_out(filled):
    said = filled.say("ls", "--limit", "2")
    assert said.count("\n") == 4
    assert "and 3 more" in said
    limited = filled.json("ls", "--limit", "2")
    assert (len(limited["entries"]), limited["matched"]) == (2, 5)
    for number in range(48):
        filled.put(f"more_{number}")
    assert "and 3 more" in filled.say("ls")
    assert "more (" not in filled.say("ls", "--limit", "0")
    assert len(filled.json("ls")["entries"]) == 53


def test_in_a_pipe_nothing_is_cut_and_nothing_escapes(shell):
    long = "jit_" + "a_long_name_" * 30
    shell.put(long)
    shell.put("jit_\x1b[31m[/red]\nnaïve")
    for command in (["ls"], ["ls", "--json"], ["stats"], ["status"], ["config"]):
        result = shell.run(*command)
        assert result.returncode == 0
        assert "\x1b" not in result.stdout
    said = shell.run("ls").stdout
    assert long in said
    assert "[31m[/red]\N{REPLACEMENT CHARACTER}naïve" in said
    assert said.count("\n") == 3
    assert all(line == line.rstrip() for line in said.splitlines())
    poor = shell.run("ls", PYTHONIOENCODING="ascii")
    assert (poor.returncode, poor.stderr) == (0, "")
    assert "na?ve" in poor.stdout


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (70, f"key           name\n{'k' * 12}  {'n' * 55}…\n{'l' * 12}\n"),
        # Each column has a line of its own; an empty cell has none.
        (20, f"key   {'k' * 12}\nname  {'n' * 100}\n\nkey  {'l' * 12}\n"),
        (400, f"key           name\n{'k' * 12}  {'n' * 100}\n{'l' * 12}\n"),
    ],
)
def test_on_a_terminal_names_are_cut_and_keys_are_not(capsys, monkeypatch, width, expected):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((width, 24)))
    columns = (output.Column("key", lambda row: row[0]), output.Column("name", lambda row: row[1], cut=True))
    output.print_table(columns, [("k" * 12, "n" * 100), ("l" * 12, "")])
    said = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    assert [line.rstrip() for line in said.splitlines()] == expected.splitlines()


def test_a_newer_store_is_not_read(shell):
    key = shell.put("jit_f")
    shell.say("stop")
    shell.change("PRAGMA user_version = 99")
    for command in (["ls"], ["stats"], ["show", key], ["status"], ["rm", key], ["clear", "--yes"]):
        failed = shell.run(*command)
        assert failed.returncode == 1
        assert "newer xcache" in failed.stderr
        assert failed.stderr.count("\n") == 1
    shell.change("PRAGMA user_version = 1")


def test_a_store_that_is_none(shell):
    shell.directory.mkdir()
    database = shell.directory / "store.db"
    database.write_bytes(b"")
    assert shell.json("ls")["matched"] == 0
    database.write_bytes(random.randbytes(10_000))
    failed = shell.run("ls")
    assert failed.returncode == 1
    assert failed.stderr.startswith(f"xcache: {database} cannot be read: ")


# Programs.


_DATA = ("uncacheable", "errors", "other", "causes", "facts", "stages", "outcomes", "components")


def documented(document: object) -> set[str]:
    """The names in a JSON document, less those that are data."""
    if isinstance(document, list):
        return set().union(*(documented(one) for one in document))
    if isinstance(document, dict):
        inside = [documented(v) for name, v in document.items() if name not in _DATA]
        return set(document).union(*inside)
    return set()


def locked(key: str, folder: Path) -> str:
    """Return the path of a lock file for an entry."""
    made = lock_file.Made("tpu", "TPU v5e", metadata.version("jaxlib"), key)
    (folder / "run.lock").write_text(lock_file.render({key: lock_file.Program("jit_f", 1.0, made)}))
    return str(folder / "run.lock")


def test_the_help_documents_every_name_in_the_json(shell, tmp_path):
    key = shell.put("jit_f", program=b"module @jit_f { func.func public @main() { return } }")
    shell.record_run(key)
    # The cost needs a real executable, and prebuild a real function: tests/e2e.
    for command in (name for name in NAMES if name not in ("cost", "prebuild")):
        arguments = {name: [key] for name in ("show", "rm", "pin", "unpin")}
        arguments |= {"clear": ["--yes"], "invalidate": ["--name", "x"], "doctor": ["--no-compile"]}
        # The command before stops the daemon.
        if command == "monitor":
            shell.say("start")
            shell.record_run(key)
        if command == "export":
            # The commands before have cleared the store, and made a key.
            shell.put("jit_g")
            shell.say("key", "trust", shell.say("key", "show").strip())
        if command == "remote check":
            shell.say("stop")
            (tmp_path / "tier").mkdir()
            shell.env["XCACHE_REMOTE"] = f"file://{tmp_path}/tier?trust=tier"
            shell.put("jit_f", key=key)
        if command == "remote ls":
            assert until(lambda: shell.json("remote", "ls")["matched"])
        arguments |= {"remote rm": [key], "remote ls": ["--details"], "remote gc": ["--jaxlib", "0", "--dry-run"]}
        arguments |= {"monitor": ["--once"], "compare": ["last"], "trace": ["-o", str(tmp_path / "trace.json")]}
        arguments |= {"report": ["-o", str(tmp_path / "report.html")]}
        arguments |= {"hlo": [key, "--python", sys.executable]}
        arguments |= {"graph": [key, "--stage", "hlo", "-o", str(tmp_path / "f.dot"), "--python", sys.executable]}
        arguments |= {"key new": ["ci"], "key trust": [f"other xcache-ed25519:{'A' * 43}="]}
        arguments |= {"key revoke": ["other"]}
        if command == "preflight":
            arguments |= {"preflight": [locked(shell.put("jit_h"), tmp_path)]}
        bundle = str(tmp_path / "cache.xcb")
        arguments |= {"export": ["-o", bundle], "import": ["--all", bundle]}
        arguments |= {"bundle inspect": [bundle], "bundle verify": [bundle]}
        found = documented(shell.json(*command.split(), *arguments.get(command, [])))
        text = shell.say(*command.split(), "--help")
        for name in found - set(protocol.DESCRIBED_COMPONENTS):
            assert f'"{name}"' in text, (command, name)
    # The commands about the service need a systemd: tests/service. The code for shells is no data.
    assert set(main.list_commands(None)) == {*(name.split()[0] for name in NAMES), "service", "completion"}


def test_the_version_is_quick():
    check = "import sys; from xcache.cli import main\ntry: main(['--version'])\nexcept SystemExit: pass\n"
    check += "print([m for m in ('rich', 'jax', 'jaxlib', 'msgpack', 'sqlite3', 'zstandard') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=LONG, check=True)
    assert result.stdout.splitlines()[0].startswith("xcache 0.")
    assert result.stdout.splitlines()[1] == "[]"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("stauts", "stats or status"), ("moniter", "monitor or remote"), ("frobnicate", None), ("", None)],
)
def test_an_unknown_command(shell, typed, meant):
    said = shell.say(typed, code=2)
    assert f"there is no command {typed!r}" in said
    assert (f"; did you mean {meant}?" in said) if meant else "did you mean" not in said


def test_an_unknown_option_is_not_taken_for_a_command(shell):
    assert "No such option" in shell.say("--jsno", code=2)


def test_sizes():
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 333_189: "325 KiB", 1023.6 * 1024: "1 MiB"}
    sizes |= {20 * 2**30: "20 GiB", 3 * 2**40: "3 TiB", 5000 * 2**40: "5000 TiB"}
    assert {count: output.size(count) for count in sizes} == sizes


def test_durations():
    durations = {0: "0 s", 0.0268: "27 ms", -0.5: "-500 ms", 0.9999: "1.0 s", 12.34: "12.3 s", 59.97: "1m 00s"}
    durations |= {125: "2m 05s", 3599.9: "1h 00m", 12_000: "3h 20m"}
    assert {seconds: output.duration(seconds) for seconds in durations} == durations


@pytest.mark.parametrize(("age", "text"), [(-5, "0s"), (3, "3s"), (300, "5m"), (7300, "2h"), (172_900, "2d")])
def test_ages(age, text):
    assert output.ago(time.time() - age) == text


@pytest.mark.parametrize("text", ["0", "0.5s", "5s", "90s", "30m", "2h", "7d"])
def test_settings_are_shown_as_they_can_be_given(text):
    assert config.spelled("time", parse_duration(text)) == text


@pytest.mark.parametrize(("mode", "owner", "why"), [(0o777, 0, "written by other users"), (0o700, 4321, "(uid 4321)")])
def test_a_store_that_programs_refuse_is_no_healthy_one(place, mode, owner, why):
    if owner and os.getuid():
        pytest.skip("to give a folder to another user the kernel asks for root")
    place.dir.mkdir()
    place.dir.chmod(mode)
    os.chown(place.dir, owner or os.getuid(), -1)
    (said,) = [line for line in Shell(place).say("status").splitlines() if "run without the cache" in line]
    assert why in said


def test_the_list_of_commands_cuts_no_sentence(shell):
    said = shell.say("--help")
    listed = said[said.index("Commands:") :]
    assert "..." not in listed
    assert "each miss its cause, what differs, and what to do about it." in " ".join(listed.split())
