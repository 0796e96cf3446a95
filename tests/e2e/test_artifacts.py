"""A real program's stages, graph and cost are shown with the jaxlib that compiled it."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from support.command_line import Shell
from support.program_files import program_text

ON = {"XCACHE": "1", "PYTHONHASHSEED": "0"}
PROGRAM = (
    program_text("compile_one_way")
    + """
def wave(x):
    return jnp.cos(jnp.tanh(x) + 1)


jax.jit(wave)(jnp.ones((8, 16)))
"""
)


@pytest.fixture
def shell(place):
    result = place.run(PROGRAM, **ON | {"WAY": "operation"})
    assert (result.returncode, result.stderr) == (0, "")
    return Shell(place)


def said(shell, *arguments, code=0):
    done = shell.run(*arguments)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def files(shell, name, stage, *arguments):
    shown = json.loads(said(shell, "hlo", name, "--stage", stage, "--json", *arguments))
    assert (shown["module_name"], shown["stage"]) == (f"jit_{name}", stage)
    return {file["name"]: file["text"] for file in shown["files"]}


def instructions(text):
    """Return what an HLO module does, without the places in the code; XLA writes the signs % as it likes."""
    return [line.partition(", metadata=")[0].replace("%", "") for line in text.splitlines() if " = " in line]


def test_every_stage_is_shown(shell, tmp_path):
    assert "stablehlo.dot_general" in files(shell, "step", "stablehlo")["program.mlir"]
    assert "ENTRY" in files(shell, "step", "hlo")["program.hlo.txt"]
    (optimized,) = files(shell, "wave", "optimized").values()
    passes = files(shell, "wave", "passes")
    names = list(passes)
    assert names[0] == "before_optimizations.txt"
    assert names[-1].endswith("after_optimizations.txt")
    assert len(names) > 10
    # Compiled again with the options of the key, it is what the store has.
    assert instructions(passes[names[-1]]) == instructions(optimized) != []
    assert any("define " in text for text in files(shell, "wave", "llvm").values())
    folder = tmp_path / "asm"
    assert "written to" in shell.run("hlo", "wave", "--stage", "asm", "-o", str(folder)).stderr
    assert any(file.suffix == ".o" for file in folder.iterdir())
    if shutil.which("objdump"):
        assert any("ret" in file.read_text() for file in folder.glob("*.s"))


@pytest.mark.once
def test_two_programs_are_compared(place, shell):
    assert place.run(PROGRAM, **ON | {"WAY": "shape"}).returncode == 0
    keys = [entry["key"] for entry in json.loads(said(shell, "ls", "--name", "jit_step", "--json"))["entries"]]
    text = said(shell, "hlo", keys[0], "--diff", keys[1], "--stage", "optimized")
    changed = [line for line in text.splitlines() if line[:1] in ("+", "-")]
    assert any("f32[16,8]" in line for line in changed)
    assert any("f32[8,8]" in line for line in changed)
    columns = said(shell, "hlo", keys[0], "--diff", keys[1], "--stage", "hlo", "--side-by-side")
    assert " | " in columns
    same = shell.run("hlo", keys[0], "--diff", keys[0])
    assert (same.returncode, same.stdout) == (0, "")
    assert "the two programs are the same as stablehlo" in same.stderr


@pytest.mark.once
def test_a_graph_is_made(shell, tmp_path):
    assert said(shell, "graph", "step", "-o", "-").startswith("digraph")
    wanted = tmp_path / "step.svg"
    drawn = json.loads(shell.run("graph", "step", "-o", str(wanted), "--json", PATH="/nowhere").stdout)
    assert drawn["file"] == str(wanted.with_suffix(".dot"))
    assert "graphviz is not installed" in drawn["remark"]
    if shutil.which("dot") is None:
        pytest.skip("graphviz (dot) is not installed")
    drawn = json.loads(said(shell, "graph", "step", "-o", str(wanted), "--json"))
    assert (drawn["file"], drawn["remark"]) == (str(wanted), "")
    assert "<svg" in wanted.read_text()


@pytest.mark.thorough
def test_the_cost_is_computed_once(shell):
    first = json.loads(said(shell, "cost", "step", "--json"))
    # A matrix product of 8 x 8 x 8, and what comes after it.
    assert first["flops"] >= 2 * 8**3
    assert (first["argument_bytes"], first["output_bytes"]) == (8 * 8 * 4, 8 * 8 * 4)
    assert json.loads(said(shell, "cost", "step", "--json")) == first
    assert "256 B" in said(shell, "cost", "step")
    help_text = said(shell, "cost", "--help")
    assert not [name for name in first if f'"{name}"' not in help_text]


@pytest.mark.thorough
@pytest.mark.once
def test_what_is_missing_is_said_in_one_line(place, shell):
    def fails(*arguments):
        text = said(shell, *arguments, code=1)
        assert text.count("\n") == 1, text
        return text

    disassembled = shell.run("hlo", "wave", "--stage", "asm", PATH="/nowhere")
    assert (disassembled.returncode, disassembled.stderr.count("\n")) == (1, 1)
    assert "objdump is not installed" in disassembled.stderr
    place.execute("UPDATE entries SET platform = 'cuda'")
    assert "has no cuda device" in fails("hlo", "step", "--stage", "passes")
    assert "has no cuda device" in fails("cost", "step")
    assert "stablehlo" in said(shell, "hlo", "step")
    place.execute("UPDATE entries SET platform = 'cpu'")
    place.execute("UPDATE installations SET place = '/nowhere/lib/python3.11/site-packages'")
    assert "which wrote this entry, is gone from /nowhere" in fails("hlo", "step", "--stage", "optimized")
    shown = shell.run("hlo", "step", "--stage", "hlo")
    assert "ENTRY" in shown.stdout
    assert "is gone from /nowhere" in shown.stderr
    assert "No such file" in fails("hlo", "step", "--python", "/nowhere/python")
    place.execute("UPDATE components SET description = substr(description, 2) WHERE name = 'options'")
    assert "no complete description" in fails("hlo", "step", "--stage", "llvm", "--python", sys.executable)
