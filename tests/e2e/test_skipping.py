"""A request for a module gets the real one, and checking finds a wrong alias; see also test_programs.py."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3

import pytest
from support.command_line import Shell
from support.marks import thorough
from support.program_files import program_text
from support.programs import run

from xcache.client.client import Client
from xcache.wire.seals import sealed

SKIP = {"XCACHE": "1", "XCACHE_LOWERING": "skip"}


@pytest.mark.thorough
def test_whoever_asks_for_a_module_gets_the_real_one(place):
    off, cold, warm = (
        json.loads(place.run(program_text("show_modules"), **settings).stdout.splitlines()[-1])
        for settings in ({}, SKIP, SKIP)
    )
    assert off["shown"] == cold["shown"] == warm["shown"]
    assert min(warm["lowerings"]["asked for"], warm["lowerings"]["skipped"]) >= 5
    assert warm["errors"] == cold["errors"] == {}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["compile_in_a_listener", "overflow_while_lowering", "compile_at_the_end"])
def test_a_program_says_the_same_where_lowering_is_skipped(place, name):
    """Its results, warnings and exceptions are those of a run without xcache, under other settings of numpy, too."""
    source = program_text(name)
    for settings in ({}, {"NUMPY_RAISES": "1"}) if name == "overflow_while_lowering" else ({},):
        off, cold, warm = (place.run(source, **settings, **more) for more in ({}, SKIP, SKIP))
        assert (cold.stdout, cold.stderr) == (warm.stdout, warm.stderr) == (off.stdout, off.stderr)
        assert off.stdout


_EDITED = """
import os, jax, jax.numpy as jnp
from jax._src.lib.mlir.dialects import hlo
from jaxlib.mlir import ir
lowered = jax.jit(lambda x: jnp.sin(x)).lower(jnp.float32(0.25))
if os.environ["MODE"] == "edits":
    module = lowered.compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        for operation in module.body.operations[0].body.blocks[0].operations:
            if operation.operation.name == "stablehlo.sine":
                with ir.InsertionPoint(operation):
                    operation.result.replace_all_uses_with(hlo.cosine(operation.operands[0]))
print(lowered.compile()(jnp.float32(0.25)))
"""


@pytest.mark.once
def test_a_module_that_is_edited_before_it_is_compiled_is_nobody_elses(place):
    off = {each: place.run(_EDITED, MODE=each).stdout for each in ("edits", "looks")}
    assert off["edits"] != off["looks"]
    for each in ("edits", "looks", "edits"):
        assert place.run(_EDITED, MODE=each, **SKIP).stdout == off[each]


_PATCHED_MEANWHILE = """
import os
from unittest import mock
import jax, jax.numpy as jnp, numpy as np
try:
    from jax._src.random import threefry2x32 as module
except ImportError:
    from jax._src import prng as module
original = module.apply_round
def patched(state, rotation):
    state = original(state, rotation)
    state[0] = state[0] ^ np.uint32(5)
    return state
def noise(x):
    return x + jax.random.normal(jax.random.wrap_key_data(jnp.array([1, 2], jnp.uint32)), (8,))
if way := os.environ.get("WAY"):
    with mock.patch.object(module, "apply_round", patched):
        if way == "callback":
            jax.jit(lambda x: (jax.debug.callback(lambda: None), noise(x))[1])(jnp.ones(8))
        else:
            jax.config.update("jax_log_compiles", True)
            jax.jit(lambda x: noise(x) + 1)(jnp.ones(8))
            jax.config.update("jax_log_compiles", False)
print(np.asarray(jax.jit(noise)(jnp.ones(8))).tobytes().hex())
"""


@pytest.mark.parametrize("way", thorough(["log"], usual=["callback"]))
def test_what_was_traced_while_nobody_described_it_is_nobody_elses(place, way):
    """jax's caches keep what a patch has made of its code after that is undone."""
    off = {each: place.run(_PATCHED_MEANWHILE, WAY=each).stdout for each in (way, "")}
    assert off[way] != off[""]
    for each in (way, "", way):
        assert place.run(_PATCHED_MEANWHILE, WAY=each, **SKIP).stdout == off[each]


def test_what_becomes_of_an_axis_counts(place):
    shardings, descriptions = place.run(program_text("describe_partial_sums")).stdout.split()
    assert int(shardings) == int(descriptions) >= 3


@pytest.mark.once
def test_a_program_that_gains_nothing_by_skipping_is_lowered_from_its_second_run_on(place):
    few = """
import time
from xcache import hook
jax.devices()
history, began = hook._installed.cache._history, time.monotonic()
while (history._is_asked or history._structures is None) and time.monotonic() < began + 60:
    time.sleep(0.01)
out = float(jax.jit(lambda v: v * 3)(x).sum())
"""
    place.start_daemon()
    lowerings = [[*run(place, few, XCACHE_LOWERING="auto").stats["lowerings"]] for _ in range(3)]
    assert lowerings == [["no alias"], ["lowering is cheap"], ["lowering is cheap"]]


_LOWERED_AT_LAST = """
import time
import jax, xcache
jax.jit(lambda x: x * 2)(1.0)
# The thread that stores and reports has nothing more to do, and ends.
time.sleep(2.0)
jax.jit(lambda x: x * 3).lower(1.0)
print(sum(xcache.stats().lowerings.values()))
"""


def test_what_is_counted_last_is_in_the_statistics_of_the_store(place):
    counted = int(place.run(_LOWERED_AT_LAST, **SKIP).stdout)
    assert sum(Shell(place).json("stats")["lowerings"].values()) == counted


_LATE = """
import jax, jax.numpy as jnp, xcache
x = jnp.arange(4.0) + 1
import jax.scipy.stats
xcache.jit(lambda x: x * 2, version="1")(x)
print(*xcache.stats().lowerings, *xcache.stats().calls)
"""


@pytest.mark.once
def test_what_xcache_puts_into_modules_that_are_imported_late_is_no_change_of_jaxs_code(place):
    assert place.run(_LATE, **SKIP).stdout.split() == ["no", "alias", "no", "record"]
    assert place.run(_LATE, **SKIP).stdout.split() == ["skipped", "skipped"]


@pytest.mark.once
def test_a_program_is_counted_as_skipped_or_by_why_it_was_lowered_and_never_as_both(place):
    program = "out = [float(jax.jit(lambda v: v * 3)(x).sum()), float(jax.jit(lambda v: v + 4)(x).sum())]"
    run(place, program)
    warm = run(place, program).stats
    assert warm["lowerings"] == {"skipped": warm["requests"]}
    # Under another flag there is an alias of each program, and no entry.
    other = run(place, program, XLA_FLAGS="--xla_cpu_enable_fast_min_max=true", XCACHE_LOG="debug")
    assert other.stats["lowerings"] == {"no entry": other.stats["requests"]}
    assert len([line for line in other.complaints if "miss: " in line]) == other.stats["misses"] == warm["requests"]


@pytest.mark.thorough
def test_warnings_of_modules_that_are_imported_late_are_counted(place):
    program = """
import jax, xcache
from xcache.hook import warned
jax.jit(lambda v: v * 3)(1.0)
from jax.experimental import sparse
print(len(warned.modules_that_warn()))
jax.jit(lambda v: v + 4)(1.0)
print(len(warned.modules_that_warn()))
xcache.disable()
print(len(warned.modules_that_warn()))
"""
    late, after, disabled = map(int, place.run(program, **SKIP).stdout.split())
    assert disabled > late > after == 0


@pytest.mark.thorough
@pytest.mark.once
def test_modules_that_come_while_python_collects_garbage_stop_nothing(place):
    # Another thread may import a module in the middle of any allocation of this one.
    program = """
import gc, itertools, sys, types
numbers = itertools.count()
def imported(*_):
    name = f"new_{next(numbers)}"
    sys.modules[name] = types.ModuleType(name)
import jax
gc.set_threshold(50)
gc.callbacks.append(imported)
out = [float(jax.jit(lambda v, k=k: (v * k).sum())(2.0)) for k in range(5)]
"""
    ran = run(place, program, XCACHE_LOG="debug")
    assert [line for line in ran.complaints if "could not" in line] == []
    assert ran.stats["requests"] > 0
    assert "error" not in ran.stats["lowerings"]


@pytest.mark.thorough
@pytest.mark.once
def test_checking_finds_a_wrong_alias_and_drops_it(place):
    program = "out = [float(jax.jit(lambda v: v * 3)(x).sum()), float(jax.jit(lambda v: v + 4)(x).sum())]"
    off, cold = run(place, program, mode=None), run(place, program, XCACHE_LOWERING="skip")
    with contextlib.closing(sqlite3.connect(place.dir / "store.db")) as database:
        noted = database.execute("SELECT structure, program, facts FROM aliases").fetchall()
    others = [program for _, program, _ in reversed(noted)]
    client = Client(place.config(), "test", None)
    client.remember_aliases([sealed(each[0], other, each[2]) for each, other in zip(noted, others, strict=True)])
    client.close()
    checked = run(place, program, XCACHE_LOWERING="check")
    wrong = sum(each[1] != other for each, other in zip(noted, others, strict=True))
    assert checked.result == cold.result == off.result
    assert checked.stats["lowerings"]["contradiction"] == wrong > 0
    complaints = "\n".join(checked.complaints)
    assert "please report it" in complaints
    # Both programs can be had.
    shown = re.findall(r"xcache show (\w+) --program", complaints)
    assert len(shown) == 2 * wrong
    for key in shown:
        assert "stablehlo" in Shell(place).say("show", key, "--program")
    after = run(place, program, XCACHE_LOWERING="skip")
    assert (after.result, after.stats["errors"]) == (off.result, {})
