"""xcache says why a program was compiled, where the time went, and what a run asked for."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pytest
from support.places import until
from support.program_files import program_text
from support.traces import check as check_trace

ON = {"XCACHE": "1", "PYTHONHASHSEED": "0"}
PROGRAM = program_text("compile_one_way")


def run(place, **environment):
    result = place.run(PROGRAM, **ON | environment)
    assert (result.returncode, result.stderr) == (0, "")


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
    assert shown["saved_seconds"] == 0
    said = shell.run("run").stdout
    assert "s until its last program was ready" in said
    saved = json.loads(shell.run("run", "--json").stdout)["saved_seconds"]
    assert ("the cache saved" in said) == (saved > 0)
    compiling = sum(
        span["seconds"] for each in shown["programs"] for span in each["spans"] if span["stage"] == "compile"
    )
    assert -compiling < saved < compiling
    compared = json.loads(shell.run("compare", cold["run"], "--json").stdout)
    of_step = next(each for each in compared["programs"] if each["module_name"] == "jit_step")
    assert (of_step["a"]["compiled"], of_step["b"]["compiled"]) == (1, 0)
    file = tmp_path / "trace.json.gz"
    assert shell.run("trace", cold["run"], "-o", str(file)).returncode == 0
    document = json.loads(gzip.decompress(file.read_bytes()))
    check_trace(document)
    names = {event["name"] for event in document["traceEvents"]}
    assert names >= {"compile jit_step", "lookup jit_step", "daemon jit_step", "store jit_step"}


@pytest.mark.thorough
@pytest.mark.once
def test_a_run_that_looks_nothing_up_knows_its_arguments(place, shell):
    for settings in ({"XCACHE": "refresh"}, {"XCACHE_LOWERING": "off"}):
        run(place, **settings)
        programs = json.loads(shell.run("run", "--json").stdout)["programs"]
        assert [each["shapes"] for each in programs if each["module_name"] == "jit_step"] == ["f32[8,8]"]


@pytest.mark.thorough
@pytest.mark.once
def test_a_run_that_was_killed_is_recorded_up_to_then(place, shell):
    source = PROGRAM + "\nimport os, signal, xcache\ntime.sleep(3)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    assert place.run(source, **ON).returncode == -9
    shown = json.loads(shell.run("run", "--json").stdout)
    assert shown["state"] == "killed"
    assert any(each["module_name"] == "jit_step" for each in shown["programs"])


@pytest.mark.thorough
@pytest.mark.once
def test_a_run_without_any_allowance_left_has_ended(place, shell):
    source = PROGRAM + "\nfrom xcache import process_cache\nprocess_cache.current().client.charge(1e6)\n"
    assert place.run(source, **ON).returncode == 0
    assert json.loads(shell.run("run", "--json").stdout)["state"] == "ended"


@pytest.mark.thorough
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
    for wanted, says in (("ab", "give 4 or more"), ("zzz", "hexadecimal digits"), ("0000", "no run begins with")):
        done = shell.run("run", wanted)
        assert done.returncode == 1
        assert says in done.stderr
    for arguments in (("why", "no_such_function"), ("why", "abcdef0123"), ("why", "--run", "last", "no_such_function")):
        done = shell.run(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert "is named or keyed" in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.thorough
@pytest.mark.once
def test_a_name_is_looked_for_in_the_runs_that_compiled_it(place, shell):
    run(place)
    run(place)
    assert json.loads(shell.run("why", "--json").stdout)["misses"] == []
    (first, *_), key = misses(shell, "jit_step"), misses(shell, "jit_step")[0]["key"]
    assert first["cause"] == "new"
    assert misses(shell, key[:8]) == [first]
    assert "found jit_step in the cache" in shell.run("why", "--run", "last", "jit_step").stderr


def misses(shell, *arguments):
    done = shell.run("why", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["misses"]


@pytest.mark.thorough
@pytest.mark.once
def test_a_run_that_goes_on_is_explained_as_far_as_it_is(place, shell):
    source = PROGRAM + "\nimport sys\nprint(flush=True)\nsys.stdin.readline()\n"
    begun = subprocess.Popen(
        [sys.executable, "-c", source], env=place.env | ON, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert begun.stdout.readline()
        assert until(lambda: place.query("SELECT 1 FROM ledger WHERE module_name = 'jit_step'"))
        shown = shell.run("why").stdout
        assert "running" in shown
        assert "compiled so far" in shown
    finally:
        begun.communicate(timeout=60)


@pytest.mark.thorough
@pytest.mark.once
def test_long_texts_are_cut_in_a_pipe_too(place, shell):
    source = (
        "import sys, numpy as np, jax\n"
        "jax.jit(lambda *values: sum(v.sum() for v in values))(*[np.ones(n) for n in range(1, 200)])\n"
        "sys.argv += ['x' * 500]\n"
    )
    run_source(place, source)
    for command in ("run", "why", "runs"):
        lines = shell.run(command).stdout.splitlines()
        assert max(map(len, lines)) <= 400, lines
    assert max(map(len, shell.run("run", "--all").stdout.splitlines())) > 1000
    (program,) = json.loads(shell.run("run", "--json").stdout)["programs"]
    assert len(program["shapes"]) > 1000


def run_source(place, source):
    result = place.run(source, **ON)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.thorough
@pytest.mark.once
def test_a_store_of_an_older_version_has_no_runs(place, shell):
    run(place)
    assert shell.run("stop").returncode == 0
    place.execute("PRAGMA user_version = 8")
    for command in ("why", "run"):
        done = shell.run(command)
        assert (done.returncode, done.stdout) == (1, "")
        assert "an older xcache wrote this store" in done.stderr


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
    says = "is compiled: no program of this name was stored before this run (new)"
    assert any("jit_step" in line and line.endswith(says) for line in result.stderr.splitlines())


@pytest.mark.thorough
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
