"""Commands whose output goes nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import Shell
from support.terminal import on_terminal

from xcache.cli import output


def test_the_last_arguments_of_many_are_shown(place):
    """The batch comes after the parameters, and says in what two programs of a function differ."""
    shell = Shell(place)
    stored = shell.put("jit_step")
    for run, batch in (("a" * 16, 40), ("b" * 16, 50)):
        shell.record_run(stored, run=run, shapes=f"{'f32[64,64], f32[64], ' * 9}f32[{batch},32]")
    for command in (["run", "bbbb"], ["why", "--run", "bbbb"], ["compare", "aaaa", "bbbb"]):
        assert "f32[50,32]" in shell.say(*command)


@pytest.mark.parametrize("text", ["", "a" * 19, "a" * 20, "a" * 21, "b" * 99])
@pytest.mark.parametrize("most", [20, 21])
def test_a_cut_text_is_as_long_as_it_may_be(text, most):
    assert len(output.middle_cut(text, most)) == min(len(text), most)


@pytest.mark.parametrize("command", ["status", "stats", "ls", "toolchains"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_command_without_an_output_says_nothing(place, command, options):
    Shell(place).put("jit_f")
    arguments = [sys.executable, "-m", "xcache", command, *options]
    ran = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *arguments], env=place.env, stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_output_that_takes_nothing_is_said(place, options):
    arguments = [sys.executable, "-m", "xcache", "status", *options]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(arguments, env=place.env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    # Without care Python would end with a status and lines of its own.
    assert ran.returncode
    assert ran.stderr.startswith("xcache: [Errno 28]")
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("command", ["report", "trace"])
@pytest.mark.parametrize("before", [None, "an older file"])
def test_a_file_that_a_full_disk_does_not_take_is_named_and_leaves_what_was_there(place, command, before):
    shell = Shell(place)
    shell.record_run("d" * 64)
    folder = place.root / "out"
    folder.mkdir()
    file = folder / "out.json"
    if before is not None:
        file.write_text(before)
    # As on a full disk, a write fails after the file was opened.
    ran = subprocess.run(
        ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", sys.executable, "-m", "xcache", command, "-o", str(file)],
        env=place.env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    assert str(file) in ran.stderr
    assert {each.name: each.read_text() for each in folder.iterdir()} == ({"out.json": before} if before else {})


def test_a_file_is_written_where_a_link_leads_with_its_mode(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    target.chmod(0o640)
    link.symlink_to("target")
    output.write_file(link, b"after")
    assert (link.is_symlink(), target.read_text(), target.stat().st_mode & 0o777) == (True, "after", 0o640)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "target"]


@pytest.mark.parametrize(("term", "is_bold"), [("dumb", False), ("xterm", True)])
def test_a_dumb_terminal_gets_no_escapes(place, term, is_bold):
    Shell(place).record_run("d" * 64)
    with on_terminal(place.env, "why", TERM=term) as terminal:
        assert terminal.wait() == 0
        assert "jit_f" in terminal.text
        assert ("\x1b[" in terminal.text) == is_bold
