"""Shell completion, in the shells themselves as far as they are installed."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from support.command_line import LONG, Shell

from xcache.cli.completion import _SECONDS


@pytest.fixture
def shell(place):
    made = Shell(place)
    script = Path(sysconfig.get_path("scripts")) / "xcache"
    if not script.exists():
        # The code that a shell gets calls a program of this name.
        script = place.root / "bin" / "xcache"
        script.parent.mkdir()
        script.write_text(f"#!{sys.executable}\nfrom xcache.cli import main\nmain(prog_name='xcache')\n")
        script.chmod(0o755)
    made.env["PATH"] = f"{script.parent}{os.pathsep}{made.env['PATH']}"
    return made


def completed(shell: Shell, *words: str, name: str = "bash", **environment: str) -> list[str]:
    """Return what is offered in place of the last word."""
    variables = {"COMP_WORDS": " ".join(["xcache", *words]), "COMP_CWORD": str(len(words))}
    if name == "fish":
        variables["COMP_CWORD"] = words[-1]
    said = subprocess.run(
        ["xcache"],
        env=shell.env | variables | {"_XCACHE_COMPLETE": f"{name}_complete"} | environment,
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert said.stderr == ""
    return said.stdout.split()


def offered(shell: Shell, *words: str, **environment: str) -> list[str]:
    return [line.removeprefix("plain,") for line in completed(shell, *words, **environment)]


def test_commands_and_options_are_completed(shell):
    assert offered(shell, "mon") == ["monitor"]
    assert offered(shell, "monitor", "--o") == ["--once"]
    assert offered(shell, "completion", "") == ["bash", "fish", "zsh"]
    assert not shell.directory.exists()


@pytest.fixture
def filled(shell):
    for name, key in (
        ("jit_step", "ab" * 32),
        ("jit_step", "cd" * 32),
        ("jit_eval", "ac" * 32),
        ("odd name\n", "ef" * 32),
    ):
        shell.put(name, key=key)
    shell.record_run("ab" * 32)
    shell.say("stop")
    return shell


def test_keys_are_completed_by_their_digits_and_by_the_name_of_the_function(filled):
    assert sorted(offered(filled, "show", "a")) == ["abab" * 3, "acac" * 3]
    # The name fits one function, which has one key.
    assert offered(filled, "show", "jit_e") == ["acac" * 3]
    assert offered(filled, "show", "jit_s") == ["jit_step"]
    assert sorted(offered(filled, "show", "jit_step")) == ["abab" * 3, "cdcd" * 3]
    assert sorted(offered(filled, "show", "jit_")) == ["jit_eval", "jit_step"]
    assert offered(filled, "show", "nothing") == []
    assert len(offered(filled, "show", "")) == 4
    for command in (("rm",), ("pin",), ("unpin",), ("why",), ("rm", "ef" * 6)):
        assert offered(filled, *command, "CD") == ["cdcd" * 3]
    # A shell would take a name with a blank or a line's end for several words.
    filled.change("UPDATE entries SET module_name = 'odd name 2' WHERE key = ?", "cd" * 32)
    assert offered(filled, "show", "od") == []
    assert not filled.held()


def test_runs_are_completed(filled):
    run = "01234567"
    assert offered(filled, "run", "0123") == [run]
    assert offered(filled, "run", "l") == ["last"]
    assert offered(filled, "run", "x") == []
    for command in (("run",), ("trace",), ("compare",), ("compare", "last"), ("why", "--run")):
        assert offered(filled, *command, "") == ["last", run]


def test_shells_that_show_descriptions_get_the_names(filled):
    assert completed(filled, "show", "cd", name="zsh") == ["plain", "cdcd" * 3, "jit_step"]
    said = " ".join(completed(filled, "show", "cd", name="fish"))
    assert "cdcd" * 3 in said and "jit_step" in said


def test_whatever_is_wrong_nothing_is_offered_and_nothing_said(filled, tmp_path):
    assert offered(filled, "show", "ab", XCACHE_TIMEOUT="never") == []
    assert offered(filled, "show", "ab", XCACHE_DIR=str(tmp_path / "none")) == []
    (tmp_path / "store.db").write_bytes(b"something else" * 1000)
    assert offered(filled, "show", "ab", XCACHE_DIR=str(tmp_path)) == []
    filled.change("DROP TABLE ledger")
    filled.change("DROP TABLE runs")
    assert offered(filled, "run", "") == ["last"]


def test_a_store_that_is_locked_delays_no_prompt(filled):
    database = filled.directory / "store.db"
    filled.change("PRAGMA journal_mode = DELETE")
    with database.open("r+b") as file:
        # SQLite's own lock of a writer that lets nobody read.
        fcntl.lockf(file, fcntl.LOCK_EX, 512, 0x40000000)
        began = time.monotonic()
        assert offered(filled, "show", "ab") == []
        assert time.monotonic() - began < _SECONDS + LONG


# In the shells.

PROMPT = """
eval "$(xcache completion bash)"
complete -p xcache
COMP_WORDS=(xcache {words}) COMP_CWORD={position}
_xcache_completion xcache
printf 'offered %s\\n' "${{COMPREPLY[@]}}"
"""


def in_bash(shell: Shell, *words: str, before: str = "") -> list[str]:
    typed = " ".join(f"'{word}'" for word in words)
    said = subprocess.run(
        [
            "bash",
            "--norc",
            "-c",
            PROMPT.format(words=typed, position=len(words)).replace("complete -p", f"{before}\ncomplete -p"),
        ],
        env=shell.env,
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert (said.returncode, said.stderr) == (0, "")
    first, *offers = said.stdout.splitlines()
    assert "xcache" in first
    return [offer.removeprefix("offered ") for offer in offers]


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
def test_bash_completes(filled):
    assert in_bash(filled, "mon") == ["monitor"]
    assert in_bash(filled, "show", "ab") == ["abab" * 3]
    assert in_bash(filled, "run", "") == ["last", "01234567"]
    # The environment with xcache may have been left meanwhile.
    assert in_bash(filled, "show", "ab", before="PATH=/usr/bin:/bin") in ([""], ["abab" * 3])


@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_other_shells_take_the_code(shell, name):
    if not shutil.which(name):
        pytest.skip(f"there is no {name}")
    code = shell.run("completion", name).stdout
    options = ["-f"] if name == "zsh" else ["--no-config"]
    program = f"autoload -U compinit; compinit -u -D\n{code}" if name == "zsh" else code
    said = subprocess.run(
        [name, *options, "-c", program], env=shell.env, capture_output=True, text=True, timeout=LONG, check=False
    )
    assert (said.returncode, said.stderr) == (0, "")


@pytest.mark.skipif(not shutil.which("fish"), reason="there is no fish")
def test_fish_completes(filled):
    program = "xcache completion fish | source; complete -C 'xcache show ab'"
    said = subprocess.run(
        ["fish", "--no-config", "-c", program],
        env=filled.env,
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert (said.stdout, said.stderr) == (f"{'abab' * 3}\tjit_step\n", "")


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_code_keeps_errors_out_of_the_prompt(shell, name):
    said = shell.run("completion", name, XCACHE_TIMEOUT="never")
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.count("2>/dev/null") == 1
    assert f"{name}_complete" in next(line for line in said.stdout.splitlines() if "2>/dev/null" in line)
