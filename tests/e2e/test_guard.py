"""Within no_compiles() nothing is compiled, however a program asks; what is found runs, and later all goes on."""

from __future__ import annotations

import json
import re

import pytest
from support.marks import further

ON = {"XCACHE": "1", "PYTHONHASHSEED": "0", "XCACHE_PREFETCH": "0"}
BEGIN = """
import json, sys, threading
import jax, numpy as np
import xcache

x = np.ones(3, np.float32)
shown = {}

def note(name, work):
    try:
        shown[name] = float(np.sum(work()))
    except xcache.CompileInGuardError as error:
        shown[name] = str(error)

def plus(number):
    def add(v):
        return v + number
    return jax.jit(add)
"""
WAYS = (
    BEGIN
    + """
add, recorded = plus(1), xcache.jit(lambda v: v + 2, version="1")
prepared = xcache.jit(lambda v: v + 3, version="1")
def prepare():
    prepared.prepare((x,))
    return prepared(x)

def ask_in_every_way():
    note("call", lambda: add(x))
    note("again", lambda: add(x))
    note("ahead of time", lambda: plus(4).lower(x).compile()(x))
    note("recorded", lambda: recorded(x))
    note("prepared", prepare)
    thread = threading.Thread(target=note, args=("thread", lambda: plus(5)(x)))
    thread.start()
    thread.join()
    note("mapped", lambda: jax.pmap(lambda v: v + 6)(x[None]))

with xcache.no_compiles():
    with xcache.no_compiles():
        pass
    ask_in_every_way()
within = dict(shown)
ask_in_every_way()
forbidden = [row["stored"] for row in xcache.ledger()["programs"]]
print(json.dumps({"within": within, "after": shown, "forbidden": forbidden}))
"""
)
SUMS = {
    "call": 6.0, "again": 6.0, "ahead of time": 15.0, "recorded": 9.0, "prepared": 12.0, "thread": 18.0, "mapped": 21.0
}  # fmt: skip


def run(place, source, **environment):
    done = place.run(source, **ON | environment)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_whatever_would_compile_raises_and_compiles_afterwards_and_a_hit_is_no_compile(place):
    cold = run(place, WAYS)
    assert cold["after"] == SUMS
    for name, said in cold["within"].items():
        assert "would be compiled within no_compiles(): " in str(said), name
        assert "<string>" in said, name
    assert "no: compiling it was forbidden" in cold["forbidden"]
    warm = run(place, WAYS)
    assert warm["within"] == warm["after"] == SUMS


@pytest.mark.thorough
@pytest.mark.once
def test_a_program_that_cannot_be_cached_is_named_with_the_reason(place):
    source = """
jax.config.update("jax_enable_compilation_cache", False)
with xcache.no_compiles():
    note("left to jax", lambda: plus(1)(x))
note("later", lambda: plus(1)(x))
print(json.dumps(shown))
"""
    shown = run(place, BEGIN + source)
    assert "jit_add (called at <string>" in shown["left to jax"]
    assert shown["left to jax"].endswith("jax_enable_compilation_cache is off")
    assert shown["later"] == 6.0


@pytest.mark.thorough
@pytest.mark.once
def test_a_program_of_jaxlibs_is_named_with_its_place(place):
    source = """
program = "func.func public @main(%x: tensor<3xf32>) -> tensor<3xf32> { return %x : tensor<3xf32> }"
devices = jax.devices()[:1]
with xcache.no_compiles():
    note("direct", lambda: xcache.compile(devices[0].client, program, devices))
print(json.dumps(shown))
"""
    shown = run(place, BEGIN + source)
    assert "(called at <string>:" in shown["direct"]
    assert "would be compiled within no_compiles(): " in shown["direct"]


@pytest.mark.once
def test_while_the_cache_is_off_a_program_is_told_once_that_nothing_is_forbidden(place):
    source = """
for _ in range(2):
    with xcache.no_compiles():
        note("compiled", lambda: plus(1)(x))
print(json.dumps(shown))
"""
    done = place.run(BEGIN + source, XCACHE="0")
    assert json.loads(done.stdout) == {"compiled": 6.0}
    assert done.stderr.count("\n") == 1
    assert "no_compiles() sees none of jax's compiles" in done.stderr


@pytest.mark.once
def test_a_forked_child_is_bound_by_the_guard_of_the_thread_that_forked(place):
    source = """
import os, threading
from xcache.errors import CompileInGuardError
from xcache.guard import guard

def is_bound_in_child():
    child = os.fork()
    if child == 0:
        try:
            guard.check("f", "new", "allow", None)
        except CompileInGuardError:
            os._exit(1)
        os._exit(0)
    return bool(os.waitpid(child, 0)[1])

entered, done = threading.Event(), threading.Event()
def work():
    with guard.forbidding():
        entered.set()
        done.wait(60)
thread = threading.Thread(target=work)
thread.start()
entered.wait(60)
print(is_bound_in_child())
done.set()
thread.join()
with guard.forbidding():
    print(is_bound_in_child())
"""
    done = place.run(source, PYTHONWARNINGS="ignore")
    assert (done.returncode, done.stdout.split()) == (0, ["False", "True"]), done.stderr


ADDING = """
import jax, numpy as np
print(jax.jit(lambda v: v + 1)(np.ones(3, np.float32)))
"""
FAIL = {"XCACHE_ON_MISS": "fail"}


@pytest.mark.thorough
def test_with_no_time_to_wait_the_first_compile_fails_and_a_hit_runs(place):
    cold = place.run(ADDING, **ON, **FAIL, XCACHE_ON_MISS_AFTER="0")
    assert (cold.returncode, cold.stdout) == (1, "")
    # jax 0.6 has another name for it.
    assert re.search(r"InGuardError: jit__lambda_? \(called at <string>:3 in <module>\) would be compiled", cold.stderr)
    assert "did not hold" not in cold.stderr
    assert place.run(ADDING, **ON).returncode == 0
    warm = place.run(ADDING, **ON, **FAIL, XCACHE_ON_MISS_AFTER="0s")
    assert (warm.returncode, warm.stdout, warm.stderr) == (0, "[2. 2. 2.]\n", "")


@pytest.mark.thorough
@pytest.mark.once
@pytest.mark.parametrize(
    ("time", "because"),
    [
        ({}, "no XCACHE_ON_MISS_AFTER is set"),
        ({"XCACHE_ON_MISS_AFTER": "1h"}, "the time of XCACHE_ON_MISS_AFTER has not"),
    ],
    ids=["no time", "later"],
)
def test_a_program_in_which_the_setting_never_held_says_so_once_at_its_end(place, time, because):
    cold, warm = (place.run(ADDING, **ON, **FAIL, **time) for _ in range(2))
    assert (cold.returncode, cold.stdout, cold.stderr.count("\n")) == (0, "[2. 2. 2.]\n", 1)
    assert cold.stderr.startswith("xcache: XCACHE_ON_MISS=fail did not hold, because xcache.warmed_up() was not called")
    assert because in cold.stderr
    assert "1 program was compiled; with XCACHE_ON_MISS_AFTER=0 it holds" in cold.stderr
    assert (warm.returncode, warm.stderr) == (0, "")


@pytest.mark.thorough
@pytest.mark.once
def test_nothing_is_said_at_the_end_if_the_setting_held(place):
    done = place.run(ADDING + "import xcache\nxcache.warmed_up()\n", **ON, **FAIL)
    assert (done.returncode, done.stderr) == (0, "")


FORKING = """
import multiprocessing
import jax, numpy as np

def compile_one():
    jax.jit(lambda v: v + 1).lower(np.ones(multiprocessing.parent_process() and 2 or 3)).compile()

def run(work):
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == 0

# The parent has no threads of jax's yet.
run(compile_one)
compile_one()
run(int)
"""


@pytest.mark.thorough
@pytest.mark.once
@pytest.mark.parametrize("mode", ["1", "readonly"])
def test_each_process_speaks_of_its_own_programs_also_a_forked_child(place, mode):
    done = place.run(FORKING, **ON | FAIL | {"XCACHE": mode, "PYTHONWARNINGS": "ignore"})
    said = [line for line in done.stderr.splitlines() if line.startswith("xcache: ")]
    assert (done.returncode, len(said)) == (0, 2), done.stderr
    assert all("did not hold" in line and ": 1 program was compiled;" in line for line in said)


@pytest.mark.once
@pytest.mark.parametrize(
    ("variables", "why"),
    [
        (
            {"XCACHE_ON_MISS": "forbid"},
            "XCACHE_ON_MISS='forbid' (environment) cannot be used; it must be allow, warn or",
        ),
        *further(({**FAIL, "XCACHE_MAX_SIZE": "big"}, "XCACHE_MAX_SIZE='big' (environment) cannot be used")),
        ({"XCACHE_ON_MIS": "fail"}, "XCACHE_ON_MIS is not a setting; did you mean XCACHE_ON_MISS?"),
        ({"XCACHE_CONFIG": "wrong.toml"}, "wrong.toml: 'on_mis' is not a setting; did you mean on_miss?"),
    ],
)
def test_a_guard_that_cannot_be_kept_stops_the_program_until_it_decides_for_itself(place, variables, why):
    (place.root / "wrong.toml").write_text('on_mis = "fail"\n')
    source = """
for _ in range(2):
    note("forbidden", lambda: plus(1)(x))
xcache.disable()
note("allowed", lambda: plus(1)(x))
print(json.dumps(shown))
"""
    done = place.run(BEGIN + source, **ON, **variables)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    shown = json.loads(done.stdout)
    assert shown["forbidden"].startswith("nothing is compiled, because XCACHE_ON_MISS cannot be kept: ")
    assert why in shown["forbidden"] and why in done.stderr
    assert shown["allowed"] == 6.0
