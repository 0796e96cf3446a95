"""xcache stays off where it cannot work, says so in one line, and leaves the program as it is."""

from __future__ import annotations

import os

import pytest

PROGRAM = """
import jax, numpy as np
{change}
print(jax.jit(lambda v: v * 2)(np.float32(4)))
import xcache
print(xcache.stats().requests)
"""
NEW_PARAMETER = """
from jax._src import compiler
original = compiler.compile_or_get_cached
def compile_or_get_cached(backend, computation, devices, compile_options, host_callbacks, executable_devices,
                          pgle_profiler=None, something_new=None):
    return original(backend, computation, devices, compile_options, host_callbacks, executable_devices, pgle_profiler)
compiler.compile_or_get_cached = compile_or_get_cached
"""
MOVED = """
from jax._src import compiler
compiler.moved = compiler.backend_compile_and_load
import types
class Hiding(types.ModuleType):
    def __getattribute__(self, name):
        if name == "backend_compile_and_load" and __import__("sys")._getframe(1).f_code.co_name == "probe":
            raise AttributeError(f"module 'compiler' has no attribute {name!r}")
        return super().__getattribute__(name)
compiler.__class__ = Hiding
"""
WINDOWS = 'import sys, shutil, tempfile; sys.platform = "win32"'


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (NEW_PARAMETER, "another library has replaced a compile function of jax's"),
        pytest.param(MOVED, "no attribute 'backend_compile_and_load'", marks=pytest.mark.thorough),
        pytest.param(WINDOWS, "does not run on Windows", marks=pytest.mark.thorough),
    ],
    ids=["a parameter more", "a function moved", "Windows"],
)
def test_the_cache_stays_off_with_one_line_where_it_is_not_supported(place, change, words):
    result = place.run(PROGRAM.format(change=change), XCACHE="1")
    assert result.stdout.splitlines() == ["8.0", "0"], result.stderr
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert "xcache is off" in result.stderr or "stays off" in result.stderr
    assert not place.dir.exists()


def test_enabling_it_from_code_is_an_error_then(place):
    # The standard library is imported as what it is.
    source = "import sys, shutil, tempfile, xcache\nsys.platform = 'win32'\nxcache.enable()"
    result = place.run(source)
    assert "UnsupportedError" in result.stderr


UNCACHEABLE_KEY = """
from xcache.keys import describe
def broken(*_, **__):
    raise RuntimeError("a defect in making keys")
describe.Surroundings.components = broken
"""


@pytest.mark.once
def test_a_defect_in_xcache_itself_costs_the_program_nothing(place):
    result = place.run(PROGRAM.format(change=UNCACHEABLE_KEY), XCACHE="1")
    assert result.stdout.splitlines() == ["8.0", "1"], result.stderr
    assert "compiling without the cache" in result.stderr


@pytest.mark.once
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a folder away")
def test_a_strangers_folder_is_one_line(place):
    """The daemon is not started there, and nobody is asked there, for one reason."""
    folder = place.root / "strangers"
    folder.mkdir()
    os.chown(folder, 54321, 54321)
    result = place.run(PROGRAM.format(change=""), XCACHE="1", XCACHE_SOCKET=str(folder / "s"))
    assert result.returncode == 0
    assert result.stderr.count("belongs to another user") == 1, result.stderr
