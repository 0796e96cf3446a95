"""xcache says why a program was compiled, where the time went, and what a run asked for."""

from __future__ import annotations

import gzip
import json

import pytest
from support.command_line import Shell
from support.program_files import program_text
from support.traces import check as check_trace

ON = {"XCACHE": "1", "PYTHONHASHSEED": "0"}
PROGRAM = program_text("compile_one_way")


@pytest.fixture
def shell(place):
    return Shell(place)


def run(place, **environment):
    result = place.run(PROGRAM, **ON | environment)
    assert (result.returncode, result.stderr) == (0, "")


def why(shell, *arguments):
    done = shell.run("why", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["misses"]


WAYS = {
    "shape": ("other program", "argument 0 is f32[16,8] here, f32[8,8] in the stored program", "Only dimension 0"),
    "number": ("other program", "a constant", "Pass it as an argument"),
    "time": ("other program", "a constant", "looks like a time"),
    "dtype": ("other program", "argument 0 is bf16[8,8] here, f32[8,8]", "one dtype"),
    "x64": ("other program", "argument 0 is f64[8,8] here, f32[8,8]", "jax_enable_x64"),
    "precision": ("other program", "dot_general", "jax_default_matmul_precision"),
    "operation": ("other program", "tanh", ""),
    "donation": ("other program", "the donation of argument 0", ""),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_was_changed_in_one_way_is_told_that_way(place, shell, way):
    cause, text, advice = WAYS[way]
    # The time is another one in each run; 32 bits hold it to two minutes.
    run(place, WAY=way if way == "time" else "", AGO="100000")
    run(place, WAY=way)
    (miss,) = why(shell, "jit_step")
    assert miss["cause"] == cause
    found = miss["differences"]
    assert any(text in each["text"] and advice in each["advice"] for each in found), found
    assert "in <module>" in miss["site"]


def test_a_difference_is_shown_with_its_place_in_the_code(place, shell):
    run(place)
    run(place, WAY="number")
    (miss,) = why(shell, "jit_step")
    line = next(number for number, text in enumerate(PROGRAM.splitlines(), 1) if "y * factor" in text)
    assert any(f":{line})" in each["text"] for each in miss["differences"]), miss


@pytest.mark.once
def test_other_flags_are_named(place, shell):
    run(place)
    run(place, XLA_FLAGS="--xla_cpu_enable_fast_math=true")
    (miss,) = why(shell, "jit_step")
    assert miss["cause"] == "other options; other flags"
    assert miss["components"]["options"] == {
        "here": ["xla_cpu_enable_fast_math = true"],
        "there": ["xla_cpu_enable_fast_math = false"],
    }


@pytest.mark.once
def test_what_happened_to_the_entry_is_the_cause(place, shell):
    run(place)
    assert {miss["cause"] for miss in why(shell)} == {"new"}
    assert shell.run("clear", "--yes").returncode == 0
    run(place)
    assert {miss["cause"] for miss in why(shell)} == {"removed"}
    run(place, XCACHE="refresh")
    assert {miss["cause"] for miss in why(shell)} == {"refresh"}
    counted = json.loads(shell.run("stats", "--json").stdout)
    assert set(counted["causes"]) == {"new", "removed", "refresh"}
    assert sum(counted["causes"].values()) == counted["misses"]


@pytest.mark.once
def test_runs_are_listed_shown_compared_and_traced(place, shell, tmp_path):
    for _ in range(2):
        run(place)
    cold, warm = reversed(json.loads(shell.run("runs", "--json").stdout)["runs"])
    assert (cold["state"], warm["state"]) == ("ended", "ended")
    assert set(cold["outcomes"]) == {"miss"}
    assert set(warm["outcomes"]) <= {"hit", "loaded ahead"}
    assert {"trace", "lower", "key", "compile"} <= set(cold["stages"])
    assert "compile" not in warm["stages"]
    shown = json.loads(shell.run("run", cold["run"][:6], "--json").stdout)
    step = next(each for each in shown["programs"] if each["module_name"] == "jit_step")
    assert (step["shapes"], step["outcome"], step["stored"]) == ("f32[8,8]", "miss", "yes")
    assert {span["stage"] for span in step["spans"]} >= {"trace", "lower", "key", "compile", "serialize", "store"}
    assert "s until its last program was ready" in shell.run("run").stdout
    compared = json.loads(shell.run("compare", cold["run"], "--json").stdout)
    of_step = next(each for each in compared["programs"] if each["module_name"] == "jit_step")
    assert (of_step["a"]["compiled"], of_step["b"]["compiled"]) == (1, 0)
    file = tmp_path / "trace.json.gz"
    assert shell.run("trace", cold["run"], "-o", str(file)).returncode == 0
    document = json.loads(gzip.decompress(file.read_bytes()))
    check_trace(document)
    names = {event["name"] for event in document["traceEvents"]}
    assert names >= {"compile jit_step", "lookup jit_step", "daemon jit_step", "store jit_step"}


@pytest.mark.once
def test_a_run_that_was_killed_is_recorded_up_to_then(place, shell):
    source = PROGRAM + "\nimport os, signal, xcache\ntime.sleep(3)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    assert place.run(source, **ON).returncode == -9
    shown = json.loads(shell.run("run", "--json").stdout)
    assert shown["state"] == "killed"
    assert any(each["module_name"] == "jit_step" for each in shown["programs"])


@pytest.mark.once
def test_what_a_command_about_runs_cannot_find_is_one_line(place, shell):
    for arguments, says in (
        (("run",), "no run is recorded"),
        (("why",), "no run is recorded"),
        (("compare", "last"), "no run is recorded"),
        (("trace",), "no run is recorded"),
    ):
        done = shell.run(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert says in done.stderr
        assert done.stderr.count("\n") == 1
    assert json.loads(shell.run("runs", "--json").stdout) == {"runs": []}
    run(place)
    for wanted, says in (("ab", "too short"), ("zzzz", "no run begins with")):
        done = shell.run("run", wanted)
        assert done.returncode == 1
        assert says in done.stderr


@pytest.mark.once
def test_a_program_can_see_its_own_ledger_and_forbid_compiles(place):
    source = (
        PROGRAM
        + """
import json, xcache
shown = {"ledger": [each["module_name"] for each in xcache.ledger()["programs"]]}
try:
    with xcache.no_compiles():
        step(x)
        jax.jit(lambda x: x - 1)(x)
except xcache.CompileInGuardError as error:
    shown["error"] = str(error)
xcache.warmed_up()
try:
    jax.jit(lambda x: x - 2)(x)
except xcache.CompileInGuardError as error:
    shown["warmed up"] = str(error)
print(json.dumps(shown))
"""
    )
    result = place.run(source, **ON, XCACHE_ON_MISS="fail")
    assert (result.returncode, result.stderr) == (0, "")
    shown = json.loads(result.stdout)
    assert "jit_step" in shown["ledger"]
    assert "jit__lambda" in shown["error"]
    assert "within no_compiles()" in shown["error"]
    assert "after the program was warmed up" in shown["warmed up"]


@pytest.mark.once
def test_explaining_logs_a_line_for_each_miss(place):
    result = place.run(PROGRAM, **ON, XCACHE_EXPLAIN="1")
    assert result.returncode == 0
    assert any("jit_step" in line and line.endswith("is compiled: new") for line in result.stderr.splitlines())


@pytest.mark.once
def test_dumps_that_are_asked_for_appear_cold_and_warm(place, tmp_path):
    found = []
    for number, mode in enumerate(("0", "1", "1")):
        folder = tmp_path / str(number)
        result = place.run(PROGRAM, **ON | {"XCACHE": mode, "XLA_FLAGS": f"--xla_dump_to={folder}"})
        assert (result.returncode, result.stderr) == (0, "")
        found.append(sorted(each.name for each in folder.iterdir()))
    assert found[0] == found[1] == found[2]
    assert any("jit_step" in name for name in found[0])
