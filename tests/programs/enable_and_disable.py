"""Enable and disable xcache, and compare jax's functions with those from before."""

import jax
import numpy as np

x = np.arange(4.0, dtype=np.float32)
jax.jit(lambda v: v * 2 + 1)(x).block_until_ready()

from jax._src import compiler, traceback_util
from jaxlib import xla_client

import xcache


def touched():
    return (
        compiler.compile_or_get_cached,
        list(traceback_util._exclude_paths),
        getattr(xla_client.LoadedExecutable, "serialize", None),
        getattr(xla_client.Client, "serialize_executable", None),
    )


before = touched()
with xcache.enable() as handle:
    assert compiler.compile_or_get_cached is not before[0]
    jax.jit(lambda v: v * 5)(x)
    assert handle.statistics().misses == xcache.stats().misses == 1
assert touched() == before
jax.jit(lambda v: v * 6)(x)
assert handle.statistics().requests == 1
handle.uninstall()
xcache.enable()
xcache.enable()
jax.clear_caches()
jax.jit(lambda v: v * 5)(x)
assert xcache.stats().hits == 1
xcache.disable()
xcache.disable()
# jax holds an executable from the cache, which needs the other two as they are.
assert touched()[:2] == before[:2]
print("null")
