"""``xcache show``: an entry, and its program."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import LONG

from xcache.keys import stablehlo
from xcache.wire import protocol


def test_show(shell):
    key = shell.put("jit_f[/x]", raw=random.randbytes(200_000), device_kind="a kind")
    shown = shell.json("show", key[:10].upper())
    assert shown["key"] == key
    assert (shown["module_name"], shown["raw_size"], shown["hits"]) == ("jit_f[/x]", 200_000, 0)
    assert hashlib.sha256(Path(shown["file"]).read_bytes()).hexdigest() == shown["blob"]
    assert shown["program"]["raw_size"] == 50
    assert set(shown["components"]) == set(protocol.DESCRIBED_COMPONENTS)
    assert shown["components"]["options"]["description"] == "options of\n[bold]jit_f[/x][/bold]"
    said = shell.run("show", key).stdout
    for part in (key, "jit_f[/x]", "a kind", shown["blob"], shown["file"], shown["program"]["digest"], "  none"):
        assert part in said
    for part in shown["components"].values():
        assert part["digest"] in said
    assert "cpu, a kind" in said
    assert "cpu, cpu" not in shell.say("show", shell.put("jit_g"))
    assert "\n  options of\n  [bold]jit_f[/x][/bold]\n" in said


def test_the_beginning_of_a_key(shell):
    for key in ("ab" * 32, "ab" * 31 + "cd", "12" * 32):
        shell.put("jit_[red]", key=key)
    assert shell.json("show", "1212")["key"] == "12" * 32
    for command in ("show", "rm"):
        ambiguous = shell.run(command, "abab")
        assert ambiguous.returncode == 2
        assert "ab" * 32 in ambiguous.stderr
        assert "ab" * 31 + "cd" in ambiguous.stderr
        assert "12" * 32 not in ambiguous.stderr
        for prefix, code in (("ffff", 1), ("121", 2), ("xyzz", 2), ("", 2), ("ab" * 33, 2), ("a%", 2)):
            failed = shell.run(command, prefix)
            # To show, it may be a name.
            assert (failed.returncode, failed.stdout) == (1 if command == "show" and prefix else code, "")
            assert failed.stderr.startswith("xcache: ")
    assert shell.json("status")["entries"] == 3


ADD = """func.func public @main(%x: tensor<3xf32>) -> tensor<3xf32> {
  %y = stablehlo.add %x, %x : tensor<3xf32>
  return %y : tensor<3xf32>
}"""


def test_a_program_as_text(shell):
    pytest.importorskip("jaxlib.mlir.ir")
    key = shell.put("jit_add", program=stablehlo.bytecode(stablehlo.parse(ADD)))
    result = shell.run("show", key, "--program")
    assert (result.returncode, result.stderr) == (0, "")
    assert "stablehlo.add %arg0, %arg0 : tensor<3xf32>" in result.stdout


def test_a_program_that_cannot_be_printed(shell, monkeypatch):
    key = shell.put("jit_add", program=b"no bytecode")
    monkeypatch.setitem(sys.modules, "jaxlib.mlir", None)
    assert "--program-bytes" in shell.say("show", key, "--program", code=1)
    monkeypatch.undo()
    pytest.importorskip("jaxlib.mlir.ir")
    assert "cannot read this program" in shell.say("show", key, "--program", code=1)


def test_a_program_as_bytes(shell, tmp_path):
    program = random.randbytes(100_000)
    key = shell.put("jit_f", program=program)
    target = tmp_path / "program"
    result = shell.run("show", key, "--program-bytes", str(target))
    assert (result.returncode, result.stdout) == (0, "")
    assert target.read_bytes() == program
    command = [sys.executable, "-m", "xcache", "show", key, "--program-bytes", "-"]
    piped = subprocess.run(command, env=shell.env, capture_output=True, timeout=LONG, check=True)
    assert piped.stdout == program
    failed = shell.run("show", key, "--program-bytes", str(tmp_path / "nowhere" / "program"))
    assert failed.returncode == 1
    assert failed.stderr.startswith("xcache: ")
    assert "exclude each other" in shell.say("show", key, "--program", "--json", code=2)


def test_a_damaged_program_is_not_shown(shell, tmp_path):
    key = shell.put("jit_f")
    shell.change("UPDATE blobs SET content = ? WHERE digest IN (SELECT blob FROM programs)", b"something else")
    failed = shell.run("show", key, "--program-bytes", str(tmp_path / "program"))
    assert failed.returncode == 1
    assert "damaged" in failed.stderr
    shell.change("DELETE FROM programs")
    assert "does not have it" in shell.say("show", key, code=1)


# Settings, help, and all commands together.
