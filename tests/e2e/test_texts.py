"""The text of a compiled program is that of a program without xcache, whoever stored the executable."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.marks import thorough

STORES = """
import jax, jax.numpy as jnp
def helper(x):
    return jnp.sin(x) * 2
def f(x):
    return helper(x) @ x
jax.jit(f)(jnp.ones((8, 8)))
"""
ASKS = """
# The same program, of other functions at other lines.
import gc, jax, jax.numpy as jnp
def another(x):
    return jnp.sin(x) * 2

def f(x):
    return another(x) @ x

def ask():
    compiled = jax.jit(f).lower(jnp.ones((8, 8))).compile()
    print(compiled.as_text())
    assert compiled.as_text() == compiled.as_text()
    print(compiled.runtime_executable().hlo_modules()[0].to_string())
    print(compiled(jnp.ones((8, 8))).sum())

ask()
"""
LETS_GO = """
import sys
if executables := sys.modules.get("xcache.executables"):
    assert executables._loaded
    del f
    jax.clear_caches()
    gc.collect()
    assert not executables._loaded, "what was asked for its text is never collected"
"""


def run(place, name: str, source: str, **environment: str) -> str:
    """Run a file, so that its name is in the text; return what it prints."""
    (place.root / name).write_text(source)
    done = subprocess.run(
        [sys.executable, name],
        env=place.env | environment,
        cwd=place.root,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("lowering", thorough(["skip", "off"], usual=["skip"]))
def test_the_text_of_a_hit_has_the_files_and_functions_of_the_program_that_asks(place, lowering):
    expected = run(place, "asks.py", ASKS)
    run(place, "stores.py", STORES, XCACHE="1")
    found = run(place, "asks.py", ASKS + LETS_GO, XCACHE="1", XCACHE_LOWERING=lowering)
    assert "asks.py" in found or "another" not in expected
    assert found == expected
