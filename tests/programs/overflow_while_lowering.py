"""Lower constants that overflow: numpy warns, or raises if NUMPY_RAISES is set."""

import os

import jax
import jax.numpy as jnp
import numpy as np

if "NUMPY_RAISES" in os.environ:
    np.seterr(over="raise")
x = np.arange(4, dtype=np.float16)
for function, argument in (
    (lambda a: jnp.full((2,), 1e39) + a[0], np.ones(1, np.float32)),
    (lambda a: a.at[jnp.array([1, 9])].get(mode="fill", fill_value=1e10), x),
):
    try:
        print(jax.jit(function)(argument))
    except FloatingPointError as error:
        print("FloatingPointError:", error)
