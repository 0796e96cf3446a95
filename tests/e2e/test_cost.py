"""The modules that a program imports with the cache on, and with it off; the benchmark measures the seconds."""

from __future__ import annotations

import json
import sys

MODULES = """
import sys, json
import jax
{before}
jax.devices()
{after}
before = set(sys.modules)
import xcache.plugin
xcache.plugin.initialize()
import jax.numpy as jnp
jax.jit(lambda v: v * 2)(jnp.ones(3)).block_until_ready()
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def imported(place, **environment):
    # The plugin is kept from running by itself, so that what it brings can be told from what jax brings.
    source = MODULES.format(
        before="import os; wanted = os.environ.pop('XCACHE', '')", after="os.environ['XCACHE'] = wanted"
    )
    source = source.replace(
        "before = set", "jax.jit(lambda v: v * 3)(jax.numpy.ones(3)).block_until_ready()\nbefore = set"
    )
    result = place.run(source, **environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_on_it_brings_only_the_standard_library_msgpack_and_zstandard(place):
    tops = {name.partition(".")[0] for name in imported(place, XCACHE="1")}
    assert "xcache" in tops
    foreign = tops - {"xcache", "msgpack", "zstandard"} - set(sys.stdlib_module_names)
    assert {name for name in foreign if not name.startswith("_cython")} == set()
    assert not tops & {"sqlite3", "click", "rich", "sqlite_utils", "watchdog", "asyncio", "xcached"}


def test_off_it_brings_nothing(place):
    assert [name for name in imported(place, XCACHE="0") if name.startswith(("xcache.", "msgpack"))] == []
