"""Enable xcache in each mode, and in some that do not exist."""

import jax
import numpy as np

x = np.arange(4.0, dtype=np.float32)
jax.jit(lambda v: v * 2 + 1)(x).block_until_ready()

import xcache
from xcache.errors import ConfigError


def compiled(mode):
    jax.clear_caches()
    with xcache.enable(mode) as handle:
        jax.jit(lambda v: v * 2 + 1)(x).block_until_ready()
        xcache.compile(jax.devices()[0].client, jax.jit(lambda v: v * 3).lower(x).compiler_ir(), jax.devices()[:1])
        return handle.statistics()


for mode in ("foo", "/scratch/x", None):
    try:
        xcache.enable(mode)
    except ConfigError:
        continue
    raise AssertionError(mode)
assert [compiled(mode).requests for mode in ("off", "0", 0)] == [0, 0, 0]
assert compiled("READONLY").misses == compiled("On").misses == compiled("Refresh").misses == 2
assert compiled("1").hits == 2
xcache.compile(jax.devices()[0].client, jax.jit(lambda v: v * 3).lower(x).compiler_ir(), jax.devices()[:1])
assert xcache.stats().requests == 0
