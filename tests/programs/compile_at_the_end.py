"""Compile in a destructor that runs while the interpreter ends."""

import gc
import os

# jax makes its backends anew there, and would wait for a thread of its own if it tried a TPU.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

x = np.arange(4, dtype=np.float32)


class Meter:
    """Part of a cycle, so that only the collector finds it."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        print("at the end", jax.jit(lambda a: a - 1.5)(x), flush=True)


print(jax.jit(lambda a: jnp.sin(a) * 2)(x), flush=True)
gc.collect()
gc.set_threshold(10**6)
Meter()
