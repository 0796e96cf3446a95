"""Serialize an executable after xcache was switched off."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jaxlib import xla_client

import xcache

owner, name = (xla_client.LoadedExecutable, "serialize")
if not hasattr(owner, name):
    owner, name = xla_client.Client, "serialize_executable"
original = getattr(owner, name)
x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
with xcache.enable() as handle:
    compiled = jax.jit(lambda v: jnp.cumsum(v, 0) @ v.T).lower(x).compile()
    hits = handle.statistics().hits
loaded = deserialize_and_load(*serialize(compiled))
print(hits, float(loaded(x).sum()))
# It stays replaced for as long as it is needed, and no longer.
del compiled, loaded
gc.collect()
with xcache.enable():
    assert getattr(owner, name) is not original
assert getattr(owner, name) is original
