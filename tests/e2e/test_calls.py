"""Calls of functions of ``xcache.jit``: the same whether they are traced or answered from a record."""

from __future__ import annotations

import json

import jax
import pytest
from support.command_line import Shell
from support.marks import thorough
from support.program_files import program_text
from support.programs import FOUR_DEVICES

ON = {"XCACHE": "1", "XCACHE_LOWERING": "skip"}
# Without make_user_context (before jax 0.8) a function cannot be traced anew, and xcache.jit is jax.jit.
RECORDS = hasattr(jax, "make_user_context")


def said(place, program, **settings):
    """Run a program that prints JSON, and return that."""
    ran = place.run(program, **settings)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_call_is_the_same_whether_it_is_traced_or_not(place):
    program = program_text("call_jitted")
    off, cold, warm, checked = (
        said(place, program, **FOUR_DEVICES, **settings) for settings in ({}, ON, ON, {**ON, "XCACHE_JIT": "check"})
    )
    assert off["shown"] == cold["shown"] == warm["shown"] == checked["shown"]
    for ran in (cold, warm, checked):
        assert ran["stats"]["errors"] == {}
        assert "error" not in ran["stats"]["calls"]
    if RECORDS:
        assert not any(warm["traced"].values())
        assert checked["traced"].keys() == off["traced"].keys()
        # It was called twice, and described once.
        assert warm["stats"]["calls"]["no fast path"] == 1
        # A numpy array and one of jax make the same call, which is checked once.
        assert warm["stats"]["calls"]["skipped"] >= checked["stats"]["calls"]["checked"] >= 25
    else:
        assert warm["traced"] == off["traced"]


@pytest.mark.thorough
def test_values_that_look_alike_are_told_apart(place):
    program = program_text("call_with_odd_values")
    off, *others = (said(place, program, **settings) for settings in ({}, ON, ON, {**ON, "XCACHE_JIT": "check"}))
    for ran in others:
        assert ran["shown"] == off["shown"]
        assert "calls that cannot be told apart" not in ran["calls"]


@pytest.mark.thorough
@pytest.mark.once
def test_a_set_counts_in_its_order_which_another_process_may_not_have(place):
    program = program_text("call_with_sets")
    ran = [said(place, program, **ON, PYTHONHASHSEED=seed) for seed in ("1", "2", "1")]
    for each in ran:
        assert each["weighed"] == {"mass": 1.0, "energy": 2.0, "spin": 3.0, "charge": 4.0, "color": 5.0}
        assert each["found"] == 2.0
    if RECORDS:
        assert [each["calls"] for each in ran] == [{"no record": 2}, {"no record": 1, "skipped": 1}, {"skipped": 2}]


_UNDONE = """
import json, os, jax, jax.numpy as jnp, xcache
from unittest import mock
from jax._src.lax import lax
jax.devices()
if "UNDONE" in os.environ:
    with mock.patch.object(lax, "sin", lax.cos):
        jax.eval_shape(jnp.sin, 1.0)
found = float(xcache.jit(lambda x: jnp.sin(x) * 2, version="1")(1.0))
print(json.dumps([found, xcache.stats().calls if xcache.stats() else {}]))
"""


@pytest.mark.once
def test_a_patch_of_jax_that_was_undone_before_the_first_call_has_it_traced(place):
    """jax's caches have what the patched code has traced."""
    assert said(place, _UNDONE, **ON)[1] == ({"no record": 1} if RECORDS else {})
    if RECORDS:
        # The digest of jax's files is remembered, though nothing but such a call has asked for it.
        assert any(name.startswith("tree ") for name in json.loads((place.dir / "library-digests.json").read_text()))
    off, on = (said(place, _UNDONE, UNDONE="1", **settings) for settings in ({}, ON))
    assert on[0] == off[0] != said(place, _UNDONE)[0]


_LEAKS = """
import json, xcache
leaked = []
found = float(xcache.jit(lambda x: leaked.append(x) or x * 2, version="1")(3.0))
print(json.dumps([found, len(leaked) > 0, xcache.stats().calls if xcache.stats() else {}]))
"""


@pytest.mark.skipif(not RECORDS, reason="xcache.jit is jax.jit with this jax")
def test_a_function_that_keeps_a_tracer_is_traced(place):
    for _ in range(2):
        assert said(place, _LEAKS, **ON) == [6.0, True, {"tracer": 1}]


@pytest.mark.once
def test_a_function_can_be_sent_to_another_process(place):
    program = """
import cloudpickle, json, xcache
function = xcache.jit(lambda x: x * 2, version="1")
before = cloudpickle.loads(cloudpickle.dumps(function))
results = [float(before(3.0)), float(function(3.0))]
after = cloudpickle.loads(cloudpickle.dumps(function))
print(json.dumps({"results": [*results, float(after(3.0))]}))
"""
    for settings in ({}, ON, ON):
        assert said(place, program, **settings)["results"] == [6.0] * 3


@pytest.mark.thorough
@pytest.mark.once
def test_what_the_program_binds_when_it_runs_counts_or_the_call_is_traced(place):
    script = place.root / "script.py"
    script.write_text(program_text("call_what_is_bound"))

    def ran(argument, **settings):
        return said(
            place, f"import runpy, sys; sys.argv = ['', '{argument}']; runpy.run_path({str(script)!r})", **settings
        )

    one, other = ran(1), ran(2)
    for argument in (1, 2, 1):
        found = ran(argument, **ON)
        assert found["results"] == (one if argument == 1 else other)["results"]
        assert "error" not in found["calls"]
    if RECORDS:
        assert found["calls"]["skipped"] >= 30


SCRIPT = """
import functools, json, jax, xcache
jit = functools.partial(xcache.jit, version="1")
def helper(x):
    return x * {factor}
def step(x):
    return helper(x)
class Called:
    def __call__(self, x):
        return helper(x)
steps = step, jax.grad(step), jax.checkpoint(step), functools.partial(step), Called()
print(json.dumps({{"results": [float(jit(each)(1.0)) for each in steps]}}))
"""


@pytest.mark.thorough
@pytest.mark.once
def test_two_scripts_with_one_version_do_not_share_a_function_of_one_name(place, tmp_path):
    for factor in (2, 3, 2):
        script = tmp_path / f"{factor}.py"
        script.write_text(SCRIPT.format(factor=factor))
        ran = place.run(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", **ON)
        assert json.loads(ran.stdout)["results"] == [factor] * 5, ran.stderr


IMPORTING = """
import json, jax, xcache
import jax.numpy as jnp
jit = lambda fun: xcache.jit(fun, version="1")
@jit
def first(x):
    from jax.experimental import sparse
    return x + 1
@jit
def second(x):
    return x * 2
first(1.0), second(1.0)
print(json.dumps({"calls": dict(xcache.stats().calls)}))
"""


@pytest.mark.thorough
@pytest.mark.once
@pytest.mark.skipif(not RECORDS, reason="xcache.jit is jax.jit with this jax")
def test_a_call_that_is_not_traced_imports_what_its_trace_imported_of_jax(place):
    """Rules that came with it count for later calls."""
    cold, warm = (said(place, IMPORTING, **ON) for _ in range(2))
    assert cold["calls"] == {"no record": 2}
    assert warm["calls"] == {"skipped": 2}


@pytest.mark.once
def test_with_the_cache_off_jax_says_where_the_program_calls_from(place):
    program = """
import jax, logging, xcache
jax.config.update("jax_explain_cache_misses", True)
called = xcache.jit(lambda x: x + 1, version="1")
called(1.0)
called(1)
"""
    ran = place.run(program)
    assert "dispatch.py" not in ran.stderr


@pytest.fixture
def library(place):
    """Install a library whose function reads the environment; return the settings that a program finds it with."""
    folder = place.root / "site-packages"
    folder.mkdir()
    text = "import os\n\n\ndef scaled(x):\n    return x * float(os.environ['FACTOR'])\n"
    (folder / "library_of_a_test.py").write_text(text)
    return {**ON, "PYTHONPATH": f"{place.env['PYTHONPATH']}:{folder}"}


ALIKE = """
import dataclasses, json, os, library_of_a_test, xcache
def function(x):
    return library_of_a_test.scaled(x)
results = []
for os.environ["FACTOR"] in "23":
    results.append(float(xcache.jit(lambda x: function(x), version="1")(10.0)))
print(json.dumps({"results": results, "stats": dataclasses.asdict(xcache.stats())}))
"""


@pytest.mark.thorough
@pytest.mark.once
def test_two_functions_that_xcache_cannot_tell_apart_have_no_record(place, library):
    """A library's files stand for its functions, whatever these read."""
    for _ in range(3):
        ran = said(place, ALIKE, **library)
        assert ran["results"] == [20, 30]
        assert ran["stats"]["calls"]["calls that cannot be told apart"] == 1


PROGRAM = """
import dataclasses, json, os, library_of_a_test, xcache
traced = []
@xcache.jit(version=os.environ.get("VERSION", "1"))
def function(x):
    traced.append(1)
    return library_of_a_test.scaled(x) + 1
try:
    result = float(function(2.0))
except xcache.errors.WrongVersionError as error:
    result = str(error)
print(json.dumps({"result": result, "traced": len(traced), "stats": dataclasses.asdict(xcache.stats())}))
"""


@pytest.mark.thorough
@pytest.mark.once
@pytest.mark.skipif(not RECORDS, reason="this jax cannot be made to trace anew")
def test_checking_finds_a_version_that_did_not_change_with_its_code(place, library):
    assert said(place, PROGRAM, **library, FACTOR="3")["result"] == 7
    # The version is the program's word: nobody looks into what a library's function reads.
    assert said(place, PROGRAM, **library, FACTOR="4")["result"] == 7
    assert said(place, PROGRAM, **library, FACTOR="4", VERSION="2")["result"] == 9
    found = said(place, PROGRAM, **library, FACTOR="4", XCACHE_JIT="check")["result"]
    assert "function at" in found
    assert "another program" in found
    assert "version '1'" in found
    # The right record has taken the place of the wrong one.
    after = said(place, PROGRAM, **library, FACTOR="4")
    assert (after["result"], after["stats"]["calls"]) == (9, {"skipped": 1})
    assert said(place, PROGRAM, **library, FACTOR="4", XCACHE_JIT="check")["stats"]["calls"] == {"checked": 1}


@pytest.mark.once
@pytest.mark.skipif(not RECORDS, reason="this jax cannot be made to trace anew")
@pytest.mark.parametrize(
    "settings",
    thorough([{"XCACHE": "0"}, {"XCACHE_LOWERING": "check"}], usual=[{"XCACHE": "0"}]),
    ids=["off", "lowering checked"],
)
def test_a_check_that_compares_nothing_says_so(place, library, settings):
    ran = place.run(PROGRAM, **library | settings, FACTOR="3", XCACHE_JIT="check")
    assert ran.returncode == 0
    assert ran.stderr.count("XCACHE_JIT=check compares no calls here") == 1


@pytest.mark.thorough
@pytest.mark.skipif(not RECORDS, reason="this jax cannot be made to trace anew")
def test_a_call_is_traced_where_there_is_no_record_to_use(place, library):
    for settings in ({"XCACHE_JIT": "off"}, {"XCACHE": "readonly"}, {"XCACHE_LOWERING": "off"}, {}):
        # Only a call that is to be recorded is traced twice.
        assert said(place, PROGRAM, **library | settings, FACTOR="3")["traced"] == (1 if settings else 2)
    assert said(place, PROGRAM, **library, FACTOR="3")["traced"] == 0
    for watched in ("JAX_DEBUG_NANS", "JAX_LOG_COMPILES", "JAX_CHECK_TRACER_LEAKS"):
        assert said(place, PROGRAM, **library, FACTOR="3", **{watched: "1"})["traced"] >= 1
    Shell(place).say("clear", "--yes")
    ran = said(place, PROGRAM, **library, FACTOR="3")
    assert (ran["result"], ran["stats"]["misses"]) == (7, 1)
    assert said(place, PROGRAM, **library, FACTOR="3")["traced"] == 0


@pytest.mark.thorough
def test_what_is_prepared_is_neither_traced_nor_compiled_when_it_is_called(place):
    program = program_text("prepare_buckets")
    off, cold, warm = (said(place, program, **settings) for settings in ({}, ON, ON))
    for ran in (off, cold, warm):
        assert ran["results"] == off["results"]
        assert ran["wrong"] == off["wrong"]
        assert (ran["traced"], ran["compiles"], ran["left"]) == ([], 0, [])
    assert off["prepared"] == cold["prepared"] == [1, 2, 4, 8]
    if RECORDS:
        assert warm["prepared"] == []
        assert warm["stats"]["calls"]["skipped"] == 4
        # Prepared and made, each of them is one call.
        assert cold["stats"]["calls"]["no record"] == 4


# A local module, an editable library, and installed ones that import each other, two of them late.
FILES = {
    "local.py": "def times(x):\n    return x * {local}\n",
    "named.py": "FACTOR = {computed}\n",
    "editable/edited/__init__.py": "from edited.inner import times\n",
    "editable/edited/inner.py": "def times(x):\n    return x * {editable}\n",
    "site-packages/near/__init__.py": "import far\ndef times(x):\n    return far.inner.times(x)\n",
    "site-packages/far/__init__.py": "from far import inner\n",
    "site-packages/far/inner.py": "def times(x):\n    return x * {installed}\n",
    "mine.py": "import wrapping\nclass Model(wrapping.Module):\n    def __call__(self, x): return x * {method}\n",
    # A library may use what cannot be described.
    "site-packages/wrapping.py": """
import functools, threading
lock = threading.Lock()
def method(function):
    return functools.wraps(function)(lambda *arguments: function(*arguments))
class Module:
    @method
    def apply(self, x):
        with lock:
            return self(x)
""",
    "site-packages/late/__init__.py": "def times(x):\n    import later\n    return x * later.FACTOR\n",
    "site-packages/later/__init__.py": "FACTOR = {late}\n",
}
USES = {
    "local": "import local as used\ndef function(x): return used.times(x)",
    "editable": "import edited as used\ndef function(x): return used.times(x)",
    "installed": "import near as used\ndef function(x): return used.times(x)",
    "method": "import mine\nfunction = mine.Model().apply",
    "late": "import late as used\ndef function(x): return used.times(x)",
    "computed": "import importlib\ndef function(x): return x * importlib.import_module('na' + 'med').FACTOR",
}
USING = """
import json, sys, xcache
results = {{}}
for name, text in {uses!r}.items():
    names = {{"__name__": f"using_{{name}}"}}
    exec(text, names)
    results[name] = float(xcache.jit(names["function"], version=xcache.version_of("msgpack"))(1.0))
print(json.dumps({{"results": results, "calls": dict(xcache.stats().calls)}}))
"""


@pytest.mark.thorough
@pytest.mark.once
def test_what_a_function_uses_of_other_modules_counts_without_a_version(place):
    """``version_of`` follows no imports: each of these counts by value or by its file, or the call is traced."""

    def ran(**factors):
        for name, text in FILES.items():
            path = place.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(**{**dict.fromkeys(USES, 2), **factors}))
        folders = (place.root / folder for folder in (".", "editable", "site-packages"))
        return said(
            place, USING.format(uses=USES), **ON, PYTHONPATH=":".join(map(str, folders)), PYTHONDONTWRITEBYTECODE="1"
        )

    first, again = ran(), ran()
    assert first["results"] == again["results"] == dict.fromkeys(USES, 2)
    if RECORDS:
        # The others are never recorded: a module that the library imports late, and one of a computed name.
        assert again["calls"]["skipped"] == 4
    changed = dict(zip(USES, range(3, 9), strict=True))
    assert ran(**changed)["results"] == changed
