"""Switching it on and off: the variable, the functions, and jax as it was afterwards."""

from __future__ import annotations

import json
import textwrap

import pytest
from support.marks import thorough
from support.program_files import program_text

COMPILE = """
import jax, jax.numpy as jnp, json, numpy as np
x = np.arange(4.0, dtype=np.float32)
jax.jit(lambda v: v * 2 + 1)(x).block_until_ready()
"""
STATS = """
import dataclasses, xcache
print(json.dumps(dataclasses.asdict(xcache.stats())))
"""


def stats(place, source=COMPILE, **environment):
    result = place.run(source + STATS, **environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), result.stderr


@pytest.mark.once
def test_on(place):
    found = [stats(place, XCACHE=value)[0] for value in ("1", "on", "ON")]
    assert [(each["misses"], each["hits"]) for each in found] == [(1, 0), (0, 1), (0, 1)]


@pytest.mark.once
@pytest.mark.parametrize("value", thorough(["0", "", None], usual=["0"]))
def test_off(place, value):
    found, stderr = stats(place, **({} if value is None else {"XCACHE": value}))
    assert (found["requests"], stderr) == (0, "")
    assert not place.dir.exists()


@pytest.mark.once
def test_an_unknown_mode_is_one_line_and_off(place):
    found, stderr = stats(place, XCACHE="sometimes")
    assert found["requests"] == 0
    assert stderr.count("\n") == 1
    assert "sometimes" in stderr
    assert "readonly" in stderr


@pytest.mark.once
def test_a_wrong_setting_is_one_line_and_off(place):
    found, stderr = stats(place, XCACHE="1", XCACHE_MAX_SIZE="much")
    assert found["requests"] == 0
    assert stderr.count("\n") == 1
    assert "XCACHE_MAX_SIZE='much' (environment)" in stderr


@pytest.mark.thorough
@pytest.mark.once
def test_a_misspelt_variable_is_one_line_and_one_that_may_be_another_program_s_is_none(place):
    twice = "import xcache\nxcache.enable()\nxcache.enable()\n"
    found, stderr = stats(place, twice + COMPILE, XCACHE="1", XCACHE_MAXSIZE="10G", XCACHE_HOME="/srv")
    assert found["misses"] == 1
    assert stderr == ("xcache: XCACHE_MAXSIZE is not a setting, and nothing reads it; did you mean XCACHE_MAX_SIZE?\n")
    assert stats(place, XCACHE="0", XCACHE_MAXSIZE="10G")[1] == ""


@pytest.mark.thorough
@pytest.mark.once
def test_a_relative_directory_means_the_same_to_the_program_and_its_daemon(place):
    """The daemon runs in another folder, and the program may go to another one."""
    source = COMPILE + "import os; os.chdir('/'); jax.jit(lambda v: v * 3)(x)\n"
    found, stderr = stats(place, source, XCACHE="1", XCACHE_DIR="store")
    assert (found["misses"], found["errors"], stderr) == (2, {}, "")
    assert place.query("SELECT count(*) FROM entries") == [(2,)]
    assert stats(place, source, XCACHE="1")[0]["hits"] == 2


@pytest.mark.once
def test_readonly_looks_up_and_never_stores(place):
    nothing, _ = stats(place, XCACHE="readonly")
    assert (nothing["misses"], nothing["stores"]) == (1, 0)
    stats(place, XCACHE="1")
    found, _ = stats(place, XCACHE="readonly")
    assert (found["hits"], found["misses"]) == (1, 0)
    other, _ = stats(place, COMPILE.replace("* 2", "* 3"), XCACHE="readonly")
    assert (other["hits"], other["misses"]) == (0, 1)
    again, _ = stats(place, COMPILE.replace("* 2", "* 3"), XCACHE="readonly")
    assert (again["hits"], again["misses"]) == (0, 1)


@pytest.mark.thorough
@pytest.mark.once
def test_refresh_compiles_anew_and_overwrites(place):
    stats(place, XCACHE="1")
    before = place.query("SELECT key, blob, created_at FROM entries")
    refreshed, _ = stats(place, XCACHE="refresh")
    after = place.query("SELECT key, blob, created_at FROM entries")
    assert (refreshed["hits"], refreshed["misses"]) == (0, 1)
    assert [row[0] for row in before] == [row[0] for row in after]
    assert before[0][2] < after[0][2]
    found, _ = stats(place, XCACHE="1")
    assert found["hits"] == 1
    # It overwrites entries, and what lowering gave stays known.
    assert found["lowerings"] == {"skipped": 1}


def test_enable_and_disable_from_code(place):
    result = place.run(program_text("enable_and_disable"))
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.thorough
@pytest.mark.once
def test_enable_before_jax_is_used(place):
    source = "import xcache; xcache.enable()\n" + COMPILE + STATS
    for hits in (0, 1):
        result = place.run(source)
        assert json.loads(result.stdout)["hits"] == hits, result.stderr


@pytest.mark.once
def test_settings_from_code_win_and_wrong_ones_are_errors(place):
    source = """
import os, xcache
from pathlib import Path
try:
    xcache.enable(max_size="much")
except Exception as error:
    print(type(error).__name__, error)
try:
    xcache.enable(size="1G")
except Exception as error:
    print(type(error).__name__, error)
with xcache.enable(dir=os.environ["XCACHE_DIR"] + "-other"):
    print(Path(os.environ["XCACHE_DIR"] + "-other").exists())
"""
    said = place.run(source, XCACHE_AUTOSTART="0").stdout.splitlines()
    assert said[0].startswith("ConfigError max_size='much' (code)")
    assert said[1].startswith("ConfigError 'size' is not a setting")


@pytest.mark.thorough
@pytest.mark.once
def test_a_mode_from_code_is_one_of_those_of_the_variable(place):
    """Nothing is stored by a mode that there is not, nor by one that says off."""
    result = place.run(program_text("enable_in_each_mode"))
    assert (result.returncode, result.stderr) == (0, "")
    assert place.query("SELECT count(*) FROM entries") == [(2,)]


@pytest.mark.once
@pytest.mark.parametrize(
    "said",
    thorough(
        [
            "enable('off')",
            "disable()",
            "enable('off').uninstall()",
            "enable().uninstall()",
            "enable().uninstall(); xcache.enable('off').__enter__(); xcache.enable().__exit__(None, None, None)",
        ],
        usual=["disable()"],
    ),
)
def test_off_from_code_holds_whatever_the_variable_says(place, said):
    source = "import xcache; xcache." + said + "\n" + COMPILE
    found, _ = stats(place, source, XCACHE="1", XCACHE_AUTOSTART="0", XCACHE_LOG="error")
    assert found["requests"] == 0


@pytest.mark.once
def test_dir_lists_the_names_for_users(place):
    """Looking imports nothing more."""
    source = """
import xcache, sys
before = set(sys.modules)
names = [name for name in dir(xcache) if not name.startswith("__")]
assert set(sys.modules) == before
assert names == sorted(name for name in xcache.__all__ if not name.startswith("__")), names
import inspect, xcache.hook, xcache.direct
assert [name for name in dir(xcache) if not name.startswith("__")] == names
assert xcache.enable.__name__ == "enable" and "readonly" in xcache.enable.__doc__
"""
    result = place.run(source)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.once
@pytest.mark.parametrize(
    ("wrong", "log"),
    [
        ("XCACHE_MAX_SIZE", "info"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (("XCACHE_DAEMON_USER", None), ("XCACHE", None), ("XCACHE", "info"))
        ),
    ],
)
def test_a_line_of_xcache_in_a_program_has_its_name_in_front(place, wrong, log):
    environment = {"XCACHE": "1", wrong: "no-such-one"} | ({"XCACHE_LOG": log} if log else {})
    said = [line for line in place.run(COMPILE, **environment).stderr.splitlines() if " 0 hits" not in line]
    assert len(said) == 1
    assert said[0].startswith(f"xcache: {wrong}='no-such-one' (environment)")


@pytest.mark.thorough
@pytest.mark.once
def test_a_program_with_logging_of_its_own_is_told_by_that_alone(place):
    own = "import logging; logging.basicConfig(format='own: %(name)s')\n"
    its = "import logging; logging.getLogger('xcache').addHandler(logging.NullHandler())\n"
    for source, said in ((own, "own: xcache\n"), (its, "")):
        for wrong in ("XCACHE_MAX_SIZE", "XCACHE_DAEMON_USER"):
            assert place.run(source + COMPILE, XCACHE="1", **{wrong: "no-such-one"}).stderr == said


def test_jaxs_switch_for_persistent_caches_is_obeyed(place):
    found, _ = stats(place, XCACHE="1", JAX_ENABLE_COMPILATION_CACHE="0")
    assert found["uncacheable"] == {"jax_enable_compilation_cache is off": 1}


@pytest.mark.thorough
def test_jaxs_own_cache_is_bypassed_with_one_debug_line(place):
    own = place.root / "jax-cache"
    environment = {"JAX_COMPILATION_CACHE_DIR": str(own), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    _, stderr = stats(place, COMPILE + "jax.jit(lambda v: v * 9)(x)\n", XCACHE="1", XCACHE_LOG="debug", **environment)
    assert stderr.count("is bypassed") == 1
    assert not own.exists() or not list(own.iterdir())


_REPLACED = """
import functools
from jax._src import compiler
own = compiler.backend_compile_and_load
@functools.wraps(own)
def compile(*arguments, **options):
    return own(*arguments, **options)
compiler.backend_compile_and_load = compile
"""


@pytest.mark.parametrize(
    ("source", "before"),
    [(_REPLACED + COMPILE, 0), pytest.param(COMPILE + _REPLACED + COMPILE, 1, marks=pytest.mark.thorough)],
    ids=["first", "later"],
)
def test_a_replaced_compile_function_of_jaxs_goes_jaxs_own_way_with_its_own_cache(place, source, before):
    own = place.root / "jax-cache"
    environment = {"JAX_COMPILATION_CACHE_DIR": str(own), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    found, _ = stats(place, source, XCACHE="1", **environment)
    (reason,) = found["uncacheable"]
    assert reason.startswith("function of jax replaced: jax._src.compiler.backend_compile_and_load")
    assert list(own.iterdir())
    assert place.query("SELECT count(*) FROM entries") == [(before,)]
    # An alias would lead nowhere.
    assert sum(found["lowerings"].values()) == before


def test_a_program_without_a_key_has_jaxs_own_cache(place):
    own = place.root / "jax-cache"
    environment = {"JAX_COMPILATION_CACHE_DIR": str(own), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    dumps = {"XLA_FLAGS": f"--xla_dump_to={place.root / 'dumps'}"}
    found, _ = stats(place, XCACHE="1", **environment, **dumps)
    assert list(found["uncacheable"]) == ["dumps are asked for"]
    assert list(own.iterdir())


@pytest.mark.parametrize(
    "settings",
    thorough(
        [
            {"XCACHE_AUTOSTART": "0"},
            {"XCACHE_DIR": "/proc/no/store"},
            {"XCACHE": "readonly"},
            {"XCACHE_MAX_PAYLOAD": "1M"},
        ],
        usual=[{"XCACHE_AUTOSTART": "0"}, {"XCACHE_MAX_PAYLOAD": "1M"}],
    ),
    ids=lambda settings: "_".join(settings).lower(),
)
def test_what_the_store_can_neither_give_nor_take_is_in_jaxs_own_cache(place, settings):
    own = place.root / "jax-cache"
    environment = {"JAX_COMPILATION_CACHE_DIR": str(own), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    counting = """
import jax
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
"""
    large = "import numpy as np\nlarge = np.random.default_rng(0).random(300_000)\n"
    source = counting + large + COMPILE.replace("v * 2 + 1", "(v[0] + large)")
    source += "import sys; print(len(hits), file=sys.stderr)\n"
    if "XCACHE_MAX_PAYLOAD" in settings:
        # The store takes no executable as large, which it knows from the second run on.
        stats(place, source, XCACHE="1", **settings, **environment)
        assert not own.exists() or not list(own.iterdir())
    seen = [stats(place, source, **{"XCACHE": "1", **settings, **environment}) for _ in range(2)]
    assert [said.splitlines()[-1] for _, said in seen] == ["0", "1"]
    assert [found["misses"] for found, _ in seen] == [1, 1]
    assert not (place.dir / "store.db").exists() or not place.query("SELECT 1 FROM entries")


@pytest.mark.thorough
def test_profile_guided_optimization_goes_jaxs_own_way(place):
    found, _ = stats(place, XCACHE="1", JAX_COMPILATION_CACHE_EXPECT_PGLE="1")
    assert found["uncacheable"] == {"profile-guided optimization": 1}


@pytest.mark.thorough
def test_jaxs_events_keep_their_meaning(place):
    source = (
        """
import collections, jax
events = collections.Counter(); seconds = {}
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition("/")[2]]))
jax.monitoring.register_event_duration_secs_listener(lambda name, s, **_: seconds.update({name.rpartition("/")[2]: s}))
"""
        + COMPILE
        + """
wanted = ("compile_requests_use_cache", "cache_hits", "cache_misses", "tasks_using_cache")
durations = sorted(name for name in seconds if name.endswith(("retrieval_time_sec", "saved_sec")))
print(json.dumps([{name: events[name] for name in wanted}, durations]))
"""
    )
    cold, _ = json.loads(place.run(source, XCACHE="1").stdout)
    warm, durations = json.loads(place.run(source, XCACHE="1").stdout)
    same = {"compile_requests_use_cache": 1, "tasks_using_cache": 1}
    assert cold == same | {"cache_hits": 0, "cache_misses": 1}
    assert warm == same | {"cache_hits": 1, "cache_misses": 0}
    assert durations == ["cache_retrieval_time_sec", "compile_time_saved_sec"]


@pytest.mark.once
def test_with_log_info_a_program_ends_with_one_line(place):
    stats(place, XCACHE="1")
    result = place.run(COMPILE, XCACHE="1", XCACHE_LOG="info")
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if "saved" in line]
    assert len(lines) == 1
    assert lines[0].startswith("xcache: 1 hit, 0 misses, ")


def test_an_error_of_the_compiler_is_the_same_with_and_without(place):
    source = """
import jax, traceback
try:
    jax.jit(lambda v: v, compiler_options={"xla_no_such_flag": True})(1.0)
except Exception as error:
    print(type(error).__name__, str(error).splitlines()[0])
    print([frame.name for frame in traceback.extract_tb(error.__traceback__)])
"""
    assert place.run(source, XCACHE="1").stdout == place.run(source).stdout != ""


@pytest.mark.once
@pytest.mark.parametrize(
    "program",
    [
        COMPILE,
        pytest.param(
            f"import xcache\nwith xcache.enable():\n{textwrap.indent(COMPILE, '    ')}", marks=pytest.mark.thorough
        ),
        pytest.param(
            f"import xcache\nhandle = xcache.enable()\n{COMPILE}\nhandle.uninstall()\nhandle.uninstall()\n",
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["XCACHE", "with", "handle"],
)
def test_a_program_that_asks_is_told_once_what_the_cache_did(place, program):
    result = place.run(program, XCACHE_LOG="info", **({"XCACHE": "1"} if program is COMPILE else {}))
    assert result.stderr.count("s saved") == 1, result.stderr


@pytest.mark.thorough
@pytest.mark.once
def test_two_threads_that_switch_it_on_leave_one_cache(place):
    """One of two hooks once stayed when the cache was switched off."""
    result = place.run(program_text("enable_in_two_threads"))
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.thorough
def test_where_jax_cannot_be_used_a_direct_compile_still_is_cached(place):
    source = """
import jax, xcache
from jax._src import compiler
del compiler.compile_or_get_cached
lowered = jax.jit(lambda v: v * 3).lower(1.0).compiler_ir()
devices = jax.devices()[:1]
xcache.compile(devices[0].client, lowered, devices)
print(json.dumps(xcache.stats().misses))
"""
    result = place.run("import json\n" + source, XCACHE="1")
    assert (result.returncode, json.loads(result.stdout)) == (0, 1)
    assert "xcache is off" in result.stderr


@pytest.mark.once
def test_lowerings_are_skipped_when_the_cache_is_switched_on_again(place):
    """xcache's own functions leave jax and come back: that is no change of jax's code."""
    program = """
import json, jax, xcache
counted = []
for number in (3, 5):
    jax.jit(lambda x: x * number)(1.0)
    counted.append(xcache.stats().lowerings)
    xcache.disable()
    xcache.enable()
print(json.dumps(counted))
"""
    cold, warm = (json.loads(place.run(program, XCACHE="1", XCACHE_LOWERING="skip").stdout) for _ in range(2))
    assert [set(each) for each in cold] == [{"no alias"}, {"no alias"}]
    assert [set(each) for each in warm] == [{"skipped"}, {"skipped"}]


@pytest.mark.thorough
def test_what_was_not_lowered_can_be_compiled_after_the_cache_is_off(place):
    ran = [place.run(program_text("compile_after_switching")) for _ in range(2)]
    assert {(each.returncode, each.stderr) for each in ran} == {(0, "")}
    cold, warm = (json.loads(each.stdout) for each in ran)
    assert warm["shown"] == cold["shown"]
    assert warm["shown"]["restored"]
    assert warm["lowerings"]["skipped"] >= 4
